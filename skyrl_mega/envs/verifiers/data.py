"""Rows with the tasks of an environment of verifiers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from skyrl_mega.config.command import ROWS, integer, json_object
from skyrl_mega.envs.options import filled
from skyrl_mega.envs.row import row
from skyrl_mega.envs.verifiers import env as verifiers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data verifiers`."""
    parser.add_argument("--env", required=True, help="the environment's package, as in environment.options.verifiers")
    parser.add_argument("--args", type=json_object, default={}, help="its arguments as JSON, as in the run's options")
    parser.add_argument("--python", help="interpreter with verifiers and the environment installed (default: this one)")
    parser.add_argument("--train", type=integer(1, ROWS), default=1000, help="training rows at most (default: 1000)")
    parser.add_argument("--test", type=integer(0, ROWS), default=100, help="held-out rows at most (default: 100)")


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name (`train.parquet`, `test.parquet`) → rows: tasks in the environment's own order, independent of
    `args.seed`. The test rows are the environment's evaluation data, or the tasks after the training rows. A file
    without tasks is left out. Loads the environment in a process of its own, unconfined.

    Raises:
        UserError: The environment cannot be loaded, or an option is wrong.
    """
    given = {"env": args.env, "args": args.args} | ({"python": args.python} if args.python else {})
    options = filled(verifiers.KEY, given, verifiers.VerifiersEnv.OPTIONS)
    verifiers.VerifiersEnv.check_options(options)
    records = verifiers.tasks(options, args.train, args.test)
    return {f"{name}.parquet": _rows(args.env, name, tasks) for name, tasks in records.items() if tasks}


def _rows(env: str, split: str, tasks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for index, task in enumerate(tasks):
        yield row(
            data_source=env,
            prompt=task["prompt"],
            env_class=verifiers.NAME,
            ground_truth=None,
            extra_info={"split": split, "index": index, "env": env, "task": json.dumps(task["task"])},
        )
