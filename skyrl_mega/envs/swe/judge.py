"""The verdict on a policy's work: the tests run on clean copies of the repository, and must fail on canaries.

The code under test runs in the tests' own process, so no single statement of this process is trusted. Trusted are the
results of several runs: passed for the tests as they are, and failed for a canary (`canaries.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.sandbox.scoring import run_with_retries
from skyrl_mega.envs.swe.canaries import Edit, with_edit
from skyrl_mega.envs.swe.container_session import ContainerLost
from skyrl_mega.envs.swe.examination import PRELUDE, Examination, Examiner, NewSession
from skyrl_mega.envs.swe.session import CommandResult, File, Files, UnfitError
from skyrl_mega.envs.swe.task import read_task
from skyrl_mega.envs.waiting import working_clock


@dataclass(frozen=True)
class TestVerdict:
    """Result of judging a policy's work: the deciding run of the tests, and its credibility."""

    ran: CommandResult
    """The deciding run."""
    reason: str | None = None
    """Reason for not trusting an exit code of 0."""
    canaries: int = 0
    """Number of canary runs with the expected failure."""

    @property
    def right(self) -> bool:
        """True if the work earns the reward: the deciding run ended with `ok`, and there is no reason for not trusting
        it."""
        return self.ran.status == "ok" and self.reason is None


@dataclass(frozen=True, eq=False)
class Judge:
    """Judge of the work on a task.

    Args:
        task: Folder of the task.
        test: The test command.
        names: Names of the tests that must pass, in the test runner's notation.
        options: `environment.options.swe`.
        session: Creates a fresh session.
    """

    task: Path
    test: str
    names: list[str]
    options: Mapping[str, Any]
    session: NewSession

    @cached_property
    def _examiner(self) -> Examiner:
        return Examiner(read_task(self.task), self.test, self.names, self.options, self.session)

    def ignores(self, path: str) -> bool:
        """Returns True for a path whose changes are not judged, because the file is the task's own. Raises UserError if
        the task's `task.json` is malformed."""
        return self._examiner.protects(path)

    def verdict(self, changes: Files, deadline: float) -> TestVerdict:
        """Runs the tests, and canaries of the tests, on clean copies of the repository with the policy's changes.

        Returns the verdict. Work that cannot be copied, or tested in time, is judged as wrong and raises no error.

        Args:
            changes: Changes to the repository; changes to protected files are ignored.
            deadline: End of the time limit on the clock `working_clock()`.

        Raises:
            InfrastructureFault: The sandbox cannot start a command, a new container does not start or does not take the
                work, or the containers of a run and of its repetitions were ended from outside.
            UserError: The task's test patch does not apply, or its hidden files cannot be read.
        """
        try:
            known = self._examiner.examination(deadline)
        except TimeoutError:
            return TestVerdict(LATE, "the untouched repository's tests took too long: raise test_timeout_s")
        if self.options["proof"] == "canaries" and not known.edits:
            return TestVerdict(CommandResult("failed", None, ""), "no assertion of the tests can be made wrong")
        work = {path: file for path, file in changes.items() if not self.ignores(path)}
        last, failed_canaries = LATE, 0
        for canary in self._plan(known):
            try:
                ran = run_with_retries(
                    partial(self._run, work, {**known.tests, **canary}), self._seconds_left(deadline)
                )
            except UnfitError as error:
                return TestVerdict(CommandResult("failed", None, ""), str(error))
            if ran.status == "lost":
                raise InfrastructureFault(f"each container of the tests was lost: {ran.output}")
            ran = self._examiner.judged(ran)
            if canary and ran.status == "ok":
                return TestVerdict(ran, f"the tests pass with a wrong {min(canary)} too", failed_canaries)
            if ran.status not in (("failed", "output") if canary else ("ok",)):
                return TestVerdict(ran, None, failed_canaries)
            last, failed_canaries = (last, failed_canaries + 1) if canary else (ran, failed_canaries)
        return TestVerdict(last, None, failed_canaries)

    def _plan(self, known: Examination) -> list[dict[str, File]]:
        """Returns the canary of each run, empty for the tests as they are; in random order, so time reveals nothing."""
        if not known.edits:
            return [{}]
        random, checks = SystemRandom(), int(self.options["checks"])
        drawn = itertools.islice(itertools.cycle(random.sample(known.edits, len(known.edits))), checks)
        canaries = [_canary(known, path, edit, random) for path, edit in drawn]
        return random.sample([*canaries, *[{}] * checks], 2 * checks)

    def _seconds_left(self, deadline: float) -> float:
        return max(0.1, min(float(self.options["test_timeout_s"]), deadline - working_clock()))

    def _run(self, work: Files, tests: Files, seconds: float) -> CommandResult:
        """Runs the tests in a fresh session; returns the status `lost` if the session's container ends meanwhile."""
        session = self.session()
        try:
            session.open(seconds)
            session.write(work, seconds)
            session.write(tests, seconds)
            return session.run(PRELUDE + self.test, seconds)
        except ContainerLost as lost:
            return CommandResult("lost", None, str(lost))
        finally:
            session.close(seconds)


def _canary(known: Examination, path: str, edit: Edit, random: Random) -> dict[str, File]:
    file = known.tests[path]
    assert file is not None
    return {path: with_edit(file, edit, random)}


LATE = CommandResult("timeout", None, "")
"""Result of tests that did not run in time."""
