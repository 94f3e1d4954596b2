"""Rows for software tasks: a folder of tasks, or tiny repositories with a planted bug."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.atomic_output import refuse_file
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import read_json
from skyrl_mega.config.command import path_of
from skyrl_mega.envs.row import row
from skyrl_mega.envs.swe.judge import TEST_LISTS, refuse_outside_link, required_tests

SYSTEM = (
    "You work on a repository through a shell. In each turn give one command inside <bash>…</bash>; its output comes "
    "back. When the work is done, write <submit/>; then the tests are run."
)

LARGEST = 2**24
"""Maximum size of a task.json, in bytes."""
BUGS: dict[str, tuple[str, str, str, str, str]] = {
    "mean": ("mean of a list", "numbers", "sum(numbers) / (len(numbers) - 1)", "[2, 4, 9]", "5.0"),
    "spread": ("largest minus the smallest", "numbers", "max(numbers) + min(numbers)", "[3, 8]", "5"),
    "last": ("last element", "items", "items[len(items)]", "[1, 2, 3]", "3"),
    "reverse": ("words in reverse order", "text", "' '.join(text.split())", "'a b c'", "'c b a'"),
    "initials": ("first letters of the words", "text", "''.join(w[1] for w in text.split())", "'ab cd'", "'ac'"),
    "count": ("number of positive ones", "numbers", "sum(n < 0 for n in numbers)", "[1, -2, 3]", "2"),
    "squares": ("sum of the squares", "numbers", "sum(n * 2 for n in numbers)", "[1, 2, 5]", "30"),
    "unique": ("sorted items, each once", "items", "sorted(items)", "[3, 1, 3]", "[1, 3]"),
}
"""Function → purpose, argument, wrong body, an input and the right output."""

HELD_OUT = ("squares", "unique")
"""Functions whose tasks are for testing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data swe`."""
    parser.add_argument(
        "--source",
        type=path_of,
        help="a folder of tasks, each with repo/, task.json (instruction, test: the command that must succeed, split: "
        "train or test, FAIL_TO_PASS and PASS_TO_PASS: tests that must pass) and hidden/, files that appear only when "
        "the tests run; without it, small ones are made in OUTPUT/tasks",
    )


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name (`train.parquet`, `test.parquet`) → rows; a file without tasks is left out.

    Without `--source`, first writes small tasks to `<output>/tasks`. Each task's `split` decides the file.

    Raises:
        UserError: `--source` has no tasks, a task.json is invalid, or a file in `<output>/tasks` has other content.
    """
    folder = args.source
    if folder is None:
        folder = args.output / "tasks"
        for name in BUGS:
            _make(folder / name, name)
    tasks = [_task(file) for file in sorted(folder.glob("*/task.json"))]
    if not tasks:
        raise UserError("the folder contains no task, that is, no */task.json", key="--source", value=folder)
    splits = {split: [task for task in tasks if task["split"] == split] for split in ("train", "test")}
    return {f"{split}.parquet": _rows(split_tasks) for split, split_tasks in splits.items() if split_tasks}


def _task(file: Path) -> dict[str, Any]:
    spec = read_json(file, "give a task's instruction and test", most=LARGEST)
    task = {"split": "train", **spec, "name": file.parent.name}
    for key in ("instruction", "test"):
        if not isinstance(task.get(key), str) or not task[key].strip():
            raise UserError(f"{file}, key {key}: allowed: a string that is not empty")
    for key in TEST_LISTS:
        try:
            task[key] = required_tests({key: task.get(key, [])})
        except UserError as error:
            raise UserError(f"{file}, key {error}") from error
    if task["split"] not in ("train", "test"):
        raise UserError(f"{file}, key split: {task['split']!r}; allowed: train, test")
    if not (file.parent / "repo").is_dir():
        raise UserError("the task has no folder repo/", key=file.parent)
    for part in ("repo", "hidden"):
        refuse_outside_link(file.parent / part, file.parent.parent)
    return task


def _rows(tasks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for task in tasks:
        yield row(
            data_source="swe",
            prompt=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["instruction"]}],
            env_class="swe",
            ground_truth=task["test"],
            extra_info={"split": task["split"], "task": task["name"], **{key: task[key] for key in TEST_LISTS}},
        )


def _make(folder: Path, name: str) -> None:
    """Writes a task: a package with a buggy function, and a hidden test that fails until the bug is fixed."""
    purpose, argument, wrong, example, expected = BUGS[name]
    body = f'"""Small tools."""\n\n\ndef {name}({argument}):\n    """The {purpose}."""\n    return {wrong}\n'
    test = textwrap.dedent(f"""\
        import unittest

        from tools import {name}


        class Test(unittest.TestCase):
            def test_{name}(self):
                self.assertEqual({name}({example}), {expected})
        """)
    task = {
        "instruction": f"The function {name} in tools.py should give the {purpose}, but its result is wrong. Fix it.",
        "test": "python -m unittest discover -s tests -t .",
        "split": "test" if name in HELD_OUT else "train",
    }
    for path, text in (
        ("repo/tools.py", body),
        ("repo/README.md", "# Small tools\n\nTests: `python -m unittest discover -s tests -t .`\n"),
        ("repo/tests/__init__.py", ""),
        (f"hidden/tests/test_{name}.py", test),
        ("task.json", json.dumps(task, indent=2) + "\n"),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        data = text.encode()
        refuse_file(folder / path, "--output", partial(_holds, data))
        (folder / path).write_bytes(data)


def _holds(data: bytes, file: Path) -> bool:
    """Returns True if the file consists of exactly these bytes."""
    return file.read_bytes() == data
