"""`python -m skyrl_mega.data`: the files, and the messages about wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import load_prompts
from skyrl_mega.data.write import write_rows
from skyrl_mega.envs import make
from skyrl_mega.envs.multiply.schoolbook import worked_answer
from skyrl_mega.envs.pairs import disjoint_pairs

ROOT = Path(__file__).parents[2]


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def operands(row: dict[str, Any], sign: str) -> tuple[int, int]:
    a, b = row["prompt"][-1]["content"].split(sign)
    return int(a), int(b)


def test_addition(tmp_path: Path) -> None:
    prepare(f"addition --output {tmp_path} --train 500 --test 100 --demonstrations 1000 --wrong 0.3 --seed 1")
    train, test, shown = (read(tmp_path, n) for n in ("train", "test", "demonstrations"))
    assert (len(train), len(test), len(shown)) == (500, 100, 1000)
    for row in [*train, *test, *shown]:
        a, b = operands(row, "+")
        assert 10 <= a <= 99 and 10 <= b <= 99
        assert int(row["reward_spec"]["ground_truth"][::-1]) == a + b
    unordered = {frozenset(operands(r, "+")) for r in train}
    assert unordered.isdisjoint({frozenset(operands(r, "+")) for r in test})
    assert {operands(r, "+") for r in shown} <= {operands(r, "+") for r in train}
    wrong = [r for r in shown if r["extra_info"]["demonstration"] != r["reward_spec"]["ground_truth"]]
    assert len(wrong) == 300 and all(r["extra_info"]["wrong"] for r in wrong)
    assert all(20 <= int(r["extra_info"]["demonstration"][::-1]) <= 198 for r in shown)


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    contents = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        files = prepare(["addition", "--output", str(tmp_path / name), "--train", "50", "--seed", str(seed)])
        contents.append([f.read_bytes() for f in files])
    assert contents[0] == contents[1]
    assert all(x != y for x, y in zip(contents[0], contents[2], strict=True))


@pytest.mark.parametrize("how", ["another program's", "changed", "of the same rows", "a link to another's"])
def test_a_file_of_a_user_is_not_written_over(tmp_path: Path, how: str) -> None:
    """Overwrites unchanged files of the command only."""
    for seed in (1, 2):
        prepare(f"addition --output {tmp_path} --train 50 --test 10 --seed {seed}")
    train, test = tmp_path / "train.parquet", tmp_path / "test.parquet"
    table = pq.read_table(test)
    if how == "another program's":
        pq.write_table(table.replace_schema_metadata(None), test)
    elif how == "changed":
        pq.write_table(table.slice(0, 5), test)  # pyarrow keeps the metadata
    elif how == "of the same rows":
        pq.write_table(table.take(list(reversed(range(10)))), test)
    else:
        pq.write_table(table.slice(0, 5), tmp_path / "mine.parquet")
        test.unlink()
        test.symlink_to(tmp_path / "mine.parquet")
    before = train.read_bytes(), test.read_bytes()
    with pytest.raises(UserError, match=r"test\.parquet was not written by this command, or was changed since"):
        prepare(f"addition --output {tmp_path} --train 50 --test 10 --seed 3")
    assert (train.read_bytes(), test.read_bytes()) == before, "nor the other file"


@pytest.mark.parametrize("digits", [1, 4])
def test_multiply(tmp_path: Path, digits: int) -> None:
    prepare(f"multiply --output {tmp_path} --train 40 --test 10 --digits {digits}")
    prompts = load_prompts([tmp_path / "train.parquet", tmp_path / "test.parquet"], EnvironmentConfig())
    assert [p.uid for p in prompts] == list(range(50))
    for prompt in prompts:
        a, b = map(int, prompt.messages[-1]["content"].split("*"))
        env = make(prompt.env_class, prompt.extras, EnvironmentConfig())
        assert len(str(a)) == len(str(b)) == digits
        assert env.step(f"\\boxed{{{a * b}}}")["reward"] == 1.0


def test_multiplication_on_paper() -> None:
    """Compares each place with the product of the digits up to this place, without the digits already written."""
    for a, b in [(n, d) for n in (1, 27, 345, 708, 999, 86421) for d in range(1, 10)]:
        places = [a % 10 ** (i + 1) * b // 10**i for i in range(len(str(a)))]
        assert worked_answer(a, b) == f"{','.join(map(str, places))}\\boxed{{{a * b}}}"
        for slip in range(1, len(str(a))):
            assert f"{{{a * b}}}" not in worked_answer(a, b, slip)
    assert worked_answer(345, 7, slip=1) == "35,28,23\\boxed{2385}"  # the carry 3 of 35 is forgotten
    assert worked_answer(12, 3, slip=1) == "6,4\\boxed{46}"  # the carry is 0, and 1 is added


def test_demonstrations_of_multiplication(tmp_path: Path) -> None:
    size = "--digits 3 --second 1 --train 300 --test 40"
    prepare(f"multiply --output {tmp_path} {size} --plain --demonstrations 4000 --wrong 0.6 --turns 3")
    train, test = ({operands(r, "*") for r in read(tmp_path, n)} for n in ("train", "test"))
    assert (len(train), len(test), len(train & test)) == (300, 40, 0)
    attempts = wrong = 0
    for row in read(tmp_path, "demonstrations"):
        a, b = operands(row, "*")
        assert (a, b) in train and len(str(a)) == 3 and len(str(b)) == 1 and len(row["prompt"]) == 1
        turns = row["extra_info"]["demonstration"]
        right = [f"{{{a * b}}}" in message["content"] for message in turns[::2]]
        assert right[:-1] == [False] * (len(right) - 1) and (right[-1] or len(right) == 3)
        # The texts between attempts equal the environment's replies.
        env = make("multiply", row, EnvironmentConfig(), max_turns=3)
        replayed = [m for turn in turns[::2] for m in (turn, *env.step(turn["content"])["observations"])]
        assert turns == replayed
        attempts, wrong = attempts + len(right), wrong + right.count(False)
    assert abs(wrong / attempts - 0.6) < 4 * (0.6 * 0.4 / attempts) ** 0.5


@pytest.mark.parametrize("options", ["", "--second 2", "--second 1 --digits 1"])
def test_demonstrations_need_one_digit_to_multiply_by(tmp_path: Path, options: str) -> None:
    with pytest.raises(UserError, match=r"--demonstrations 5: .*give --digits 2 or more, and --second 1"):
        prepare(f"multiply --output {tmp_path} --demonstrations 5 {options}")
    assert list(tmp_path.iterdir()) == []


@given(
    digits=st.tuples(st.integers(1, 5), st.integers(1, 5)).filter(lambda d: d[0] != d[1]),
    train=st.integers(1, 60),
    test=st.integers(0, 20),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_pairs_of_different_lengths(digits: tuple[int, int], train: int, test: int, seed: int) -> None:
    train_pairs, test_pairs = disjoint_pairs(digits[0], train, test, np.random.default_rng(seed), digits[1])
    assert (len(train_pairs), len(test_pairs)) == (train, test)
    both = np.concatenate([train_pairs, test_pairs]).tolist()
    assert len({tuple(pair) for pair in both}) == train + test
    assert {(len(str(a)), len(str(b))) for a, b in both} == {digits}


@given(digits=st.integers(1, 6), train=st.integers(1, 60), test=st.integers(0, 20), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_pairs_are_distinct_and_no_test_pair_is_known(digits: int, train: int, test: int, seed: int) -> None:
    if train + test > 75 and digits == 1:
        return  # 81 pairs in all, at most one pair left out with its mirror image
    train_pairs, test_pairs = disjoint_pairs(digits, train, test, np.random.default_rng(seed))
    assert (len(train_pairs), len(test_pairs)) == (train, test)
    both = np.concatenate([train_pairs, test_pairs])
    assert both.min() >= 10 ** (digits - 1) and both.max() < 10**digits
    assert len({tuple(p) for p in both.tolist()}) == train + test
    assert {frozenset(p) for p in train_pairs.tolist()}.isdisjoint({frozenset(p) for p in test_pairs.tolist()})


def test_gsm8k_from_local_files(real_data: Path, tmp_path: Path) -> None:
    prepare(["gsm8k", "--source", str(real_data / "data" / "gsm8k"), "--output", str(tmp_path)])
    source = [json.loads(line) for line in (real_data / "data" / "gsm8k" / "train.jsonl").open(encoding="utf-8")]
    prompts = load_prompts([tmp_path / "train.parquet"], EnvironmentConfig())
    assert len(prompts) == len(source) == 7473
    for prompt, record in zip(prompts, source, strict=True):
        assert prompt.messages[0]["content"].startswith(record["question"])
        # The data set's own solution is right, a lazy answer is wrong.
        env = make(prompt.env_class, prompt.extras, EnvironmentConfig())
        assert env.step(record["answer"])["reward"] == 1.0
        assert env.step(record["answer"].split("####")[0])["reward"] == 0.0
    assert len(read(tmp_path, "test")) == 660


def run_offline(cache: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """Prepares gsm8k without --source, offline from the hub's local cache."""
    command = [sys.executable, "-m", "skyrl_mega.data", "gsm8k", "--output", str(output)]
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def test_gsm8k_from_the_hub(tmp_path: Path) -> None:
    """Prepares through the hub's client, with a cache in the hub's layout."""
    repository, revision = tmp_path / "cache" / "datasets--openai--gsm8k", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision, encoding="utf-8")
    for split in ("train", "test"):
        rows = [{"question": f"{split}?", "answer": "because\n#### 1,200"}]
        write_rows(rows, repository / "snapshots" / revision / "main" / f"{split}-00000-of-00001.parquet")
    result = run_offline(tmp_path / "cache", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    for split in ("train", "test"):
        (row,) = read(tmp_path / "out", split)
        assert row["prompt"][0]["content"].startswith(f"{split}? Let's think step by step")
        assert row["reward_spec"]["ground_truth"] == "1200"


def test_gsm8k_without_a_hub_says_what_to_do(tmp_path: Path) -> None:
    result = run_offline(tmp_path / "empty", tmp_path / "out")
    assert result.returncode == 2
    assert "cannot be read from the Hugging Face hub" in result.stderr and "--source" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_gsm8k_from_one_file_with_a_limit(tmp_path: Path, suffix: str) -> None:
    records = [{"question": f"{i} + 1?", "answer": f"#### {i + 1},000"} for i in range(9)]
    source = tmp_path / f"mine.{suffix}"
    text = json.dumps(records) if suffix == "json" else "\n".join(map(json.dumps, records))
    source.write_text(text, encoding="utf-8")
    assert prepare(f"gsm8k --source {source} --output {tmp_path} --limit 4") == [tmp_path / "train.parquet"]
    assert [r["reward_spec"]["ground_truth"] for r in read(tmp_path, "train")] == ["1000", "2000", "3000", "4000"]


def test_gsm8k_shots_are_earlier_turns_and_no_rows(real_data: Path, tmp_path: Path) -> None:
    prepare(f"gsm8k --source {real_data / 'data' / 'gsm8k'} --output {tmp_path} --shots 2")
    train = read(tmp_path, "train")
    assert len(train) == 7471 and len({json.dumps(r["prompt"][:4]) for r in train + read(tmp_path, "test")}) == 1
    *shots, question = train[0]["prompt"]
    assert [m["role"] for m in shots] == ["user", "assistant"] * 2 and question["role"] == "user"
    assert train[0]["extra_info"]["question"] in question["content"]
    asked = {r["prompt"][-1]["content"] for r in train}
    for user, assistant in zip(shots[::2], shots[1::2], strict=True):
        assert user["content"] not in asked
        assert "#### " in assistant["content"] and "<<" not in assistant["content"]


def test_gsm8k_shots_need_a_training_set(real_data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--shots 2: the examples are taken from a training set"):
        prepare(f"gsm8k --source {real_data / 'data' / 'gsm8k' / 'test.jsonl'} --output {tmp_path} --shots 2")


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"question": "q"}', "row 1, column answer: allowed: a string"),
        ('{"question": 3, "answer": "#### 3"}', "row 1, column question: allowed: a string"),
        ('{"question": "q", "answer": "three"}', "row 1, column answer: it must end in '#### number'"),
        ('["q"]', "row 1, column question"),
        ("{", "cannot be read as .jsonl"),
    ],
)
def test_a_bad_source_row_is_named_and_leaves_nothing(tmp_path: Path, line: str, said: str) -> None:
    source = tmp_path / "train.jsonl"
    source.write_text('{"question": "q", "answer": "#### 3"}\n' + line, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        prepare(f"gsm8k --source {source} --output {tmp_path / 'out'}")
    assert said in str(caught.value) and str(source) in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("addition --digits 0", "--digits"),
        ("addition --wrong 1.5", "--wrong 1.5: allowed is a number from 0 to 1"),
        ("addition --train 0", "--train 0: allowed is a whole number from 1 to"),
        ("addition --train 9000", "8100 pairs"),
        ("addition --trian 3", "--trian"),
        ("adition", "invalid choice: 'adition'"),
        ("gsm8k --source absent", "--source absent"),
        ("gsm8k --shots -1", "--shots -1: allowed is a whole number from 0 to 1000"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        prepare(arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skyrl_mega.data", "addition", "--wrong", "2", "--output", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: --wrong 2: allowed is a number from 0 to 1; see python -m skyrl_mega.data addition --help"
    ]


def test_a_failed_write_keeps_the_older_file(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    write_rows([{"a": 1}], file)

    def breaks() -> Iterator[dict[str, int]]:
        yield {"a": 2}
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        write_rows(breaks(), file)
    assert pq.read_table(file).to_pylist() == [{"a": 1}]
    assert list(tmp_path.iterdir()) == [file]
