"""Rows for software tasks: a folder of tasks, or tiny repositories with a planted bug."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import path_of
from skyrl_mega.envs.row import row
from skyrl_mega.envs.swe import published, validation
from skyrl_mega.envs.swe.task import NAME, TEST_LISTS, Task, read_task, refuse_outside_link

SYSTEM = (
    "You work on a repository through a shell. In each turn give one command inside <bash>…</bash>; its output comes "
    "back. When the work is done, write <submit/>; then the tests are run."
)

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
        help="a folder of tasks (docs/swe.md); or published rows, a parquet or JSON file, or a data set's name on the "
        "Hugging Face hub; without it, small tasks are made in OUTPUT/tasks",
    )
    parser.add_argument(
        "--env", default="swe", help="environment of the rows (default: swe); harness leaves out the system message"
    )
    published.add_arguments(parser)
    validation.add_arguments(parser)


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name (`train.parquet`, `test.parquet`) → rows; a file without tasks is left out.

    Without a folder of tasks as `--source`, first writes the tasks to `<output>/tasks`. Each task's `split` decides the
    file. With `--validate`, runs the tests of all tasks and leaves out the tasks that fail the validation. Prints the
    number of tasks to standard error.

    Raises:
        UserError: `--source` has no tasks, a task.json is invalid, a file in `<output>/tasks` has other content, or no
            task passes the validation.
        InfrastructureFault: Tasks could not be validated, and `--allow-unchecked` is not given.
    """
    folder = args.output / "tasks"
    if args.source is None:
        for name in BUGS:
            _make(folder / name, name)
    elif args.source.is_dir():
        folder = args.source
    else:
        published.write_tasks(args, folder)
    tasks = [_checked(file.parent) for file in sorted(folder.glob("*/task.json"))]
    if not tasks:
        raise UserError("the folder contains no task, that is, no */task.json", key="--source", value=folder)
    images = {task.image for task in tasks if task.image is not None}
    print(f"{folder}: {len(tasks)} tasks, {len(images)} images", file=sys.stderr)
    if args.validate is not None:
        tasks = validation.valid_tasks(tasks, args)
    splits = {split: [task for task in tasks if task.split == split] for split in ("train", "test")}
    return {f"{split}.parquet": _rows(split_tasks, args.env) for split, split_tasks in splits.items() if split_tasks}


def _checked(folder: Path) -> Task:
    task = read_task(folder)
    if not NAME.fullmatch(folder.name):
        raise UserError("allowed: letters, digits, ., _ and -", key="the name of a task's folder", value=folder.name)
    if task.image is None and not task.repo.is_dir():
        raise UserError("the task has no folder repo/, and names no image", key=folder)
    for part in ("repo", "hidden", *filter(None, [task.test_patch])):
        refuse_outside_link(folder / part, folder.parent)
    if task.test_patch is not None and not (folder / task.test_patch).is_file():
        raise UserError("the task's test_patch does not exist", key=folder / task.test_patch)
    return task


def _rows(tasks: list[Task], env: str) -> Iterator[dict[str, Any]]:
    system = [{"role": "system", "content": SYSTEM}] if env == "swe" else []
    for task in tasks:
        yield row(
            data_source=task.data_source,
            prompt=[*system, {"role": "user", "content": task.instruction}],
            env_class=env,
            ground_truth=task.test,
            extra_info={"split": task.split, "task": task.path.name, **{key: task.tests[key] for key in TEST_LISTS}},
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
    files = {
        "repo/tools.py": body,
        "repo/README.md": "# Small tools\n\nTests: `python -m unittest discover -s tests -t .`\n",
        "repo/tests/__init__.py": "",
        f"hidden/tests/test_{name}.py": test,
        "task.json": json.dumps(task, indent=2) + "\n",
    }
    published.write_files(folder, files)
