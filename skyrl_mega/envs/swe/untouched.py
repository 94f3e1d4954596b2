"""What a task's tests skip in the repository as the task has it: such a test says nothing about the work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from skyrl_mega.envs.swe.proof import Proof
from skyrl_mega.envs.swe.session import Session

_known: dict[Hashable, Future[frozenset[str] | None]] = {}
_lock = threading.Lock()


def skipped(
    task: Hashable, session: Callable[[], Session], patterns: Iterable[str], proof: Proof, seconds: tuple[float, float]
) -> Collection[str] | None:
    """The tests that are skipped or expected to fail there; one run of them per task and process.

    Args:
        task: What the answer depends on; trajectories of the same task share it.
        session: Makes a session that nobody has worked in.
        patterns: What is restored before the tests, hidden tests included.
        proof: As for the work, of the untouched repository.
        seconds: For opening the session, and for the tests or for waiting while another trajectory runs them.

    Returns:
        None where it did not end by itself in time; then the next trajectory tries again.
    """
    with _lock:
        mine = task not in _known
        known = _known.setdefault(task, Future())
    if not mine:
        try:
            return known.result(seconds[1])
        except FutureTimeoutError:
            return None
    found = None
    try:
        found = _run(session(), patterns, proof, *seconds)
    finally:
        if found is None:
            with _lock:
                del _known[task]
        known.set_result(found)
    return found


def _run(
    session: Session, patterns: Iterable[str], proof: Proof, open_s: float, test_s: float
) -> frozenset[str] | None:
    try:
        session.open(open_s)
        session.restore(patterns, test_s)
        ran = session.run(proof.command, test_s)
    finally:
        session.close(open_s)
    return proof.skipped(ran.output) if ran.status in ("ok", "failed") else None
