"""Several processes that work together within one proof, and may be killed in it."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("spawn")

KILLED = "killed"
"""What a job that ended by a signal has for an answer."""


@dataclass(frozen=True)
class Job:
    """What one process does."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to its environment."""


def together(*jobs: Job, timeout_s: float) -> list[Any]:
    """The answers of the jobs, each in a process of its own, in order.

    Raises:
        RuntimeError: A job raised, or ended without an answer; with its traceback.
        TimeoutError: Some did not answer.
    """
    pipes: list[Connection] = []
    processes = []
    for job in jobs:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_main, args=(theirs, job.function, job.arguments))
        with _environment(job.env):
            process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    try:
        while waiting := {pipe: i for i, pipe in enumerate(pipes) if i not in answers}:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(
                    f"{[jobs[i].function.__name__ for i in waiting.values()]} did not answer in {timeout_s} s"
                )
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                i = waiting[pipe]
                try:
                    good, answer = pipe.recv()
                except EOFError:
                    processes[i].join(10)
                    code = processes[i].exitcode
                    good, answer = (True, KILLED) if code is not None and code < 0 else (False, f"ended with {code}")
                if not good:
                    raise RuntimeError(f"{jobs[i].function.__name__}: {answer}")
                answers[i] = answer
        return [answers[i] for i in range(len(jobs))]
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """What a process that starts inside inherits."""
    before = {key: os.environ.get(key) for key in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _main(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*arguments)))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        raise
