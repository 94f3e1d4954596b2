"""Validation of tasks on this machine: the tests must fail without work, and pass with the published solution."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import integer, json_object
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
        "--session-options",
        type=json_object,
        default={},
        help="options of the session, such as '{\"memory_mib\": 8192}'",
    )
    parser.add_argument("--test-timeout", type=integer(1, 86400), default=1800, help="seconds of a task's tests")
    parser.add_argument("--jobs", type=integer(1, 1024), default=1, help="tasks validated at once")
    parser.add_argument(
        "--allow-unchecked",
        action="store_true",
        help="leave out tasks that cannot be checked, as when an image cannot be pulled; without it, this is an error",
    )


def valid_tasks(tasks: list[Task], args: argparse.Namespace) -> list[Task]:
    """Runs the tests of each task, and returns the tasks whose tests fail without work and pass with `solution.patch`,
    or lack this patch. Prints a line for each task to standard error as soon as it is done.

    A task that cannot be checked because of a fault of this machine is tried again after all others.

    Raises:
        InfrastructureFault: Tasks could not be checked in two tries, and `--allow-unchecked` is not given.
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
    found = _findings(tasks, options, args.jobs)
    if again := [task for task in tasks if found[task.path.name].state == TaskState.UNCHECKED]:
        print(f"{len(again)} tasks could not be checked, and are tried again", file=sys.stderr, flush=True)
        found.update(_findings(again, options, args.jobs))
    return _kept(tasks, found, args)


class TaskState(Enum):
    """What the validation says of a task."""

    VALID = "valid"
    UNTRIED = "fails without work; no solution.patch to try"
    WRONG = "left out"
    UNCHECKED = "could not be checked"


@dataclass(frozen=True)
class TaskFinding:
    """Result of the validation of a task."""

    state: TaskState
    reason: str = ""
    """Why a task is wrong, or could not be checked."""

    def __str__(self) -> str:
        """Returns the line for the terminal."""
        return f"{self.state.value}: {self.reason}" if self.reason else self.state.value


def _findings(tasks: list[Task], options: Mapping[str, Any], jobs: int) -> dict[str, TaskFinding]:
    """Returns name → finding of each task; prints each as soon as it is known."""
    found = {}
    pool = ThreadPoolExecutor(jobs)
    try:
        names = {pool.submit(_finding, options, task): task.path.name for task in tasks}
        for future in as_completed(names):
            found[names[future]] = future.result()
            print(f"{names[future]}: {future.result()}", file=sys.stderr, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _kept(tasks: list[Task], found: Mapping[str, TaskFinding], args: argparse.Namespace) -> list[Task]:
    """Returns the tasks to keep, and prints the numbers."""
    counts = Counter(finding.state for finding in found.values())
    unchecked = counts[TaskState.UNCHECKED]
    said = [f"{counts[TaskState.VALID]} of {len(tasks)} tasks are valid"]
    if counts[TaskState.UNTRIED]:
        said.append(f"{counts[TaskState.UNTRIED]} fail without work, have no {SOLUTION} to try, and are kept")
    if unchecked:
        said.append(f"{unchecked} could not be checked")
    print("; ".join(said), file=sys.stderr, flush=True)
    if unchecked and not args.allow_unchecked:
        raise InfrastructureFault(
            f"{unchecked} of {len(tasks)} tasks could not be checked, and no rows are written; the first task is "
            f"{_first(found, TaskState.UNCHECKED)}; remove the cause, or leave these tasks out with --allow-unchecked"
        )
    kept = [task for task in tasks if found[task.path.name].state in (TaskState.VALID, TaskState.UNTRIED)]
    if not kept:
        state = TaskState.WRONG if counts[TaskState.WRONG] else TaskState.UNCHECKED
        raise UserError(
            f"no task is valid; the first task is {_first(found, state)}", key="--validate", value=args.validate
        )
    return kept


def _first(found: Mapping[str, TaskFinding], state: TaskState) -> str:
    return next(f"{name}: {finding.reason}" for name, finding in sorted(found.items()) if finding.state == state)


def _finding(options: Mapping[str, Any], task: Task) -> TaskFinding:
    """Judges a task without work, then with its published solution."""
    if reason := wrong_task(task, options):
        return TaskFinding(TaskState.WRONG, reason)
    try:
        with closing(Sessions(options)) as sessions:
            return _judged(options, task, sessions)
    except (InfrastructureFault, TimeoutError) as error:
        return TaskFinding(TaskState.UNCHECKED, str(error) or "it took too long: raise --test-timeout")
    except (UserError, UnfitError) as error:
        return TaskFinding(TaskState.WRONG, str(error))


def _judged(options: Mapping[str, Any], task: Task, sessions: Sessions) -> TaskFinding:
    new = partial(sessions.new, task.path)
    names = [name for key in TEST_LISTS for name in task.tests.get(key, ())]
    judge = Judge(task.path, task.test, names, options, new)
    seconds, solution = float(options["test_timeout_s"]), task.path / SOLUTION
    if _verdict(judge, {}, seconds).right:
        return TaskFinding(TaskState.WRONG, "the tests pass without any work")
    if not solution.is_file():
        return TaskFinding(TaskState.UNTRIED)
    verdict = _verdict(judge, patch_changes(new(tracked=True), solution, seconds), seconds)
    if verdict.right:
        return TaskFinding(TaskState.VALID)
    last = "".join(verdict.ran.output.strip().splitlines()[-1:])[:200]
    return TaskFinding(TaskState.WRONG, f"{SOLUTION} fails: {verdict.reason or verdict.ran.status} {last}".strip())


def _verdict(judge: Judge, changes: Files, seconds: float) -> TestVerdict:
    """Returns the judge's verdict.

    Raises:
        TimeoutError: The tests took too long, so that nothing is known.
    """
    runs = 2 * int(judge.options["checks"]) + 2
    verdict = judge.verdict(changes, working_clock() + seconds * runs)
    if verdict.ran.status == "timeout":
        raise TimeoutError(f"the tests took longer than {seconds:g} s: raise --test-timeout")
    return verdict
