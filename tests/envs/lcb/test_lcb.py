"""Code generation: both kinds of LiveCodeBench tests, and cheating or harmful programs."""

from __future__ import annotations

import base64
import json
import pickle
import time
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import load_prompts
from skyrl_mega.envs import make
from skyrl_mega.envs.lcb.judge import cases, code_of, same_output

STDIN = [
    {"input": "2\n3 4\n", "output": "7\n", "testtype": "stdin", "metadata": {"func_name": None}},
    {"input": "1\n5\n", "output": "5", "testtype": "stdin", "metadata": {}},
]
CALLS = [
    {"input": "[3, 1, 2]\n2", "output": "[1, 2]", "testtype": "functional", "metadata": {"func_name": "lowest"}},
    {"input": "[9]\n1", "output": "[9]", "testtype": "functional", "metadata": '{"func_name": "lowest"}'},
]


def judged(tests: list[dict[str, Any]], code: str, **options: Any) -> tuple[float, list[str]]:
    config = EnvironmentConfig(options={"lcb": {"sandbox": {"wall_s": 4, "memory_mib": 256}, **options}})
    env = make("lcb", {"reward_spec": {"method": "rule", "ground_truth": json.dumps(tests)}}, config)
    output = env.step(f"I think:\n```python\n{code}\n```\n")
    assert output["done"]
    return output["reward"], output["metadata"]["verdicts"]


SUM = "input()\nprint(sum(map(int, input().split())))"
LOWEST = "class Solution:\n    def lowest(self, n: List[int], k: int) -> List[int]:\n        return sorted(n)[:k]"


@pytest.mark.parametrize(
    "tests, code, reward",
    [
        (STDIN, SUM, 1),
        (STDIN, "print(7)", 0),
        (STDIN, "import sys\nsys.exit(1)", 0),
        (STDIN, SUM + "\nraise SystemExit(3)", 0),
        (STDIN, "def", 0),
        (CALLS, LOWEST, 1),
        (CALLS, "def lowest(n, k):\n    print('thinking', [1, 2])\n    return sorted(n)[:k]", 1),
        (CALLS, "def lowest(n, k):\n    return tuple(heapq.nsmallest(k, n))", 1),
        (CALLS, "def lowest(n, k):\n    return n[:k]", 0),
        (CALLS, "def highest(n, k):\n    return 1", 0),
        (CALLS, "import sys\nprint('[1, 2]')\nsys.exit(0)", 0),
    ],
)
def test_tests_decide(tests: list[dict[str, Any]], code: str, reward: float) -> None:
    assert judged(tests, code)[0] == reward


def test_a_share_counts_all_tests_and_all_stops_at_the_first() -> None:
    half = "n = int(input())\nprint(7 if n == 2 else 0)"
    assert judged(STDIN, half, reward="share") == (0.5, ["ok", "wrong"])
    assert judged(STDIN[::-1], half) == (0.0, ["wrong"])
    assert judged(STDIN, half, max_tests=1) == (1.0, ["ok"])


def test_all_tests_share_a_time() -> None:
    start = time.monotonic()
    slow = "import time\ntime.sleep(2.5)\n" + SUM
    reward, verdicts = judged(STDIN * 5, slow, reward="share", timeout_s=7)
    assert verdicts[0] == "ok" and verdicts[2:] == ["timeout"] * 8 and reward <= 0.2
    assert time.monotonic() - start < 24


@pytest.mark.parametrize(
    "code, verdict",
    [
        ("while True: pass", "timeout"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
        ("x = bytearray(2**40)", "failed"),
        ("while True: print('x' * 10**6)", "output"),
        ("print(open('/etc/passwd').read())", "failed"),
        ("import os\nos.kill(os.getppid(), 9)\nprint(8)", "wrong"),
    ],
)
def test_harm_is_contained_and_scored(code: str, verdict: str) -> None:
    reward, verdicts = judged(STDIN, code)
    assert reward == 0 and verdicts[0] in (verdict, "failed" if verdict == "wrong" else verdict)


def test_expected_outputs_are_not_inside() -> None:
    code = "import os\nprint('8128' in ''.join(open(f).read() for f in os.listdir('.')) or '8128' in str(os.environ))"
    assert judged([{"input": "", "output": "8128", "testtype": "stdin"}, *STDIN], code, reward="share")[1][0] == "wrong"


@pytest.mark.parametrize(
    "printed, expected, same",
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1.0 2\n", "1 2.00", True),
        (" 1 \n", "1", True),
        ("1\n2", "1 2", False),
        ("yes", "Yes", False),
        ("1", "1\n2", False),
        ("", "", True),
        ("0.30000000000000004", "0.3", False),
    ],
)
def test_outputs_compare_as_livecodebenchs(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


def test_the_last_block_is_the_program() -> None:
    assert code_of("```python\na\n```\nthen\n```\nb\n```") == "b\n"
    assert code_of("no block") is None


def test_tests_that_are_none() -> None:
    for wrong in ("[]", '[{"input": "", "output": "", "testtype": "functional"}]'):
        with pytest.raises(ValueError):
            cases(wrong)


def test_a_file_of_skyrls_schema_loads_unchanged(tmp_path: Path) -> None:
    row = {
        "data_source": "lcb",
        "prompt": [{"role": "user", "content": "sum"}],
        "env_class": "lcb",
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(STDIN)},
        "extra_info": {"split": "train", "index": 0, "reference": None},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    prompt = load_prompts([tmp_path / "train.parquet"], EnvironmentConfig())[0]
    env = make(prompt.env_class, prompt.extras, EnvironmentConfig(), 1)
    assert env.step(f"```python\n{SUM}\n```")["reward"] == 1.0


def test_livecodebenchs_own_files(tmp_path: Path) -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(CALLS[1:])))).decode()
    record = {
        "question_content": "The k lowest.",
        "starter_code": "class Solution:\n    def lowest",
        "public_test_cases": json.dumps([{k: v for k, v in CALLS[0].items() if k != "metadata"}]),
        "private_test_cases": packed,
        "metadata": json.dumps({"func_name": "lowest"}),
    }
    other = {**record, "question_content": "Another."}
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, (record, other))))
    (tmp_path / "held.jsonl").write_text(json.dumps(other))
    prepare(f"lcb --output {tmp_path} --train-file {tmp_path / 'all.jsonl'} --test-file {tmp_path / 'held.jsonl'}")
    train, test = (load_prompts([tmp_path / f"{s}.parquet"], EnvironmentConfig()) for s in ("train", "test"))
    assert len(train) == len(test) == 1 and "The k lowest." in train[0].messages[0]["content"]
    env = make("lcb", train[0].extras, EnvironmentConfig())
    output = env.step(f"```python\n{LOWEST}\n```")
    assert output["reward"] == 1.0 and output["metadata"]["verdicts"] == ["ok", "ok"]


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    packed = base64.b64encode(zlib.compress(pickle.dumps(Harm()))).decode()
    record = {"question_content": "q", "public_test_cases": "[]", "private_test_cases": packed}
    (tmp_path / "f.jsonl").write_text(json.dumps(record))
    with pytest.raises(UserError, match="row 0: it is not a task in LiveCodeBench's format"):
        prepare(f"lcb --output {tmp_path} --train-file {tmp_path / 'f.jsonl'}")
    assert not (tmp_path / "ran").exists()


def test_small_tasks(tmp_path: Path) -> None:
    prepare(f"lcb --output {tmp_path}")
    train, test = (load_prompts([tmp_path / f"{s}.parquet"], EnvironmentConfig()) for s in ("train", "test"))
    texts = [{p.messages[0]["content"] for p in split} for split in (train, test)]
    assert len(texts[0]) == len(train) == 100 and len(texts[1]) == 20 and texts[0].isdisjoint(texts[1])
    programs = {
        "the sum of the numbers that 6 divides": (
            "input()\nprint(sum(x for x in map(int, input().split()) if x % 6 == 0))"
        ),
        "how many of the numbers are above 6": (
            "class Solution:\n    def solve(self, n):\n        return sum(x > 6 for x in n)"
        ),
    }
    for task, code in programs.items():
        prompt = next(p for p in test if task in p.messages[0]["content"])
        assert make("lcb", prompt.extras, EnvironmentConfig()).step(f"```python\n{code}\n```")["reward"] == 1.0
