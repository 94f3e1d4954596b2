"""The functions that are certainly required tests, and the choice of canaries among them."""

from __future__ import annotations

import pytest

from skyrl_mega.envs.swe.canaries import TestSource, canary_candidates
from skyrl_mega.envs.swe.required import required_functions

CODE = """\
import unittest, imported

class Shared:
    def test_shared(self): assert f() == 1
    def test_own(self): assert f() == 2

class Near(Shared, unittest.TestCase):
    def test_add(self):
        'The sum of two numbers.\\n\\nMore words.'
        assert f() == 3
    def test_own(self): assert f() == 4

class Far(imported.Mixin, Shared):
    def test_add(self): assert f() == 5
    def test_far(self): assert f() == 6

class Expected(Shared):
    @unittest.expectedFailure
    def test_shared(self): assert f() == 7

def test_plain(): assert f() == 8
"""


def chosen(report: str, name: str, *paths: str) -> list[str]:
    """Returns the required functions as `path:Class.function`."""
    sources = [TestSource(path, CODE.encode()) for path in paths or ("tests/shop/test_cart.py",)]
    found = required_functions(sources, [name], report)
    return [
        f"{source.path}:{'.'.join([*function.scope, function.node.name])}"
        for source in sources
        for function in source.functions
        if function in found
    ]


@pytest.mark.parametrize(
    ("report", "name", "function"),
    [
        ("pytest", "tests/shop/test_cart.py::Near::test_add[a.b::c]", "Near.test_add"),
        ("pytest", "tests/shop/test_cart.py::test_plain", "test_plain"),
        ("pytest", "shop/test_cart.py::Near::test_shared", "Shared.test_shared"),  # inherited; run in tests/
        ("pytest", "tests/shop/test_cart.py::Near::test_own", "Near.test_own"),
        ("pytest", "tests/shop/test_cart.py::Far::test_shared", None),  # perhaps the mixin's
        ("pytest", "tests/shop/test_cart.py::Expected::test_shared", None),
        ("pytest", "tests/shop/test_other.py::Near::test_add", None),
        ("unittest", "test_add (tests.shop.test_cart.Near.test_add)", "Near.test_add"),
        ("unittest", "tests.shop.test_cart.Near.test_add", "Near.test_add"),
        ("django", "test_add (shop.test_cart.Far)", "Far.test_add"),
        ("django", "test_shared (shop.test_cart.Near)", "Shared.test_shared"),
        ("django", "The sum of two numbers.", "Near.test_add"),
        ("r2e", "Far.test_add[1]", "Far.test_add"),
        ("r2e", "test_add", None),
        ("sympy", "test_plain", "test_plain"),
        ("sympy", "test_add", None),
    ],
)
def test_a_name_chooses_the_one_function_that_it_names(report: str, name: str, function: str | None) -> None:
    assert chosen(report, name) == ([] if function is None else [f"tests/shop/test_cart.py:{function}"])


def test_a_name_that_fits_functions_of_two_files_chooses_none() -> None:
    paths = ("tests/a/test_a.py", "tests/b/test_a.py")
    assert chosen("unittest", "test_add (test_a.Near)", *paths) == []
    assert chosen("unittest", "test_add (b.test_a.Near)", *paths) == ["tests/b/test_a.py:Near.test_add"]
    assert chosen("pytest", "test_a.py::test_plain", "test_a.py", *paths) == ["test_a.py:test_plain"]


def test_a_canary_is_never_in_a_test_that_nothing_requires() -> None:
    code = (
        "class Near:\n    def test_add(self):\n        assert add(1, 2) == 3\n"
        "class Far:\n    def test_add(self):\n        assert far(1, 2) == 3\n"
    )
    for names, marks, line in (
        (["a.py::Near::test_add"], ["0 0", "0 1"], 3),
        (["b.py::Near::test_add"], ["0 1"], None),
        (["a.py::test_add"], ["0 0", "0 1"], None),
    ):
        source = TestSource("a.py", code.encode())
        required = required_functions([source], names, "pytest")
        marks = [f"{word} 0" for word in ("entered", "done")] + [f"entered {m}" for m in marks]
        marks += ["failed 0 1 0", "raised 0 1"] + (["failed 0 0 0", "raised 0 0"] if "entered 0 0" in marks else [])
        found = canary_candidates([source], marks, True, required, only_preferred=True)
        assert [assertion.node.lineno for assertion in found] == ([] if line is None else [line])
