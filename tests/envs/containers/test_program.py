"""Programs of this machine with limits of time and output."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from skyrl_mega.envs.containers.program import run_program
from skyrl_mega.envs.event_loop import Pending
from skyrl_mega.envs.faults import InfrastructureFault


def alive(pid: int) -> bool:
    """Returns True if a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_output_input_and_exit_code_are_passed() -> None:
    ran = run_program(["sh", "-c", "cat; echo no >&2; exit 3"], 30, stdin=b"yes" * 100_000)
    assert (ran.status, ran.exit, ran.stdout, ran.stderr) == ("failed", 3, b"yes" * 100_000, b"no\n")
    assert run_program(["true"], 30, stdin=b"unread" * 100_000).status == "ok"
    assert run_program(["pwd"], 30).stdout == b"/\n"


def test_a_late_program_is_killed_with_its_children() -> None:
    start = time.monotonic()
    ran = run_program(["sh", "-c", "trap '' TERM; sleep 77 & echo $!; wait"], 5)
    assert (ran.status, ran.exit) == ("timeout", None) and time.monotonic() - start < 30
    child = int(ran.stdout)
    while alive(child):
        assert time.monotonic() - start < 30
        time.sleep(0.01)


def test_a_late_program_that_prints_all_the_time_is_killed() -> None:
    assert run_program(["sh", "-c", "while :; do echo x; sleep 0.01; done"], 0.5).status == "timeout"


def test_a_program_that_prints_too_much_is_killed() -> None:
    ran = run_program(["cat", "/dev/zero"], 30, limit=1000)
    assert (ran.status, ran.exit, len(ran.stdout)) == ("output", None, 1000)


def test_a_background_process_with_the_pipes_does_not_hold_the_result() -> None:
    start = time.monotonic()
    ran = run_program(["sh", "-c", "sleep 20 & echo $!"], 30)
    os.kill(int(ran.stdout), 9)
    assert ran.status == "ok" and time.monotonic() - start < 15


def test_a_killed_program_has_no_exit_code() -> None:
    ran = run_program(["sh", "-c", "kill -9 $$"], 30)
    assert (ran.status, ran.exit) == ("failed", None)


def test_keys_of_this_process_are_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("DOCKER_HOST", "unix:///x")
    found = run_program([sys.executable, "-c", "import os; print(dict(os.environ))"], 30, variables={"A": "1"}).stdout
    assert b"secret" not in found and b"unix:///x" in found and b"'A': '1'" in found


def test_a_missing_program_is_a_fault() -> None:
    with pytest.raises(InfrastructureFault, match="nothing cannot be started: No such file"):
        run_program(["nothing"], 30)


def test_a_run_that_gives_up_kills_the_program() -> None:
    pending, results = Pending(), []

    def work() -> None:
        pending.run_here()
        results.append(run_program(["sleep", "60"], 60, cancellable=True))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    pending.cancel()
    thread.join(30)
    assert results and results[0].exit is None
