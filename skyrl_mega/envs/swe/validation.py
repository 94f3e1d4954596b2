"""Validation of tasks on this machine: the tests must fail without work, and pass with the published solution."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.config.command import integer
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import filled
from skyrl_mega.envs.swe.env import SweEnv
from skyrl_mega.envs.swe.examination import patch_changes
from skyrl_mega.envs.swe.judge import Judge, TestVerdict
from skyrl_mega.envs.swe.session import Files, UnfitError
from skyrl_mega.envs.swe.sessions import Sessions, wrong_task
from skyrl_mega.envs.swe.task import TEST_LISTS, Task
from skyrl_mega.envs.waiting import working_clock

SOLUTION = "solution.patch"
"""Name of the patch with the published solution, beside task.json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the validation."""
    parser.add_argument(
        "--validate",
        metavar="SESSION",
        help="leave out tasks whose tests pass without work, or fail with solution.patch, on this machine; with local, "
        "podman or another session",
    )
    parser.add_argument(
        "--session-options", type=_mapping, default={}, help="options of the session, such as '{\"memory_mib\": 8192}'"
    )
    parser.add_argument("--test-timeout", type=integer(1, 86400), default=1800, help="seconds of a task's tests")
    parser.add_argument("--jobs", type=integer(1, 1024), default=1, help="tasks validated at once")


def valid_tasks(tasks: list[Task], args: argparse.Namespace) -> list[Task]:
    """Returns the tasks that pass the validation; prints the others with the reason.

    Raises:
        UserError: No task passes, or this machine cannot run the session.
    """
    given = {
        "tasks": str(tasks[0].path.parent),
        "session": args.validate,
        "session_options": args.session_options,
        "command_timeout_s": args.test_timeout,
        "test_timeout_s": args.test_timeout,
    }
    options = filled("environment.options.swe", given, SweEnv.OPTIONS)
    SweEnv.check_options(options)
    SweEnv.check_ready(options)
    valid, reasons = [], []
    with ThreadPoolExecutor(args.jobs) as pool:
        for task, reason in zip(tasks, pool.map(partial(_wrong, options), tasks), strict=True):
            print(f"{task.path.name}: {reason or 'valid'}", file=sys.stderr, flush=True)
            valid += [task] if reason is None else []
            reasons += [f"{task.path.name}: {reason}"] if reason is not None else []
    print(f"{len(valid)} of {len(tasks)} tasks are valid", file=sys.stderr)
    if not valid:
        raise UserError(f"no task is valid; the first: {reasons[0]}", key="--validate", value=args.validate)
    return valid


def _wrong(options: Mapping[str, Any], task: Task) -> str | None:
    """Returns the reason why a task is left out; None for a valid task."""
    if reason := wrong_task(task, options):
        return reason
    with closing(Sessions(options)) as sessions:
        new = partial(sessions.new, task.path)
        names = [name for key in TEST_LISTS for name in task.tests.get(key, ())]
        judge = Judge(task.path, task.test, names, options, new)
        seconds = float(options["test_timeout_s"])
        try:
            if _verdict(judge, {}, seconds).right:
                return "the tests pass without any work"
            solution = task.path / SOLUTION
            if not solution.is_file():
                return None
            verdict = _verdict(judge, patch_changes(new(tracked=True), solution, seconds), seconds)
        except (UserError, InfrastructureFault, UnfitError, TimeoutError) as error:
            return str(error) or type(error).__name__
    if verdict.right:
        return None
    last = verdict.ran.output.strip().splitlines()[-1:]
    return f"{SOLUTION} fails: {verdict.reason or verdict.ran.status} {''.join(last)[:200]}".strip()


def _verdict(judge: Judge, changes: Files, seconds: float) -> TestVerdict:
    runs = 2 * int(judge.options["checks"]) + 2
    return judge.verdict(changes, working_clock() + seconds * runs)


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except Malformed:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('allowed is a JSON object, such as {"memory_mib": 8192}')
    return value
