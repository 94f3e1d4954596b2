"""Equality of two answers: by parsed readings, and for expressions by algebra in killable processes.

Usable alone (README.md): this folder without env.py and data.py imports nothing else of the project.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from . import cost
from .comparing import matches
from .forms import copied, unfactored
from .reading import read

WORKER = Path(__file__).with_name("worker.py")
WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Number of algebra processes, each for a single pair of answers at a time; 120 MB each."""
FIRST_TRY_S = 0.5
"""Time limit of the first attempt, in seconds. A slower comparison is repeated on the process reserved for slow
comparisons, so slow comparisons delay only each other.
"""
GRACE_S = 1.0
"""Seconds past the time limit for a worker to report being late. A silent worker is killed, and a restart takes
seconds.
"""

START_S = 120.0
"""Seconds for the start of an algebra process."""
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals sent by other processes; a worker's own crash shows another signal."""
EXIT_S = 1.0
"""Seconds to wait for the exit of a process with closed output."""
LONGEST = 500
"""Maximum length of an answer to parse, in characters; a longer answer equals only the same text."""


Waiting = Callable[[], AbstractContextManager[object]]
"""Context of a wait for a free process, such as a clock that stops meanwhile."""
Pool = queue.LifoQueue["MathWorker"]
"""The free workers; callers wait for a worker."""


class CheckerFailed(RuntimeError):
    """The algebra process was killed by another program or does not start: nothing is known about the answer."""


def same(gold: str, answer: str, seconds: float | None, question: str = "", *, waiting: Waiting = nullcontext) -> bool:
    """Returns True if an answer equals the gold answer. An empty answer equals nothing, and an answer of more than
    `LONGEST` characters only the same text.

    Args:
        gold: The right answer.
        answer: The answer returned by `extract`.
        seconds: Time limit for algebra; after this time the answers count as different. None disables algebra.
        question: The question. An expression copied from the question is no answer, nor is a sum if the question asks
            for factors.
        waiting: Context of a wait for a free process.

    Raises:
        CheckerFailed: The algebra process was killed, or does not start.
    """
    if gold.strip() == answer.strip():
        return bool(gold.strip())
    if len(answer) > LONGEST:
        return False
    gold_reading, answer_reading = read(gold), read(answer)
    if gold_reading is None or answer_reading is None:
        return False
    spent = 0.0

    def ask(one: str, other: str) -> bool:
        nonlocal spent
        if seconds is None or spent >= seconds or cost.too_expensive(one) or cost.too_expensive(other):
            return False
        result, took = algebra(one, other, seconds - spent, waiting)
        spent += took
        return result

    if not matches(gold_reading, answer_reading, ask):
        return False
    return not copied(gold, answer, question) and not unfactored(gold, answer, question)


def algebra(gold: str, answer: str, seconds: float, waiting: Waiting = nullcontext) -> tuple[bool, float]:
    """Compares two expressions by algebra in a separate process, after waiting for a free process.

    Args:
        gold: The right answer in LaTeX.
        answer: The answer to check in LaTeX.
        seconds: Time limit, without the wait.
        waiting: Context of a wait for a free process.

    Returns:
        True if equal, else False (also if the algebra failed or exceeded the limit); and the seconds taken.

    Raises:
        CheckerFailed: The process was killed, or does not start.
    """
    quick, patient = _process_pools()
    result, took = _ask_worker(quick, gold, answer, min(seconds, FIRST_TRY_S), waiting)
    if result == "late" and seconds > FIRST_TRY_S:
        result, patient_s = _ask_worker(patient, gold, answer, seconds - FIRST_TRY_S, waiting)
        took += patient_s
    return result is True, took


def _ask_worker(
    pool: Pool, gold: str, answer: str, seconds: float, waiting: Waiting = nullcontext
) -> tuple[bool | str | None, float]:
    with waiting():
        worker = pool.get()
    start = time.monotonic()
    try:
        with waiting():
            _start_worker(worker)
        start = time.monotonic()
        result = worker.ask(gold, answer, seconds)
    except TimeoutError:
        worker.kill()
        result = "late"
    except OSError as error:
        killed = worker.killed()
        worker.kill()
        if killed:
            raise CheckerFailed("another program killed the algebra process of the math environment") from error
        result = None
    finally:
        pool.put(worker)
    return result, time.monotonic() - start


def _start_worker(worker: MathWorker) -> None:
    try:
        worker.ready()
    except OSError as error:
        worker.kill()
        raise CheckerFailed(f"the algebra process of the math environment does not start: {error!r}") from error


class MathWorker:
    """A process running `worker.py`, started on first use and restarted after a kill."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.rest = b""

    def ready(self) -> None:
        """Starts the process unless already running, and waits until it is loaded.

        Raises:
            TimeoutError: The process does not start within `START_S` seconds and must be killed.
            OSError: The process cannot be started, or died.
        """
        if self.process is None or self.process.poll() is not None:
            self._start()

    def ask(self, gold: str, answer: str, seconds: float) -> bool | str | None:
        """Compares two answers by algebra. `ready` comes first.

        Args:
            gold: The right answer in LaTeX.
            answer: The answer to check in LaTeX.
            seconds: Time limit.

        Returns:
            True if equal, False if different; None if the algebra failed, "late" if the time limit passed.

        Raises:
            TimeoutError: The worker did not even report being late and must be killed.
            OSError: The process died.
        """
        assert self.process is not None and self.process.stdin is not None, "ready() comes first"
        self.process.stdin.write(json.dumps({"gold": gold, "answer": answer, "seconds": seconds}).encode() + b"\n")
        self.process.stdin.flush()
        result: bool | str | None = json.loads(self._line(seconds + GRACE_S))
        return result

    def killed(self) -> bool:
        """Returns True if the process was killed by another process; waits up to 1 s for its end.

        False for a crash by a policy's text, which ends the process by other signals.
        """
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return -self.process.wait(EXIT_S) in KILLS
        return False

    def kill(self) -> None:
        """Kills the process, if started, and waits for its end; `ready` starts another."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # the process never read the question
                        pipe.close()
        self.process, self.rest = None, b""

    def _start(self) -> None:
        self.kill()
        # The child ends with this process, because its stdin does.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        weakref.finalize(self, self.process.kill)
        self._line(START_S)

    def _line(self, seconds: float) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        deadline = time.monotonic() + seconds
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self.process.stdout, select.POLLIN)
        while b"\n" not in self.rest:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            piece = os.read(self.process.stdout.fileno(), 65536)
            if not piece:
                raise OSError("the worker died")
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        return line


def new_pool(size: int) -> Pool:
    """Returns a pool of `size` workers, whose processes start on first use."""
    pool: Pool = queue.LifoQueue()
    for _ in range(size):
        pool.put(MathWorker())
    return pool


_pools: dict[int, tuple[Pool, Pool]] = {}
_lock = threading.Lock()


def _process_pools() -> tuple[Pool, Pool]:
    """Returns this process's quick and patient pools: a fork must not share the pipes."""
    with _lock:
        return _pools.setdefault(os.getpid(), (new_pool(WORKERS), new_pool(1)))
