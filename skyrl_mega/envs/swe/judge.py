"""The verdict on a policy's work: the tests run on clean copies of the repository, and must fail on canaries.

The code under test runs in the tests' own process, so no single statement of this process is trusted. Trusted are the
exit codes of several runs: 0 for the tests as they are, and non-zero for a canary (`canaries.py`).
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import json
import os
import posixpath
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.sandbox.scoring import run_with_retries
from skyrl_mega.envs.swe.canaries import Assertion, Edit, TestSource, canary_candidates, with_edit
from skyrl_mega.envs.swe.session import CommandResult, File, Files, Session, UnfitError, entries

TEST_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
"""Lists of tests in a row, under SWE-bench's names."""
TOOL_FILES = {
    "g?make": ("Makefile", "GNUmakefile", "*.mk"),
    "nox": ("noxfile.py",),
    "npm|npx|yarn|pnpm|bun": ("package.json",),
    "just": ("justfile",),
}
"""Tool → files that control the tool. Files read by tox and pytest are always protected."""
PRELUDE = """\
export HOME="$(mktemp -d "${TMPDIR:-/tmp}/.home.XXXXXX")" PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
"""
"""Prefix of a test command. Sets a new home, because the local sandbox's home is the repository."""


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


@dataclass(frozen=True)
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
    session: Callable[[], Session]

    def verdict(self, changes: Files, deadline: float) -> TestVerdict:
        """Runs the tests, and canaries of the tests, on clean copies of the repository with the policy's changes.

        Returns the verdict. Work that cannot be copied, or tested in time, is judged as wrong and raises no error.

        Args:
            changes: Changes to the repository; changes to protected files are ignored.
            deadline: End of the time limit on the clock `time.monotonic()`.

        Raises:
            InfrastructureFault: The sandbox cannot start a command.
        """
        tests = self._tests()
        try:
            edits = self._edits(tests, deadline)
        except TimeoutError:
            return TestVerdict(LATE, "the untouched repository's tests took too long: raise test_timeout_s")
        if self.options["proof"] == "canaries" and not edits:
            return TestVerdict(CommandResult("failed", None, ""), "no assertion of the tests can be made wrong")
        work = {path: file for path, file in changes.items() if not self._protects(path)}
        last, failed_canaries = LATE, 0
        for canary in self._plan(tests, edits):
            try:
                ran = run_with_retries(partial(self._run, work, {**tests, **canary}), self._seconds_left(deadline))
            except UnfitError as error:
                return TestVerdict(CommandResult("failed", None, ""), str(error))
            if canary and ran.status == "ok":
                return TestVerdict(ran, f"the tests pass with a wrong {min(canary)} too", failed_canaries)
            if ran.status not in (("failed", "output") if canary else ("ok",)):
                return TestVerdict(ran, None, failed_canaries)
            last, failed_canaries = (last, failed_canaries + 1) if canary else (ran, failed_canaries)
        return TestVerdict(last, None, failed_canaries)

    def _plan(self, tests: Mapping[str, File], edits: Sequence[tuple[str, Edit]]) -> list[Files]:
        """Returns the canary of each run, empty for the tests as they are; in random order, so time reveals nothing."""
        if not edits:
            return [{}]
        random, checks = SystemRandom(), int(self.options["checks"])
        drawn = itertools.islice(itertools.cycle(random.sample(edits, len(edits))), checks)
        canaries: list[Files] = [{path: with_edit(tests[path], edit, random)} for path, edit in drawn]
        return random.sample([*canaries, *[{}] * checks], 2 * checks)

    def _seconds_left(self, deadline: float) -> float:
        return max(0.1, min(float(self.options["test_timeout_s"]), deadline - time.monotonic()))

    def _run(self, work: Files, tests: Files, seconds: float) -> CommandResult:
        """Runs the tests in a fresh session."""
        session = self.session()
        try:
            session.open(seconds)
            session.write(work, seconds)
            session.write(tests, seconds)
            return session.run(PRELUDE + self.test, seconds)
        finally:
            session.close(seconds)

    def _protects(self, path: str) -> bool:
        """Returns True for the task's own files, for a file in the place of a protected folder, and for paths outside
        the repository or in .git.
        """
        strange = path.startswith("/") or ".." in path.split("/") or path.split("/")[0] == ".git"
        return strange or _matches(path, self._protected) or _matches(f"{path}/x", self._protected)

    @property
    def _protected(self) -> list[str]:
        return [*self.options["protected"], *(started_files(self.test) if self.options["proof"] != "exit" else ())]

    def _tests(self) -> dict[str, File]:
        """Returns the protected files of the task, and the hidden files."""
        protected = _read(self.task / "repo", lambda path: _matches(path, self._protected))
        return protected | _read(self.task / "hidden", lambda path: True)

    def _edits(self, tests: Mapping[str, File], deadline: float) -> Sequence[tuple[str, Edit]]:
        """Returns path and edit of each possible canary. The untouched repository is examined once per task and
        process.

        Raises:
            TimeoutError: The tests did not start in time, or another trajectory's examination did not end in time.
        """
        key = (str(self.task), self.test, *self.names, repr(self.options))
        lock = _locks.setdefault(key, threading.Lock())
        if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            if key not in _known:
                assertions = [] if self.options["proof"] == "exit" else self._examine(tests, deadline)
                _known[key] = [(assertion.path, assertion.edit) for assertion in assertions]
            return _known[key]
        finally:
            lock.release()

    def _examine(self, tests: Mapping[str, File], deadline: float) -> list[Assertion]:
        functions = frozenset(map(_function_name, self.names)) or _selected_functions(self.test)
        sources = [*_parsed(tests, functions)] or [*_parsed(tests, ())]
        if not sources:
            return []
        session, seconds = self.session(), max(0.1, (deadline - time.monotonic()) / 2)
        try:
            session.open(seconds)
            marks_file = f"{session.run('pwd', seconds).output.strip()}/.marks-{secrets.token_hex(8)}"
            marked = {source.path: source.marked(marks_file, number) for number, source in enumerate(sources)}
            session.write(
                {**tests, **{path: replace(tests[path], data=data) for path, data in marked.items()}}, seconds
            )
            ran = session.run(PRELUDE + self.test, min(seconds, float(self.options["test_timeout_s"])))
            marks = session.run(f"cat {marks_file}", seconds).output.splitlines()
        finally:
            session.close(seconds)
        assertions = canary_candidates(sources, marks, ran.status != "ok", functions)
        if not assertions and ran.status not in ("ok", "failed"):
            raise TimeoutError
        return assertions


def _read(top: Path, selected: Callable[[str], bool]) -> dict[str, File]:
    """Returns the wanted files below a folder of the task; a link in `hidden` is replaced by the target."""
    files = {}
    for name, path, info in entries(top) if top.is_dir() else ():
        if not selected(name) or name.startswith(".git/") or name.endswith(".pyc"):  # .pyc: holds the true literals
            continue
        if stat.S_ISLNK(info.st_mode) and top.name == "repo":
            files[name] = File(os.fsencode(os.readlink(path)), link=True)
        elif Path(path).is_file():
            refuse_outside_link(Path(path), top.parent.parent)
            files[name] = File(Path(path).read_bytes(), stat.S_IMODE(Path(path).stat().st_mode))
    return files


def refuse_outside_link(path: Path, tasks: Path) -> None:
    """Refuses a part of a task that is a link to a place outside the folder of tasks.

    Raises:
        UserError: The link leads outside.
    """
    if not path.resolve().is_relative_to(tasks.resolve()):
        raise UserError(
            f"it is a link to {path.resolve()}; allowed: files in {tasks}",
            key=path,
            fix="copy the target of the link into the task",
        )


def _parsed(files: Mapping[str, File], functions: Collection[str]) -> Iterator[TestSource]:
    """Yields the test files in Python; with `functions`, only files that define at least one."""
    for path, file in sorted(files.items()):
        if path.endswith(".py") and not file.link:
            named = [name for name in functions if re.search(rb"\bdef " + re.escape(name).encode() + rb"\b", file.data)]
            if functions and not named:
                continue
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                yield TestSource(path, file.data)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """Returns True if a pattern matches, ignoring case: `EVIL.DIST-INFO` loads plug-ins like `evil.dist-info`."""
    return any(fnmatch.fnmatch(path.lower(), pattern.lower()) for pattern in patterns)


def _function_name(name: str) -> str:
    """Returns the function of a test, as in `tests/test_a.py::Test::test_b[1]`, `tests.test_a.Test.test_b`, `test_b
    (…)`.
    """
    return re.split(r"::|\.", re.split(r"\[| \(", name)[0])[-1]


def _selected_functions(test: str) -> frozenset[str]:
    """Returns the functions selected in a test command: `a.py::test_b`, `a.Test.test_b`; empty for all."""
    return frozenset(re.findall(r"(?:::|\.)(test\w*)(?![\w.:/])", test))


def started_files(test: str) -> list[str]:
    """Returns patterns (as for `fnmatch`) of the repository files that a test command starts: shell scripts, and files
    in `TOOL_FILES`; sorted."""
    names = re.findall(r"(?:^|[\s;&|(])(?:\.|source|(?:ba|da|z|k)?sh)\s+(?:-\S+\s+)*([\w./-]+)", test)
    names += re.findall(r"[\w./-]*\.(?:sh|bash)\b", test)
    names += [file for tool, files in TOOL_FILES.items() if re.search(rf"\b(?:{tool})\b", test) for file in files]
    plain = {re.sub(r"^(\.{0,2}/)+", "", posixpath.normpath(name)) for name in names} - {"", ".", ".."}
    return sorted(pattern for name in plain for pattern in (name, f"*/{name}"))


def required_tests(lists: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tests that a row requires to pass, from both lists of `TEST_LISTS`; [] without lists.

    Args:
        lists: List name → list. SWE-bench writes each list as JSON text.

    Raises:
        UserError: A value is not a list of names.
    """
    names = []
    for key in TEST_LISTS:
        value = lists.get(key)
        try:
            value = json.loads(value) if isinstance(value, str) else list(value if value is not None else ())
        except (ValueError, TypeError):
            value = None
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise UserError(f"{lists[key]!r}; allowed: a list of the names of tests", key=key)
        names += value
    return names


LATE = CommandResult("timeout", None, "")
"""Result of tests that did not run in time."""
_known: dict[tuple[str, ...], list[tuple[str, Edit]]] = {}
_locks: dict[tuple[str, ...], threading.Lock] = {}
