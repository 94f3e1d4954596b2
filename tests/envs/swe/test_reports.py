"""Results of tests, read from outputs in the forms of several runners."""

from __future__ import annotations

import pytest

from skyrl_mega.envs.swe.reports import passed

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

======================================================================
FAIL: test_migrates (pkg.test_a.Case)
----------------------------------------------------------------------
Ran 9 tests in 0.1s

FAILED (failures=1)
"""
SYMPY = """\
sympy/core/tests/test_a.py[4]
test_one ok
test_two F
test_three E
test_known f
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
            ],
            [f"test_{name} (pkg.test_a.Case)" for name in ("skip", "unexpected", "two", "three", "migrates", "absent")],
        ),
        ("sympy", SYMPY, ["test_one", "test_known"], ["test_two", "test_three", "test_skip", "test_heading"]),
    ],
)
def test_only_tests_with_a_passing_result_have_passed(
    report: str, output: str, right: list[str], wrong: list[str]
) -> None:
    assert passed(report, output, right)
    for name in wrong:
        name = f"tests/test_a.py::{name}" if report == "pytest" and name != "test_one" else name
        assert not passed(report, output, [*right, name]), name
