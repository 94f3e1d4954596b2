"""Examination of a task before the work is judged: hidden and protected files, and the assertions that may become
canaries. A task is examined once per process, in containers or sandboxes without the policy's work.
"""

from __future__ import annotations

import contextlib
import fnmatch
import posixpath
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers.files import LateError
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.swe.canaries import Assertion, Edit, TestSource, canary_candidates
from skyrl_mega.envs.swe.container_session import ContainerSession
from skyrl_mega.envs.swe.reports import passed
from skyrl_mega.envs.swe.required import required_functions
from skyrl_mega.envs.swe.session import CommandResult, File, Files, Session, UnfitError, entries
from skyrl_mega.envs.swe.task import Task, refuse_outside_link
from skyrl_mega.envs.waiting import waiting, working_clock

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


LONGEST_S = 3600.0
"""Seconds to wait for another trajectory's examination of the same task."""
MOST_KNOWN = 256
"""Maximum number of examined tasks kept in memory."""
APPLY = "git -c safe.directory='*' apply --whitespace=nowarn {patch} || patch -p1 --batch < {patch}"
"""Command that applies a patch in the repository."""


class NewSession(Protocol):
    """Source of fresh sessions."""

    def __call__(self, *, tracked: bool = False) -> Session:
        """Returns a session, not yet open.

        Args:
            tracked: True if the changes will be read.
        """


@dataclass(frozen=True)
class Examination:
    """Facts about a task."""

    tests: Files
    """Hidden files, and protected files of a task with `repo/`."""
    edits: Sequence[tuple[str, Edit]]
    """Path and edit of each possible canary."""


@dataclass(frozen=True)
class Examiner:
    """Examiner of a task.

    Args:
        task: The task.
        test: The test command.
        names: Names of the tests that must pass.
        options: `environment.options.swe`.
        session: Creates a fresh session.
    """

    task: Task
    test: str
    names: list[str]
    options: Mapping[str, Any]
    session: NewSession

    def examination(self, deadline: float) -> Examination:
        """Returns the facts about the task, examined once per task and process. The first call runs the untouched
        repository's tests, unless the option `proof` is `exit`.

        Args:
            deadline: End of the time limit on the clock `working_clock()`.

        Raises:
            TimeoutError: The tests took too long, or were cut, before an assertion for a canary was known.
            InfrastructureFault: A container does not start, or another trajectory's examination does not end.
            UserError: The test patch does not apply, the hidden files cannot be read, or a link in `hidden` leads out
                of the folder of tasks.
        """
        key = (str(self.task.path), self.test, *self.names, repr(self.options))
        own: dict[str, File | None] = {} if self.task.in_image else _read(self.task.repo, self._is_own)
        hidden: dict[str, File | None] = _read(self.task.path / "hidden", lambda path: True)
        lock = _locks.setdefault(key, threading.Lock())
        with waiting():
            if not lock.acquire(timeout=LONGEST_S):
                raise InfrastructureFault(f"task {self.task.path.name}: another trajectory's examination does not end")
        try:
            if key not in _known:
                derived = self._derived(max(0.1, deadline - working_clock()))
                tests = own | derived | hidden
                assertions = [] if self.options["proof"] == "exit" else self._candidates(tests, deadline)
                _known[key] = Examination(derived, [(assertion.path, assertion.edit) for assertion in assertions])
                while len(_known) > MOST_KNOWN:
                    _locks.pop(_known.popitem(last=False)[0], None)
            known = _known[key]
            return Examination({**own, **known.tests, **hidden}, known.edits)
        finally:
            lock.release()

    def protects(self, path: str) -> bool:
        """Returns True for the task's own files, for a file in the place of a protected folder, for files in or above
        `hidden_paths`, and for paths outside the repository or in .git.
        """
        strange = path.startswith("/") or ".." in path.split("/") or path.split("/")[0] == ".git"
        both = ((f"{path}/", f"{name}/") for name in self.task.hidden_paths)
        hidden = any(mine.startswith(its) or its.startswith(mine) for mine, its in both)
        if self._is_work(path):
            return strange or hidden
        return strange or hidden or self._is_own(path) or self._is_own(f"{path}/x")

    def judged(self, ran: CommandResult) -> CommandResult:
        """Returns the result of a test run with the status `ok` if the tests passed, else `failed`.

        The report in the output decides: every test in `names` must have passed; tests that stand only in
        `PASS_TO_PASS` may also be skipped. For a task without a report (`Task.report` is `exit`), the exit code
        decides, and the result is returned unchanged. Results of late and cut tests are returned unchanged too.

        Args:
            ran: Result of the test command.
        """
        if self.task.report == "exit" or ran.status not in ("ok", "failed"):
            return ran
        may_skip = set(self.task.tests.get("PASS_TO_PASS", ())) - set(self.task.tests.get("FAIL_TO_PASS", ()))
        right = passed(self.task.report, ran.output, self.names, may_skip)
        return replace(ran, status="ok" if right else "failed")

    def _is_own(self, path: str) -> bool:
        started = started_files(self.test) if self.options["proof"] != "exit" else ()
        return not self._is_work(path) and _matches(path, [*self.options["protected"], *started])

    def _is_work(self, path: str) -> bool:
        return path in self.task.work_files or _matches(path, self.task.work_files)

    def _derived(self, seconds: float) -> dict[str, File | None]:
        """Returns the hidden files of the image, and the files changed by the test patch."""
        try:
            return self._in_container(seconds)
        except LateError as error:
            raise InfrastructureFault(f"task {self.task.path.name}: {error}") from error
        except UnfitError as error:  # no work of the policy is there
            raise UserError(f"the hidden files cannot be read: {error}", key=f"task {self.task.path.name}") from error

    def _in_container(self, seconds: float) -> dict[str, File | None]:
        found: dict[str, File | None] = {}
        if self.task.hidden_paths:
            with _opened(self.session(), seconds) as session:
                assert isinstance(session, ContainerSession)
                found |= session.read_below(self.task.hidden_paths, seconds)
        if self.task.test_patch is not None:
            patch = self.task.path / self.task.test_patch
            found |= patch_changes(self.session(tracked=True), patch, seconds)
        return found

    def _candidates(self, tests: Files, deadline: float) -> list[Assertion]:
        functions = frozenset(map(_function_name, self.names)) or _selected_functions(self.test)
        texts = self.names if self.task.report in ("unittest", "django") else ()
        sources = [*_parsed(tests, functions, [text for text in texts if " (" not in text])]
        if self.task.report == "exit":
            sources = sources or [*_parsed(tests, ())]
        if not sources:
            return []
        seconds = max(0.1, (deadline - working_clock()) / 2)
        with _opened(self.session(), seconds) as session:
            marks_file = f"{_output(session, 'pwd', seconds).strip()}/.marks-{secrets.token_hex(8)}"
            marked = {source.path: source.marked(marks_file, number) for number, source in enumerate(sources)}
            session.write({**tests, **{path: File(data) for path, data in marked.items()}}, seconds)
            limit_s = min(seconds, float(self.options["test_timeout_s"]))
            ran = self.judged(session.run(PRELUDE + self.test, limit_s))
            marks = _output(session, f"cat {marks_file}", seconds).splitlines()
        by_report = self.task.report != "exit"
        preferred = {f for source in sources for f in source.functions if f.node.name in functions}
        preferred = required_functions(sources, self.names, self.task.report) if by_report else preferred
        assertions = canary_candidates(sources, marks, ran.status != "ok", preferred, only_preferred=by_report)
        if not assertions and ran.status not in ("ok", "failed"):
            raise TimeoutError
        return assertions


def patch_changes(session: Session, patch: Path, seconds: float) -> Files:
    """Opens a fresh session, applies a patch to its repository, closes the session, and returns the changes: path →
    file, None for a removed file.

    Raises:
        UserError: The patch does not apply, or the task's repository or image cannot be used.
        UnfitError: The patch cannot be copied into the session, or the changed files cannot be read.
        InfrastructureFault: The patch takes longer than `seconds`, or the session does not start or is lost.
        OSError: The file `patch` cannot be read.
    """
    name = f".skyrl-{secrets.token_hex(8)}.patch"
    with _opened(session, seconds):
        session.write({name: File(patch.read_bytes())}, seconds)
        ran = session.run(APPLY.format(patch=name), seconds)
        if ran.status == "timeout":
            raise InfrastructureFault(f"{patch}: `git apply` took longer than {seconds:g} s")
        if ran.status != "ok":
            raise UserError(
                f"the patch does not apply: {ran.output.strip()[-300:]}",
                key=patch,
                fix="correct the patch, or leave the task out",
            )
        return {path: file for path, file in session.changes(seconds).items() if path != name}


def _output(session: Session, command: str, seconds: float) -> str:
    """Returns the output of a small command; raises InfrastructureFault if the command is late."""
    ran = session.run(command, seconds)
    if ran.status == "timeout":
        raise InfrastructureFault(f"`{command}` took longer than {seconds:g} s in a new session")
    return ran.output


@contextlib.contextmanager
def _opened(session: Session, seconds: float) -> Iterator[Session]:
    """Opens a session for the `with` block."""
    try:
        session.open(seconds)
        yield session
    finally:
        session.close(seconds)


def _read(top: Path, selected: Callable[[str], bool]) -> dict[str, File | None]:
    """Returns the wanted files below a folder of the task; a link in `hidden` is replaced by the target."""
    files: dict[str, File | None] = {}
    for name, path, info in entries(top) if top.is_dir() else ():
        if not selected(name) or name.startswith(".git/") or name.endswith(".pyc"):  # .pyc: holds the true literals
            continue
        if stat.S_ISLNK(info.st_mode) and top.name == "repo":
            files[name] = File.read(path, info)
        elif Path(path).is_file():
            refuse_outside_link(Path(path), top.parent.parent)
            files[name] = File(Path(path).read_bytes(), stat.S_IMODE(Path(path).stat().st_mode))
    return files


def _parsed(files: Files, functions: Collection[str], texts: Collection[str] = ()) -> Iterator[TestSource]:
    """Yields the test files in Python; with `functions`, only files that define one of them, or contain one of the
    texts."""
    for path, file in sorted(files.items()):
        if path.endswith(".py") and file is not None and not file.link:
            named = [name for name in functions if re.search(rb"\bdef " + re.escape(name).encode() + rb"\b", file.data)]
            if functions and not named and not any(text.encode() in file.data for text in texts):
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
    in `TOOL_FILES`; sorted, [] for none."""
    names = re.findall(r"(?:^|[\s;&|(])(?:\.|source|(?:ba|da|z|k)?sh)\s+(?:-\S+\s+)*([\w./-]+)", test)
    names += re.findall(r"[\w./-]*\.(?:sh|bash)\b", test)
    names += [file for tool, files in TOOL_FILES.items() if re.search(rf"\b(?:{tool})\b", test) for file in files]
    plain = {re.sub(r"^(\.{0,2}/)+", "", posixpath.normpath(name)) for name in names} - {"", ".", ".."}
    return sorted(pattern for name in plain for pattern in (name, f"*/{name}"))


_known: OrderedDict[tuple[str, ...], Examination] = OrderedDict()
_locks: dict[tuple[str, ...], threading.Lock] = {}
