"""Results of tests, read from outputs in the forms of several runners."""

from __future__ import annotations

import re
import sys
import tracemalloc
from typing import Any

import pytest

from skyrl_mega.envs.swe.reports import ANSI, LONGEST_LINE, REPORTS, passed

PYTEST = """\
tests/test_a.py::test_verbose PASSED                                     [ 50%]
tests/test_a.py::test_verbose[x y] FAILED                                [ 60%]
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_words[a b]
PASSED tests/test_a.py::test_path[/home/me/data/file.txt]
\x1b[32mPASSED\x1b[0m tests/test_a.py::\x1b[1mtest_color\x1b[0m
SKIPPED [1] tests/test_a.py:12: later
XFAIL tests/test_a.py::test_known - reason
XPASS tests/test_a.py::test_strange
ERROR tests/test_a.py::test_error - RuntimeError: x
FAILED tests/test_a.py::test_two - assert 1 == 2
PASSED tests/test_a.py::test_both
FAILED tests/test_a.py::test_both
"""
UNITTEST = """\
test_one (pkg.test_a.Case) ... ok
test_upper (pkg.test_a.Case) ... OK
test_doc (pkg.test_a.Case)
The first line of a docstring. ... ok
test_prints (pkg.test_a.Case) ... some text
more text
ok
test_skip (pkg.test_a.Case) ... skipped 'why'
test_expected (pkg.test_a.Case) ... expected failure
test_unexpected (pkg.test_a.Case) ... unexpected success
test_two (pkg.test_a.Case) ... FAIL
test_three (pkg.test_a.Case) ... ERROR
test_migrates (pkg.test_a.Case) ...   Applying pkg.0001_initial... OK
test_subtest (pkg.test_a.Case) ... test_next (pkg.test_a.Case) ... ok
test_subtest_doc (pkg.test_a.Case)
A docstring above a failed subtest. ... test_after_doc (pkg.test_a.Case)
Another docstring. ... ok
test_database (pkg.test_a.Case) ... Database ERROR
an ERROR
ok
test_says_ok (pkg.test_a.Case) ... it is ok
ERROR
  Applying sites.0002_alter_domain_unique...test_no_migrations (pkg.test_a.Case) ... ok
test_message (pkg.test_a.Case) ... printed ok
test_last_subtest (pkg.test_a.Case) ... text

======================================================================
FAIL: test_migrates (pkg.test_a.Case)
----------------------------------------------------------------------
======================================================================
FAIL: test_subtest (pkg.test_a.Case) (i=1)
----------------------------------------------------------------------
======================================================================
FAIL: test_message (pkg.test_a.Case) [message] (i=1)
----------------------------------------------------------------------
ok
Ran 9 tests in 0.1s

FAILED (failures=1)
"""
SYMPY = """\
sympy/core/tests/test_a.py[4]
test_one ok
test_two F
test_three E
test_known f
test_prints a note ok
test_prints_and_fails ok F
test_skip s                                                        [FAIL]
________________________________________________________________________________
_________________ sympy/core/tests/test_a.py:test_heading _____________________
"""


@pytest.mark.parametrize(
    ("report", "output", "right", "wrong"),
    [
        (
            "pytest",
            PYTEST,
            [
                "tests/test_a.py::test_verbose",
                "tests/test_a.py::test_one",
                "tests/test_a.py::test_words[a b]",
                "tests/test_a.py::test_words[a",  # SWE-bench cuts names at a space
                "tests/test_a.py::test_path[/elsewhere/file.txt]",
                "tests/test_a.py::test_color",
                "tests/test_a.py::test_known",
            ],
            ["test_one", "test_two", "test_both", "test_error", "test_strange", "test_verbose[x y]", "test_absent"],
        ),
        ("r2e", "PASSED r2e_tests/test_1.py::T::test_a\n", ["T.test_a"], ["test_a", "T.test_b"]),
        (
            "unittest",
            UNITTEST,
            [
                "test_one (pkg.test_a.Case)",
                "test_upper (pkg.test_a.Case)",
                "The first line of a docstring.",
                "test_prints (pkg.test_a.Case)",
                "test_expected (pkg.test_a.Case)",
                "test_next (pkg.test_a.Case)",
                "Another docstring.",
                "test_database (pkg.test_a.Case)",
                "test_no_migrations (pkg.test_a.Case)",
            ],
            [
                *(f"test_{name} (pkg.test_a.Case)" for name in ("skip", "unexpected", "two", "three", "migrates")),
                *(f"test_{name} (pkg.test_a.Case)" for name in ("absent", "subtest", "says_ok", "message")),
                "test_last_subtest (pkg.test_a.Case)",
                "A docstring above a failed subtest.",
            ],
        ),
        (
            "sympy",
            SYMPY,
            ["test_one", "test_known", "test_prints"],
            ["test_two", "test_three", "test_skip", "test_heading", "test_prints_and_fails"],
        ),
    ],
)
def test_only_tests_with_a_passing_result_have_passed(
    report: str, output: str, right: list[str], wrong: list[str]
) -> None:
    assert passed(report, output, right)
    for name in wrong:
        name = f"tests/test_a.py::{name}" if report == "pytest" and name != "test_one" else name
        assert not passed(report, output, [*right, name]), name


@pytest.mark.parametrize(
    ("report", "output", "name"),
    [
        ("django", "test_a (cache.tests.LocMem) ... ok\n", "test_a (cache.tests.Database)"),
        ("sympy", "test_a ok\n", "test_a b"),
        ("pytest", "PASSED a.py::test_a[x 1]\n", "a.py::test_a[x 2]"),
        ("r2e", "PASSED a.py::test_a[x 1]\n", "test_a[x 2]"),
        ("pytest", "PASSED a.py::test_a[x - 1]\n", "a.py::test_a[x - 2]"),
        ("pytest", "PASSED a.py::test_a[x 1]\nFAILED a.py::test_a[x 2]\n", "a.py::test_a[x"),
        ("pytest", "FAILED a.py::test_a[x 1]\nPASSED a.py::test_a[x 2]\n", "a.py::test_a[x"),
        ("pytest", "FAILED a.py::test_a[/b/c]\nPASSED a.py::test_a[/d/c]\n", "a.py::test_a[/c]"),
    ],
)
def test_a_neighbour_does_not_stand_in_for_a_test(report: str, output: str, name: str) -> None:
    assert not passed(report, output, [name])


@pytest.mark.parametrize(
    ("report", "output", "name"),
    [
        ("pytest", "a.py::test_a SKIPPED (no network) [ 50%]\n", "a.py::test_a"),
        ("django", "test_a (m.A) ... skipped 'no network'\n", "test_a (m.A)"),
        ("django", "test_a (m.A) ... text\nskipped 'no network'\n", "test_a (m.A)"),
    ],
)
def test_only_a_test_that_passed_before_may_be_skipped(report: str, output: str, name: str) -> None:
    assert passed(report, output, [name], may_skip=[name])
    assert not passed(report, output, [name])
    assert not passed(report, "", [name], may_skip=[name])


HOSTILE = ["_ " + ".py:" * 2400, " ... " * 1900, "a (b) ... " * 900, "a::b " + "PASSED " * 1400, "\x1b[" + "0;" * 4900]
HOSTILE += ["FAIL: " + ")" * 9900, "PASSED a[" + "/" * 9900, "test_ " + "ok " * 3000, "a::b SKIPPED (" * 700 + ")"]


@pytest.mark.parametrize("report", [name for name in REPORTS if name != "exit"])
def test_hostile_output_is_read_in_linear_work(report: str) -> None:
    output = "\n".join(HOSTILE * 20) + "\n" + "_ .py:" * 500_000 + "\n" + "PASSED a\n" * 10_000
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")
        owner = getattr(argument, "__self__", None)
        assert not isinstance(owner, re.Pattern) or owner is ANSI, "a regular expression on hostile text"
        assert frame.f_code.co_filename != re.__file__, "a regular expression on hostile text"

    sys.setprofile(count)
    try:
        assert not passed(report, output, ["test_a", "a[/x"])
    finally:
        sys.setprofile(None)
    words = sum(line.count(" ... ") for line in HOSTILE) * 20
    assert calls < 40 * output.count("\n") + 10 * words
    assert all(len(line) <= LONGEST_LINE for line in HOSTILE)


def test_of_the_results_only_those_of_required_tests_are_kept() -> None:
    output = "".join(f"PASSED a.py::test_{i}[{'x' * 90}]\n" for i in range(20_000))
    tracemalloc.start()
    try:
        assert not passed("pytest", output, ["a.py::test_b"])
        assert tracemalloc.get_traced_memory()[1] < 6 * len(output)
    finally:
        tracemalloc.stop()
