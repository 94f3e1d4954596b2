"""Rows for code generation: LiveCodeBench's files, or small generated tasks."""

from __future__ import annotations

import argparse
import base64
import json
import pickletools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.records import records
from skyrl_mega.config.command import MOST, integer, path_of
from skyrl_mega.envs.row import row

STDIN = "Read the input from standard input and print the answer to standard output."
STARTER = "Complete this code; keep its names:\n```python\n{starter}\n```"
LARGEST = 2**30
"""Maximum size of a task's unpacked tests, in bytes."""
FINAL_INSTRUCTION = "Give the whole program in one ```python block."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data lcb`."""
    form = "a .jsonl file of LiveCodeBench's code_generation_lite"
    parser.add_argument("--train-file", type=path_of, help=f"{form}; without files, small tasks are made")
    parser.add_argument("--test-file", type=path_of, help="such a file; its tasks are left out of the training rows")
    parser.add_argument("--limit", type=integer(1, MOST), help="rows of each split at most")


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name (`train.parquet`, `test.parquet`) → rows, from `--train-file` and `--test-file`, at most
    `--limit` rows each.

    Tasks of the test file are left out of the training rows. With a single file, only that split is returned; without
    files, both splits hold small generated tasks, deterministic in `args.seed`.

    Raises:
        UserError: A file cannot be read or is malformed.
    """
    if args.train_file is None and args.test_file is None:
        train, test = _small(np.random.default_rng(args.seed))
        splits = {"train": train, "test": test}
    else:
        splits = {s: _read(f) for s, f in (("test", args.test_file), ("train", args.train_file)) if f is not None}
        held = {task for task, _ in splits.get("test", [])}
        if "train" in splits:
            splits["train"] = [(task, tests) for task, tests in splits["train"] if task not in held]
    return {f"{split}.parquet": _rows(tasks[: args.limit], split) for split, tasks in splits.items()}


Task = tuple[str, list[dict[str, Any]]]
"""The question, and the tests."""


def _rows(tasks: list[Task], split: str) -> Iterator[dict[str, Any]]:
    for index, (task, tests) in enumerate(tasks):
        yield row(
            data_source="livecodebench",
            prompt=[{"role": "user", "content": f"{task}\n\n{FINAL_INSTRUCTION}"}],
            env_class="lcb",
            ground_truth=json.dumps(tests),
            extra_info={"split": split, "index": index},
        )


def _read(file: Path) -> list[Task]:
    tasks = []
    for index, record in enumerate(records(file)):
        try:
            starter = record.get("starter_code") or ""
            tests = [
                *safe_read.parse_json(record["public_test_cases"]),
                *_private(record.get("private_test_cases") or "[]"),
            ]
            name = safe_read.parse_json(record.get("metadata") or "{}").get("func_name")
            form = STARTER.format(starter=starter) if starter else STDIN
            tasks.append(
                (f"{record['question_content']}\n\n{form}", [{**t, "metadata": {"func_name": name}} for t in tests])
            )
        except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise UserError(
                f"it is not a task in LiveCodeBench's format: {error!r}", key=f"{file}, row {index}"
            ) from error
    return tasks


def _private(text: str) -> list[dict[str, Any]]:
    """Parses tests from JSON, or from base64 of zlib of a pickled JSON string. Nothing is unpickled."""
    if text.lstrip().startswith("["):
        plain = text
    else:
        strings = [argument for _, argument, _ in pickletools.genops(_unpacked(text)) if isinstance(argument, str)]
        if len(strings) != 1:
            raise ValueError("private_test_cases holds more than a string")
        plain = strings[0]
    tests: list[dict[str, Any]] = safe_read.parse_json(plain)
    return tests


def _unpacked(text: str) -> bytes:
    """Returns the bytes inside base64 of zlib; raises ValueError above `LARGEST`, since data may expand a
    thousandfold.
    """
    stream = zlib.decompressobj()
    data = stream.decompress(base64.b64decode(text), LARGEST)
    if stream.unconsumed_tail:
        raise ValueError(f"private_test_cases holds more than {LARGEST} bytes")
    return data


def _small(rng: np.random.Generator) -> tuple[list[Task], list[Task]]:
    """Generates tasks on lists of numbers, each with a parameter; a sixth of the parameters is for testing."""
    kinds: list[tuple[str, Callable[[list[int], int], Any]]] = [
        ("the sum of the numbers that {k} divides", lambda n, k: sum(x for x in n if x % k == 0)),
        ("how many of the numbers are above {k}", lambda n, k: sum(x > k for x in n)),
        ("the largest remainder when the numbers are divided by {k}", lambda n, k: max(x % k for x in n)),
        ("the sum of all numbers times {k}", lambda n, k: sum(n) * k),
    ]
    splits: tuple[list[Task], list[Task]] = ([], [])
    for index, (description, rule) in enumerate(kinds):
        for k in range(2, 32):
            inputs = [rng.integers(1, 100, int(rng.integers(3, 9))).tolist() for _ in range(4)]
            text = description.format(k=k)
            if index % 2:
                starter = "class Solution:\n    def solve(self, numbers: list[int]) -> int:\n        "
                task = f"Return {text}.\n\n{STARTER.format(starter=starter)}"
                tests = [_test(json.dumps(n), json.dumps(rule(n, k)), "functional") for n in inputs]
            else:
                task = f"The first line has n, the second n numbers. Print {text}.\n\n{STDIN}"
                tests = [_test(f"{len(n)}\n{' '.join(map(str, n))}\n", f"{rule(n, k)}\n", "stdin") for n in inputs]
            splits[k % 6 == 0].append((task, tests))
    return splits


def _test(test_input: str, expected: str, kind: str) -> dict[str, Any]:
    return {"input": test_input, "output": expected, "testtype": kind, "metadata": {"func_name": "solve"}}
