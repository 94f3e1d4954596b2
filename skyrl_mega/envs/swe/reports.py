"""Results of single tests, read from the output of a test command."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

PASSING = ("PASSED", "XFAIL")
"""Results that count as passed, as in SWE-bench's evaluation."""
RESULTS = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
"""Results written by pytest."""
VERBOSE = re.compile(rf"(\S.*) ({'|'.join(RESULTS)})(?: +\[ *\d+%\])?$")
"""Line of `pytest -v`: `a.py::test PASSED [ 50%]`."""
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
UNITTEST = {
    "ok": "PASSED",
    "FAIL": "FAILED",
    "ERROR": "ERROR",
    "expected failure": "XFAIL",
    "unexpected success": "FAILED",
}
"""Words of unittest at the end of a test's line, except `skipped '…'`."""
SYMPY = {"ok": "PASSED", "F": "FAILED", "E": "ERROR", "X": "FAILED", "f": "XFAIL", "s": "SKIPPED", "w": "SKIPPED"}
"""Words of sympy's `bin/test --verbose` at the end of a test's line."""
MOUSE = {"MouseButton.LEFT": "1", "MouseButton.RIGHT": "3"}
"""Values in names of matplotlib's tests that Python versions write in two ways."""


def passed(report: str, output: str, names: Collection[str]) -> bool:
    """Returns True if the output shows all tests as passed. A test without a result has not passed; the last result of
    a test counts.

    Args:
        report: Format of the output, a key of `REPORTS` other than `exit`.
        output: stdout and stderr of the test command.
        names: Names of the tests, as written in the output; a name may be cut at a space, as SWE-bench does.
    """
    results: dict[str, str] = {}
    for name, result in REPORTS[report](ANSI.sub("", output).splitlines()):
        for form in {name, name.split(" ")[0], _canonical(name)} if report != "unittest" else {name}:
            results[form] = result
    return all(
        (results.get(name) or results.get(_canonical(name))) in PASSING for name in map(str.strip, names)
    )  # fmt: skip


def _canonical(name: str) -> str:
    """Returns a name without spaces, folders of this machine and spellings of enumerations in the parameters."""
    test, bracket, parameters = name.partition("[")
    for old, new in MOUSE.items():
        parameters = parameters.replace(old, new)
    if parameters.startswith("/") and not parameters.startswith("//") and "*" not in parameters:
        parameters = "/" + parameters.rpartition("/")[2]
    return (test + bracket + parameters).split(" ")[0]


def _of_pytest(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields results from the summary (`PASSED a.py::test`, by `-rA`) and from verbose lines (`a.py::test PASSED`)."""
    for line in lines:
        first, _, rest = line.strip().partition(" ")
        if first in RESULTS and rest.strip():
            yield rest.strip().partition(" - ")[0], first
        elif "::" in first and (verbose := VERBOSE.match(line.strip())):
            yield verbose[1], verbose[2]


def _of_r2e(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields pytest's results under R2E's names, `Class.test`."""
    for name, result in _of_pytest(lines):
        if "::" in name:
            yield ".".join(name.split("::")[1:]), result


def _of_unittest(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields results of unittest's and Django's verbose lines, `test (module.Class) ... ok`.

    A test that prints text pushes its result to the end of a later line.
    """
    pending = None
    for line in lines:
        failure = re.match(r"(FAIL|ERROR): (.+)", line)
        if failure:
            yield failure[2].strip(), UNITTEST[failure[1]]
            continue
        name, dots, rest = line.partition(" ... ")
        if dots:
            pending, line = name.strip(), rest
        result = _unittest_result(line.strip())
        if pending is not None and result is not None:
            yield pending, result
            pending = None


def _unittest_result(text: str) -> str | None:
    if re.search(r"(^|\s)skipped ", text):
        return "SKIPPED"
    return next((result for word, result in UNITTEST.items() if re.search(rf"(^|\W){word}$", text, re.I)), None)


def _of_sympy(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields results of sympy's verbose lines, `test_name ok`, and of its headings of failures."""
    for line in lines:
        result = re.match(r"(test_\S+) (\w+)(?:\s|$)", line)
        if result and result[2] in SYMPY:
            yield result[1], SYMPY[result[2]]
        heading = re.match(r"_+ .*\.py:(\S+) _+$", line)
        if heading:
            yield heading[1], "FAILED"


REPORTS: Mapping[str, Callable[[list[str]], Iterator[tuple[str, str]]]] = {
    "exit": lambda _: iter(()),
    "pytest": _of_pytest,
    "r2e": _of_r2e,
    "unittest": _of_unittest,
    "django": _of_unittest,
    "sympy": _of_sympy,
}
"""Format of a test command's output → reader of (name, result)."""
