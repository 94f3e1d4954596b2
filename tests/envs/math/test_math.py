"""Mathematics: DAPO's published rules, algebra within a time limit, data."""

from __future__ import annotations

import itertools
import json
import os
import resource
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.math_pairs import by_hand
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import load_prompts
from skyrl_mega.envs import make
from skyrl_mega.envs.math import cost
from skyrl_mega.envs.math.answer import extract
from skyrl_mega.envs.math.check import MathWorker, _process_pools, algebra
from skyrl_mega.envs.math.env import same
from skyrl_mega.envs.math.reading import read
from skyrl_mega.envs.registry import check
from skyrl_mega.rollout.agent.env_pool import Call


def test_a_worker_of_a_process_with_over_1024_open_files_answers() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        worker = MathWorker()
        worker.ready()
        assert worker.ask("\\frac{1}{2}", "0.5", 20.0) is True
        worker.kill()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def reward(env: str, gold: Any, action: str, **options: Any) -> float:
    config = EnvironmentConfig(options={env: options})
    output = make(env, {"reward_spec": {"method": "rule", "ground_truth": gold}}, config).step(action)
    assert output["done"] and output["observations"] == []
    return output["reward"]


@pytest.mark.parametrize(
    "action, expected",
    [
        ("Answer: 34", 1),
        ("answer : 34", 1),
        ("so\nAnswer: \\boxed{34}", 1),
        ("Answer: $34$.", 1),
        ("Answer: x = 34", 1),
        ("Answer: 34 degrees", 1),
        ("Answer: 34^\\circ", 1),
        ("Answer: 35\nAnswer: 34", 1),  # the last answer counts
        ("Answer: 34\nAnswer: 35", -1),
        ("the product is \\boxed{34}", 1),
        ("\\boxed{34} no, \\boxed{35}", -1),
        ("34", -1),
        ("", -1),
        ("Answer: 34" + " " * 300, -1),  # not in the last 300 characters
        ("Answer: 34<|im_end|>Answer: 35", 1),
        ("Answer: 3 4", -1),  # unlike DAPO: two numbers are not a single number
        ("Answer: 34 or 35", -1),
    ],
)
def test_dapos_rules(action: str, expected: float) -> None:
    assert reward("aime", "34", action) == expected


def test_scores_are_settings() -> None:
    assert [reward("math", "2", f"\\boxed{{{x}}}") for x in (2, 3)] == [1, 0]
    assert [reward("math", "2", f"\\boxed{{{x}}}", wrong=-1) for x in (2, 3)] == [1, -1]
    assert reward("aime", "2", "\\boxed{2}", answer="line") == -1
    assert reward("aime", "2", "Answer: 2", answer="boxed") == -1
    assert reward("aime", 2, "Answer: 2") == 1
    assert reward("math", "\\sqrt{8}", "\\boxed{2\\sqrt{2}}", algebra=False) == 0


@pytest.mark.parametrize(
    "text, form, expected",
    [
        (r"\boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1", "either", None),
        (r"\boxed{3} Answer: 4", "either", "4"),
        (r"Answer: 4 is \boxed{3}", "either", "3"),
        (r"Answer: 4, so \boxed{3}", "line", "3"),
        ("Answer:\n4", "line", None),
        (r"so \boxed{3}", "dapo", None),
        (r"Answer: 4 is \boxed{3}", "dapo", r"4 is \boxed{3}"),
        ("Answer: 3\nAnswer : x + 2 = 4", "dapo", "x + 2 = 4"),
        ("ANSWER:\n4\nthat is it", "dapo", "4"),
        ("Answer: 4<|im_end|>", "dapo", "4"),
        ("**Answer:** 4", "dapo", "** 4"),
    ],
)
def test_where_an_answer_is(text: str, form: str, expected: str | None) -> None:
    assert extract(text, form) == expected


@pytest.mark.parametrize(
    "action, either, dapo",
    [
        ("Answer: 34", 1, 1),
        ("Answer: $34$", 1, 1),
        (r"Answer: \boxed{34}", 1, 1),
        (r"\boxed{34}", 1, -1),
        (r"Answer: 35, no: \boxed{34}", 1, -1),
        (r"Answer: 34. Or \boxed{35}?", -1, -1),
        ("Answer:\n34", -1, 1),
        ("Answer: 30 + 4 = 34", -1, 1),
        ("Answer: 34 degrees", 1, 1),
        ("Answer: 3 4", -1, 1),
        ("**Answer:** 34", 1, -1),
        ("Answer: 34.", 1, -1),
        ("Answer: 34.0", 1, -1),
        ("Answer: 34" + " " * 300, -1, -1),
    ],
)
def test_the_published_grader(action: str, either: int, dapo: int) -> None:
    assert reward("aime", "34", action) == either
    assert reward("aime", "34", action, answer="dapo") == dapo


def test_the_published_grader_reads_an_answer_in_the_channels_of_harmony() -> None:
    analysis = "<|channel|>analysis<|message|>maybe Answer: 33<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>Answer: 34"
    assert reward("aime", "34", analysis + final, answer="dapo") == 1
    assert reward("aime", "33", analysis, answer="dapo") == 1, "without a final answer, that of the analysis counts"


def test_pairs_by_hand() -> None:
    """Compares pairs written by hand: letters, equations, lists, ratios, units and percentages stay distinct.

    Different notations of the same value are equal.
    """
    wrong = [(pair.gold, pair.answer) for pair in by_hand() if same(pair.gold, pair.answer, 20) != pair.same]
    swapped = [(pair.gold, pair.answer) for pair in by_hand() if not pair.same and same(pair.answer, pair.gold, 20)]
    assert (wrong, swapped) == ([], [])


@pytest.mark.parametrize(
    "answer, kind",
    [
        ("1,234", "number"),
        ("1, 234", "list"),
        ("3 cm^2", "number"),
        ("3x^2", "expression"),
        ("2x+1=0", "equation"),
        ("x=3", "number"),
        ("AB", "name"),
        ("no solution", "words"),
        ("(1,2)", "tuple"),
        ("2:3", "ratio"),
        ("1101_2", "base"),
        ("42\\text{ is wrong}", "opaque"),
        ("--42", "opaque"),
        ("4 2", "opaque"),
    ],
)
def test_what_an_answer_is_read_as(answer: str, kind: str) -> None:
    reading = read(answer)
    assert reading is not None and reading.kind == kind


@pytest.mark.parametrize(
    "text", ["9^{9^{9^9}}", "9^{9^9}", "9^9^9^9", "10^{9999999}", "99999!", "(x+y)^{5000}", "x^{10!}",
             "\\binom{999999}{5000}", "((((((((((((((((((((((x))))))))))))))))))))))", "5!!", "2^{99999}"]
)  # fmt: skip
def test_what_algebra_could_not_finish_is_never_asked(text: str) -> None:
    assert cost.too_expensive(text) and not same("x+1", f"{text}+x", 20)


@pytest.mark.parametrize(
    "text", ["\\frac{1}{2^{98}}", "2^{2^{10}}", "1007^{1007}", "(x+1)^{12}", "20!", "x^{2^n}", "(n+1)!"]
)
def test_what_is_asked_all_the_same(text: str) -> None:
    assert not cost.too_expensive(text)


def test_waiting_for_a_worker_is_no_work() -> None:
    """Delays a call in the queue: waiting does not count as work, and the call is not given up."""
    pool, _ = _process_pools()
    taken = [pool.get() for _ in range(pool.qsize())]
    call = Call(lambda: same("\\sqrt{8}", "2\\sqrt{2}", 20))
    thread = threading.Thread(target=call.run)
    thread.start()
    end = time.monotonic() + 60
    while call.seconds() < 1.5 and time.monotonic() < end:
        time.sleep(0.05)
    assert call.seconds() >= 1.5 and call.working() < call.seconds() - 1
    for worker in taken:
        pool.put(worker)
    thread.join(120)
    assert 0 < call.working() < call.seconds() - 1


@pytest.mark.parametrize(
    "gold, answer, expected",
    [
        ("0.5", r"\frac{1}{2}", True),
        ("3/4", "0.75", True),
        (r"-\frac{2}{4}", "-0.5", True),
        ("12", "12.0", True),
        ("12", "-12", False),
        ("0.333", "1/3", False),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"\frac{\pi}{2}", r"\pi/2", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "(2,1)", False),
        ("[0,1)", "[0,1]", False),
        ("p - q", "q - p", False),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
        ("7", "", False),
        ("7", "}{\\frac", False),
    ],
)
def test_equality(gold: str, answer: str, expected: bool) -> None:
    assert same(gold, answer, 20) is expected


def test_what_is_parsed_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for text in (f"__import__('os').system('touch {mark}')", f"\\text{{__import__('os').mkdir('{mark}')}}+1"):
        assert same("x", text, 5) is False
    assert not mark.exists()


def test_algebra_that_never_ends_is_stopped_in_any_thread() -> None:
    assert algebra("x", "x", 30)[0]  # starts a worker
    results: list[bool] = []
    start = time.monotonic()
    threads = [threading.Thread(target=lambda: results.append(algebra("9^{9^{9^9}}", "x+1", 1)[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [False, False] and time.monotonic() - start < 100
    assert same(r"\sqrt{8}", r"2\sqrt{2}", 30)  # the next call is served


def test_answers_to_the_real_problems(real_data: Path) -> None:
    """Scores real gold answers: each is right for its own problem and wrong for another problem."""
    problems = json.loads((real_data / "data" / "math" / "rllm_train_math.json").read_text())[::150]
    golds = [p["answer"] for p in problems]
    assert all(reward("math", g, f"thus \\boxed{{{g}}}.") == 1 for g in golds)
    swapped = [reward("math", a, f"\\boxed{{{b}}}") for a, b in itertools.pairwise(golds)]
    equal = sum(Fraction(a) == Fraction(b) for a, b in itertools.pairwise(golds) if (a + b).isdecimal())
    assert sum(swapped) <= equal + 1


def test_a_dapo_file_loads_unchanged(tmp_path: Path) -> None:
    """Loads the columns of DAPO-Math-17k: reward_model instead of reward_spec, no env_class."""
    row = {
        "data_source": "math_dapo",
        "prompt": [{"content": "What is 30 + 4?", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    config = EnvironmentConfig(default="aime")
    prompt = load_prompts([tmp_path / "train.parquet"], config)[0]
    assert make(prompt.env_class, prompt.extras, config).step("Answer: 34")["reward"] == 1
    pq.write_table(pa.Table.from_pylist([{**row, "reward_model": {"style": "x"}}]), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"row 0, column reward_spec\.ground_truth: it is missing"):
        load_prompts([tmp_path / "bad.parquet"], config)


def test_small_problems_share_none_and_their_answers_are_right(tmp_path: Path) -> None:
    prepare(f"math --output {tmp_path}")
    train, test = (load_prompts([tmp_path / f"{s}.parquet"], EnvironmentConfig()) for s in ("train", "test"))
    texts = [{p.messages[0]["content"] for p in split} for split in (train, test)]
    assert len(texts[0]) == 1000 and len(texts[1]) == 200 and texts[0].isdisjoint(texts[1])
    for prompt in test[:12]:
        env = make(prompt.env_class, prompt.extras, EnvironmentConfig())
        assert env.step(f"Answer: \\boxed{{{prompt.extras['reward_spec']['ground_truth']}}}")["reward"] == 1
    lines = [p for p in train if "Solve" in p.messages[0]["content"] and "for $x$" in p.messages[0]["content"]]
    for prompt in lines[:20]:
        left, right = prompt.messages[0]["content"].split("$")[3].split("=")
        a, b = left.split("x +")
        assert int(a) * int(prompt.extras["reward_spec"]["ground_truth"]) + int(b) == int(right)


def test_files_of_all_forms(tmp_path: Path, real_data: Path) -> None:
    source = real_data / "data" / "math"
    prepare(
        f"math --output {tmp_path} --env aime --limit 20 --train-file {source / 'dapo_math_17k_sample8.jsonl'} "
        f"--test-file {source / 'aime24.json'}"
    )
    train, test = (pq.read_table(tmp_path / f"{s}.parquet").to_pylist() for s in ("train", "test"))
    assert len(train) == 8 and len(test) == 20 and train[0]["env_class"] == "aime"
    assert all(r["prompt"][0]["content"].startswith("Solve the following math problem") for r in [*train, *test])
    pq.write_table(
        pa.Table.from_pylist(
            [{"prompt": r["prompt"], "reward_model": {"ground_truth": r["reward_spec"]["ground_truth"]}} for r in test]
            * 3
        ),
        tmp_path / "again.parquet",
    )
    (tmp_path / "same.jsonl").write_text(
        json.dumps({"problem": json.loads((source / "aime24.json").read_text())[0]["problem"], "answer": "1"})
    )
    prepare(
        f"math --output {tmp_path / 'b'} --train-file {source / 'aime24.json'} --test-file {tmp_path / 'again.parquet'}"
    )
    left, held = (pq.read_table(tmp_path / "b" / f"{s}.parquet").num_rows for s in ("train", "test"))
    assert (left, held) == (10, 20)  # repeated rows once, and no test problem in the training rows


def test_shots_are_shown_and_not_asked(tmp_path: Path) -> None:
    prepare(f"math --output {tmp_path} --shots 2")
    prompts = load_prompts([tmp_path / "train.parquet", tmp_path / "test.parquet"], EnvironmentConfig())
    shown = prompts[0].messages[:4]
    assert [m["role"] for m in shown] == ["user", "assistant"] * 2
    assert all(p.messages[:4] == shown and p.messages[4] not in shown and len(p.messages) == 5 for p in prompts)


def test_problems_whose_answer_is_empty_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("one", "1"), ("two", None), ("three", " "), ("four", 4)]
    (tmp_path / "p.json").write_text(json.dumps([{"problem": p, "answer": a} for p, a in rows]))
    prepare(f"math --output {tmp_path} --train-file {tmp_path / 'p.json'}")
    prepared = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["reward_spec"]["ground_truth"] for row in prepared] == ["1", "4"]
    assert "p.json: 2 of 4 problems have an empty answer and are left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "record, said",
    [({"problem": "x"}, "row 0: it has no answer"), ({"answer": "x"}, "row 0: it has no problem"), (3, "no answer")],
)
def test_wrong_files_are_one_line(tmp_path: Path, record: Any, said: str) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(record))
    with pytest.raises(UserError, match=said):
        prepare(f"math --output {tmp_path} --train-file {tmp_path / 'p.jsonl'}")


def test_wrong_options() -> None:
    with pytest.raises(
        UserError, match=r"environment\.options\.math\.answer = last: allowed is one of either, boxed, line, dapo"
    ):
        check(EnvironmentConfig(options={"math": {"answer": "last"}}))
