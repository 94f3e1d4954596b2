"""Scoring killed from outside: a fault of the infrastructure instead of a judgement."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.math import check
from skyrl_mega.envs.sandbox import Sandbox, confinements
from skyrl_mega.envs.sandbox.run import CONFINEMENTS, PID_NAMESPACE, SandboxResult, python
from tests.envs.processes import children

SLEEPS = python("-c", "import time; time.sleep(30)")


def launcher() -> int:
    """Returns the jail's outermost process as soon as its program runs."""
    while True:
        for pid in children(os.getpid()):
            inside = children(pid) if b"jail.py" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
            if inside and children(inside[0]):
                return pid
        time.sleep(0.01)


def run(killed: Callable[[], int]) -> SandboxResult:
    """Runs a sleeping program while a process of its jail is killed."""
    killing = threading.Thread(target=lambda: os.kill(killed(), signal.SIGKILL))
    killing.start()
    try:
        return Sandbox(without=tuple(CONFINEMENTS)).run(SLEEPS)
    finally:
        killing.join()


def test_a_sandbox_that_is_killed_is_no_failed_program() -> None:
    with pytest.raises(InfrastructureFault, match="the sandbox did not report"):
        run(launcher)


def test_nor_is_one_whose_init_is_killed() -> None:
    """Kills the init process: without a PID namespace, the program itself could end its surroundings and has failed."""
    if PID_NAMESPACE in confinements()["processes"]:
        with pytest.raises(InfrastructureFault, match="killed from outside"):
            run(lambda: children(launcher())[0])
    else:
        assert run(lambda: children(launcher())[0]).status == "failed"


def test_a_program_that_is_killed_has_failed() -> None:
    """Kills the program: possibly the program's own act, so the program has failed."""
    outcome = run(lambda: children(children(launcher())[0])[0])
    assert (outcome.status, outcome.exit) == ("failed", -signal.SIGKILL)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSEGV])
def test_a_checker_that_is_killed_does_not_judge(by: signal.Signals) -> None:
    """Kills a checker: SIGKILL is a fault, another signal may be a crash by the policy's text and is no match."""
    pool = check.new_pool(1)
    worker = pool.get()
    worker.ready()
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGSTOP)
    pool.put(worker)
    killing = threading.Timer(0.2, os.kill, (worker.process.pid, by))
    killing.start()
    if by is signal.SIGKILL:
        with pytest.raises(check.CheckerFailed, match="another program killed the algebra process"):
            check._ask_worker(pool, "x", "y", 5.0)
    else:
        resuming = threading.Timer(0.3, os.kill, (worker.process.pid, signal.SIGCONT))
        resuming.start()
        assert check._ask_worker(pool, "x", "y", 5.0)[0] is None
        resuming.join()
    killing.join()
    worker.kill()
    assert pool.qsize() == 1, "its place is given back"
