"""Results of single tests, read from the output of a test command."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

PASSING = ("PASSED", "XFAIL")
"""Results that count as passed, as in SWE-bench's evaluation."""
RESULTS = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
"""Results written by pytest."""
LONGEST_LINE = 10_000
"""Maximum length of a line with a result, in characters; longer lines are ignored."""
ANSI = re.compile(r"\x1b\[[0-9;]*+[A-Za-z]")
"""Colour codes. The only regular expression here, because the output is hostile: the work must be linear in the size of
the output."""
UNITTEST = {
    "ok": "PASSED",
    "OK": "PASSED",
    "FAIL": "FAILED",
    "ERROR": "ERROR",
    "expected failure": "XFAIL",
    "unexpected success": "FAILED",
}
"""Words of unittest after a test's name, except `skipped '…'`."""
SYMPY = {"ok": "PASSED", "F": "FAILED", "E": "ERROR", "X": "FAILED", "f": "XFAIL", "s": "SKIPPED", "w": "SKIPPED"}
"""Words of sympy's `bin/test --verbose` at the end of a test's line."""
MOUSE = {"MouseButton.LEFT": "1", "MouseButton.RIGHT": "3"}
"""Values in names of matplotlib's tests that Python versions write in two ways."""
Results = Iterator[tuple[str, str]]
"""Names of tests with results."""


def passed(report: str, output: str, names: Collection[str], may_skip: Collection[str] = ()) -> bool:
    """Returns True if the output shows all tests as passed. A test without a result has not passed; the last result of
    a test counts.

    Args:
        report: Format of the output, a key of `REPORTS` other than `exit`.
        output: stdout and stderr of the test command.
        names: Names of the tests, as written in the output. A name of pytest may be cut at a space in the parameters,
            as SWE-bench does; then all tests whose names begin so must have passed.
        may_skip: Tests that may be skipped.
    """
    exact: dict[str, set[str]] = {name.strip(): set() for name in names}
    similar = {_canonical(name): set[str]() for name in exact} if report in ("pytest", "r2e") else {}
    functions = {name.partition("[")[0] for name in exact}
    for name, result in REPORTS[report](_lines(output)):
        if name.partition("[")[0] not in functions:
            continue
        if name in exact:
            exact[name] = {result}
        if similar:
            cut = name.partition(" ")[0]
            for form in {_canonical(name), _canonical(cut) if _is_open(cut) else ""} & similar.keys():
                similar[form].add(result)
    skippable = {name.strip() for name in may_skip}
    for name, results in exact.items():
        results = results or similar.get(_canonical(name), set())
        if not results or results.difference(PASSING, ["SKIPPED"] if name in skippable else []):
            return False
    return True


def _lines(output: str) -> Iterator[str]:
    """Yields the lines without colours."""
    for line in io.StringIO(output, newline=None):
        if len(line) <= LONGEST_LINE:
            yield (ANSI.sub("", line) if "\x1b" in line else line).rstrip("\n")


def _canonical(name: str) -> str:
    """Returns a name without folders of this machine and spellings of enumerations in the parameters."""
    test, bracket, parameters = name.partition("[")
    for old, new in MOUSE.items():
        parameters = parameters.replace(old, new)
    if parameters.startswith("/") and not parameters.startswith("//") and "*" not in parameters:
        parameters = "/" + parameters.rpartition("/")[2]
    return test + bracket + parameters


def _is_open(name: str) -> bool:
    """Returns True for a name that ends inside the parameters."""
    return name.count("[") > name.count("]")


def _of_pytest(lines: Iterable[str]) -> Results:
    """Yields results from the summary (`PASSED a.py::test`, by `-rA`) and from verbose lines (`a.py::test PASSED`)."""
    for line in lines:
        first, _, rest = line.strip().partition(" ")
        if first in RESULTS and rest:
            yield (rest if first == "PASSED" else rest.partition(" - ")[0]).strip(), first
        elif "::" in first:
            yield from _verbose(line.strip())


def _verbose(line: str) -> Results:
    """Yields the result of a line of `pytest -v`: `a.py::test PASSED [ 50%]`, `a.py::test SKIPPED (reason)`."""
    if line.endswith("%]"):
        line = line.rpartition(" [")[0].rstrip()
    name, _, result = line.rpartition(" ")
    if result in RESULTS:
        yield name.strip(), result
    for result in ("SKIPPED", "XFAIL", "XPASS") if line.endswith(")") else ():
        name, word, _ = line.partition(f" {result} (")
        if word:
            yield name.strip(), result


def _of_r2e(lines: Iterable[str]) -> Results:
    """Yields pytest's results under R2E's names, `Class.test`."""
    for name, result in _of_pytest(lines):
        if "::" in name:
            yield ".".join(name.split("::")[1:]), result


def _of_unittest(lines: Iterable[str]) -> Results:
    """Yields results of unittest's and Django's verbose lines, `test (module.Class) ... ok`.

    A test that prints text pushes its result to the end of the printed line, or to a line of its own; the latter
    counts. Up to Python 3.10 a test with a failed subtest has no result: the next test follows on the same line, and
    only a heading tells of the failure.
    """
    pending = None
    for line in lines:
        kind, colon, failed = line.partition(": ")
        if colon and kind in ("FAIL", "ERROR"):
            yield failed.strip(), UNITTEST[kind]
            yield failed.partition(")")[0].strip() + ")", UNITTEST[kind]  # without the subtest's parameters
            continue
        if line.startswith("=" * 70):  # before the headings
            pending = None
        if " ... " in line:
            pending, text = _last_test(line)
            result = next((UNITTEST[word] for word in UNITTEST if _ends_with_word(text, word)), None)
        else:
            text = line.strip()
            result = UNITTEST.get(text)
        if text.startswith(("skipped '", 'skipped "')):
            result = "SKIPPED"
        if pending is not None and result is not None:
            yield pending, result
            if text in UNITTEST or result == "SKIPPED":
                pending = None


def _last_test(line: str) -> tuple[str, str]:
    """Returns the name of the last test that begins in a line, and the text that follows."""
    parts = line.split(" ... ")
    last = max([0, *(i for i, part in enumerate(parts[:-1]) if _is_test(part))])
    name = parts[last].strip()
    if name.startswith("Applying "):  # Django's migrations print no end of line: django-7188
        name = name.rpartition("...")[2]
    return name, " ... ".join(parts[last + 1 :]).strip()


def _is_test(text: str) -> bool:
    """Returns True for a test's description without a docstring, `test_a (module.Class)`."""
    name, bracket, _ = text.strip().partition(" (")
    return bool(bracket) and name.isidentifier() and text.rstrip().endswith(")")


def _ends_with_word(text: str, word: str) -> bool:
    before = text.removesuffix(word)
    return before != text and not before[-1:].isalnum()


def _of_sympy(lines: Iterable[str]) -> Results:
    """Yields results of sympy's verbose lines, `test_name ok`, and of its headings of failures.

    Text printed by a test stands between the name and the result.
    """
    for line in lines:
        line = line.strip()
        if line.startswith("test_"):
            words = line.split()
            if words[-1] in ("[OK]", "[FAIL]"):
                del words[-1]
            result = SYMPY.get(words[-1]) or SYMPY.get("".join(words[1:2]))
            if result:
                yield words[0], result
        elif line.startswith("_") and line.endswith("_"):
            _, place, name = line.strip("_").strip().rpartition(".py:")
            if place:
                yield name, "FAILED"


REPORTS: Mapping[str, Callable[[Iterable[str]], Results]] = {
    "exit": lambda _: iter(()),
    "pytest": _of_pytest,
    "r2e": _of_r2e,
    "unittest": _of_unittest,
    "django": _of_unittest,
    "sympy": _of_sympy,
}
"""Format of a test command's output → reader of (name, result)."""
