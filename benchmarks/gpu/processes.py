"""Processes that work together within one proof, and may be killed by the proof."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("spawn")
_starting = threading.Lock()
"""Held while a process starts: threads share the environment."""

KILLED = "killed"
"""Answer of a job ended by a signal."""


@dataclass(frozen=True)
class Job:
    """Work of one process."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the process's environment."""


def together(*jobs: Job, timeout_s: float) -> list[Any]:
    """Runs each job in a separate process and returns the answers in order.

    Raises:
        RuntimeError: A job raised, or ended without an answer. The message holds the traceback.
        TimeoutError: A job did not answer in time.
    """
    pipes: list[Connection] = []
    processes = []
    for job in jobs:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_main, args=(theirs, job.function, job.arguments))
        with environment(job.env):
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
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for processes started inside the context."""
    with _starting:
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
