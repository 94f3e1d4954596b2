"""`python -m skyrl_mega.data search`: questions over two passages, and files in the format of Search-R1's users."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig, RetrieverConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import load_prompts
from skyrl_mega.envs import make
from skyrl_mega.envs.search import facts
from skyrl_mega.retriever.corpus import read_passages

CONFIG = EnvironmentConfig(retriever=RetrieverConfig(url="http://127.0.0.1:9"))


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def words(record: dict[str, Any]) -> str:
    return record["prompt"][-1]["content"].rpartition("Question: ")[2]


def test_facts_need_two_passages() -> None:
    passages = facts.passages()
    assert len(passages) == 2 * len(facts.countries()) + len({c.river for c in facts.countries()} - {""})
    for question in facts.questions(facts.countries()):
        first, second = (passages[title] for title in question.chain)
        entity = question.chain[0] if question.chain[0] in question.text else question.country
        bridge = question.country if entity == question.chain[0] else question.chain[0]
        assert entity in question.text and entity in first and bridge in first and bridge in second
        answer = re.compile("|".join(rf"\b{re.escape(a)}(?!\w)" for a in question.answers))
        assert answer.search(second) and not answer.search(first) and not answer.search(question.text)
        # No single passage has both the subject of the question and the answer.
        assert not [t for t in passages.values() if entity in t and answer.search(t)]
        # The answer is unique: the subject of the question leads to a single bridge.
        assert [t for t in passages.values() if t == first] == [first]


def test_held_out_facts_are_of_other_countries(tmp_path: Path) -> None:
    files = prepare(f"search --output {tmp_path} --shots 2 --seed 3")
    assert [f.name for f in files] == ["train.parquet", "test.parquet", "corpus.parquet"]
    train, test = read(tmp_path, "train"), read(tmp_path, "test")
    assert len(train) > 150 and len(test) > 30
    by_question = {q.text: q for q in facts.questions(facts.countries())}
    known, held = ({by_question[words(r)].country for r in rows} for rows in (train, test))
    shown = {by_question[m["content"].rpartition("Question: ")[2]].country for m in train[0]["prompt"][1:8:6]}
    assert known.isdisjoint(held) and len(shown) == 2 and shown.isdisjoint(known | held)
    assert len(list(read_passages(tmp_path / "corpus.parquet"))) == len(facts.passages())
    again = prepare(f"search --output {tmp_path / 'again'} --shots 2 --seed 3")
    assert [f.read_bytes() for f in again] == [f.read_bytes() for f in files]


def test_facts_are_answered(tmp_path: Path) -> None:
    prepare(f"search --output {tmp_path} --shots 1")
    prompts = load_prompts([tmp_path / "train.parquet", tmp_path / "test.parquet"], CONFIG)
    by_question = {q.text: q for q in facts.questions(facts.countries())}
    for prompt in prompts:
        assert [m["role"] for m in prompt.messages] == ["system", *["user", "assistant"] * 3, "user"]
        right = by_question[prompt.messages[-1]["content"]].answers[0]
        for answer, reward in ((right, 1.0), ("Atlantis", 0.0)):
            output = make("search", prompt.extras, CONFIG, max_turns=2).step(f"<answer>{answer}</answer>")
            assert output["reward"] == reward


def test_search_r1_s_own_schema(tmp_path: Path) -> None:
    """Reads PeterJinGo/nq_hotpotqa_train: `golden_answers`, and `reward_model` with equal `ground_truth.target`."""
    source = tmp_path / "source"
    source.mkdir()
    row = {"id": "train_0", "question": "who?", "golden_answers": ["A. B.", "b"], "data_source": "nq"}
    row["reward_model"] = {"style": "rule", "ground_truth": {"target": ["A. B.", "b"]}}
    other = {"question": "when?", "reward_model": {"ground_truth": {"target": ["1912"]}}, "data_source": "hotpotqa"}
    (source / "train.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
    official = [{"_id": "x", "question": "where?", "answer": "Oslo", "supporting_facts": [["Norway", 0], ["Oslo", 1]]}]
    (source / "test.json").write_text(json.dumps(official))
    (source / "corpus.jsonl").write_text(
        "\n".join(json.dumps({"id": i, "title": t, "text": "x"}) for i, t in enumerate(["A", "Oslo", "B", "Norway"]))
    )
    prepare(f"search --source {source} --output {tmp_path / 'out'} --passages 3")
    train, (test,) = read(tmp_path / "out", "train"), read(tmp_path / "out", "test")
    assert [r["reward_spec"]["ground_truth"]["target"] for r in train] == [["A. B.", "b"], ["1912"]]
    assert [r["data_source"] for r in train] == ["searchR1_nq", "searchR1_hotpotqa"]
    assert test["extra_info"]["titles"] == ["Norway", "Oslo"] and test["data_source"] == "searchR1_test"
    assert [m["role"] for m in test["prompt"]] == ["system", "user"]
    assert test["prompt"][1]["content"].endswith("For example, <answer> Beijing </answer>. Question: where?")
    assert [p["title"] for p in read(tmp_path / "out", "corpus")] == ["A", "Oslo", "Norway"]


def test_shots_before_questions_of_a_file_are_facts(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "Who wrote it?", "answer": "x"}))
    prepare(f"search --source {tmp_path / 'train.jsonl'} --output {tmp_path} --shots 2 --seed 3")
    (row,) = read(tmp_path, "train")
    prepare(f"search --output {tmp_path / 'facts'} --shots 2 --seed 3")
    assert row["prompt"][:-1] == read(tmp_path / "facts", "train")[0]["prompt"][:-1]
    assert row["prompt"][-1] == {"role": "user", "content": "Who wrote it?"}


def test_test_questions_that_training_knows_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = [{"question": "Who wrote it?", "answer": "x", "supporting_facts": [["T", 0]]}]
    test = [
        {"question": "who wrote it", "answer": "x"},
        {"question": "another", "answer": "y", "supporting_facts": [["T", 0], ["U", 0]]},
        {"question": "a third", "answer": "z", "supporting_facts": [["U", 0]]},
    ]
    for name, rows in (("train", train), ("test", test)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare(f"search --source {tmp_path / 'train.jsonl'} --held-out {tmp_path / 'test.jsonl'} --output {tmp_path}")
    assert [words(r) for r in read(tmp_path, "test")] == ["a third"]
    assert "2 of 3 test questions are left out" in capsys.readouterr().err
    files = f"--source {tmp_path / 'train.jsonl'} --held-out {tmp_path / 'test.jsonl'}"
    prepare(f"search {files} --output {tmp_path} --whole-test")
    assert len(read(tmp_path, "test")) == 3 and "left out" not in capsys.readouterr().err


def test_real_questions_over_the_real_corpus(real_data: Path, tmp_path: Path) -> None:
    source = real_data / "data" / "search"
    prepare(
        f"search --source {source}/hotpotqa_train_500_with_context.jsonl --held-out {source}/2wiki_dev_354_gold.jsonl "
        f"--corpus {source}/corpus.jsonl --passages 2500 --output {tmp_path}"
    )
    train, test = read(tmp_path, "train"), read(tmp_path, "test")
    assert (len(train), len(test), len(read(tmp_path, "corpus"))) == (500, 353, 2500)
    titles = {p["title"] for p in read(tmp_path, "corpus")}
    wanted = {title for r in train + test for title in r["extra_info"]["titles"]}
    assert all(len(r["extra_info"]["titles"]) >= 2 for r in train) and wanted <= titles


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--corpus x", "--corpus: the option is for your own questions and needs --source"),
        ("--shots 99", "--shots 99: allowed: at most"),
        ("--source absent", "--source absent: allowed: a file, or a folder with train and test"),
        ("--source {bad}", "row 0: it has no answer; allowed is one of the columns golden_answers"),
        ("--source {bad} --shots 99", "--shots 99: allowed: at most"),
        ("--source {bad} --passages 0", "--passages 0: allowed is a whole number from 1 to"),
        ("--source {bad} --held-out absent.jsonl", "absent.jsonl: no such file"),
    ],
)
def test_wrong_sources_are_one_line(arguments: str, said: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "q"}' if "held" not in arguments else '{"question": "q", "answer": "a"}')
    with pytest.raises(UserError) as caught:
        prepare(f"search --output {tmp_path / 'out'} {arguments.format(bad=bad)}")
    assert said in str(caught.value) and "\n" not in str(caught.value)
