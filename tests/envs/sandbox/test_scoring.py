"""A scoring command runs again if an external cause may have ended it, and not after ending by itself."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest

from skyrl_mega.envs.lcb import judge
from skyrl_mega.envs.sandbox import CONFINEMENTS, CommandLimits, Sandbox, SandboxResult, scoring
from skyrl_mega.envs.sandbox.scoring import TRIES, run_with_retries


@dataclass(frozen=True)
class Ran:
    status: str
    exit: int | None = None


KILLED, MEMORY, OK = Ran("failed", -signal.SIGKILL), Ran("memory"), Ran("ok", 0)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "PAUSE_S", 0.0)


@pytest.mark.parametrize(
    ("outcomes", "expected", "runs"),
    [
        ([OK], OK, 1),
        ([KILLED, OK], OK, 2),
        ([MEMORY, KILLED, OK], OK, 3),
        ([Ran("failed", 137), OK], OK, 2),
        ([MEMORY] * 5, MEMORY, TRIES),
        ([Ran("failed", 1), OK], Ran("failed", 1), 1),
        ([Ran("failed", -signal.SIGSEGV), OK], Ran("failed", -signal.SIGSEGV), 1),
        ([Ran("timeout", -signal.SIGKILL), OK], Ran("timeout", -signal.SIGKILL), 1),
    ],
)
def test_what_others_may_have_ended_is_run_again(outcomes: list[Ran], expected: Ran, runs: int) -> None:
    left = iter(outcomes)
    given: list[float] = []

    def run(seconds: float) -> Ran:
        given.append(seconds)
        return next(left)

    assert run_with_retries(run, 60.0) == expected and len(given) == runs
    assert given == sorted(given, reverse=True) and given[0] <= 60.0


def test_there_is_no_other_try_without_time_for_it() -> None:
    runs = []

    def run(seconds: float) -> Ran:
        runs.append(seconds)
        time.sleep(0.06)
        return KILLED

    assert run_with_retries(run, 0.1) == KILLED
    assert len(runs) == 1


DIES = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


def test_a_right_program_that_is_killed_while_it_is_judged_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Sandbox(CommandLimits(wall_s=20.0), name="scoring", without=tuple(CONFINEMENTS))
    ran, run = [], Sandbox.run

    def killed_at_first(self: Sandbox, argv: Any, *, files: Any, **others: Any) -> SandboxResult:
        ran.append(files)
        return run(self, argv, files=files if len(ran) > 1 else {"main.py": DIES}, **others)

    monkeypatch.setattr(Sandbox, "run", killed_at_first)
    assert judge.run_tests("print(input())", [judge.Case("3", "3")], box, seconds=20.0, stop=True) == ["ok"]
    assert len(ran) == 2
    assert judge.run_tests(DIES, [judge.Case("3", "3")], box, seconds=20.0, stop=True) == ["failed"]
