"""Sources of `python -m skyrl_mega.data`: external records, intact and damaged."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from random import Random
from typing import Any

from skyrl_mega.data.prepare import prepare
from tests.fuzz import queries
from tests.fuzz.target import Target
from tests.fuzz.values import packed, real, replaced, spoilt, unpacked, value

SOURCES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "gsm8k": (
        "gsm8k --source {folder} --shots 1",
        {"{}.jsonl": {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"}},
    ),
    "math": (
        "math --train-file {folder}/train.jsonl --test-file {folder}/test.jsonl --shots 1",
        {"{}.jsonl": {"problem": "What is $1+1$?", "answer": "2"}},
    ),
    "dapo": (
        "math --env aime --train-file {folder}/train.jsonl",
        {"{}.jsonl": {"prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": "2"}}},
    ),
    "text2sql": (
        "text2sql --source {folder} --turns 3 --longest 5000",
        {
            "{}.json": {
                "db_id": "library",
                "question": "How many?",
                "query": "SELECT count(*) FROM book",
                "evidence": "",
            }
        },
    ),
    "search": (
        "search --source {folder} --passages 3",
        {
            "{}.jsonl": {
                "question": "Who?",
                "answer": ["x"],
                "supporting_facts": [["T", 0]],
                "paragraphs": [{"title": "T", "is_gold": True}],
                "data_source": "hotpotqa",
            },
            "corpus.jsonl": {"id": "1", "title": "T", "text": "x is who."},
        },
    ),
    "lcb": (
        "lcb --train-file {folder}/train.jsonl",
        {
            "{}.jsonl": {
                "question_content": "Add.",
                "starter_code": "",
                "public_test_cases": '[{"input": "1", "output": "1", "testtype": "stdin"}]',
                "private_test_cases": "[]",
                "metadata": '{"func_name": "f"}',
            }
        },
    ),
    "swe": (
        "swe --source {folder}",
        {"tasks/task.json": {"instruction": "Fix it.", "test": "true", "split": "train"}},
    ),
}


def _data(random: Random) -> Any:
    name = random.choice(list(SOURCES))
    files: dict[str, str] = {}
    for pattern, record in SOURCES[name][1].items():
        for split in ("train", "test") if "{}" in pattern else ("",):
            records = [{**record, "question": f"q{i}{split}"} if "question" in record else record for i in range(3)]
            if random.random() < 0.6:
                records[1] = random.choice((replaced(random, record), real(value(random))))
            file = pattern.format(split)
            one = json.dumps(records[1] if name == "swe" else records)
            lines = "\n".join(map(json.dumps, records))
            data = (lines if file.endswith("l") else one).encode()
            files[file] = packed(spoilt(random, data) if random.random() < 0.25 else data)
    return {"arguments": SOURCES[name][0], "files": files}


def _run(case: Any, folder: Path) -> None:
    source = folder / "source"
    for name, data in case["files"].items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(unpacked(data))
    (source / "tasks" / "repo").mkdir(parents=True, exist_ok=True)
    (source / "database" / "library").mkdir(parents=True)
    queries.write(source / "database" / "library" / "library.sqlite")
    with contextlib.redirect_stderr(io.StringIO()):
        prepare([*case["arguments"].format(folder=source).split(), "--output", str(folder / "out")])


TARGETS = {"data": Target(_data, _run)}
