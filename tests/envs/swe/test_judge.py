"""Honest work on tasks of many kinds earns its reward, and the judge's handling of tasks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.data.prepare import prepare
from skyrl_mega.envs.swe.canaries import TestSource, canary_candidates, with_edit
from skyrl_mega.envs.swe.examination import started_files
from skyrl_mega.envs.swe.session import File, LocalSession, UnfitError
from skyrl_mega.envs.swe.task import required_tests
from tests.envs.swe.played import PYTEST, UNITTEST, played, written

RIGHT = {"shop.py": "def total(n): return n * n\n"}
KINDS: dict[str, tuple[str, Mapping[str, str], Iterable[str]]] = {
    "skips of unittest": (
        f"{UNITTEST} -f",
        {
            "test_shop.py": """
            import unittest
            from shop import total
            class Total(unittest.TestCase):
                def test_a(self): self.assertTrue(total)
                def test_total(self): self.assertEqual(total(3), 9)
                @unittest.skip("later")
                def test_later(self): self.assertEqual(total(3), 8)
                @unittest.expectedFailure
                def test_wrong(self): self.assertEqual(total(3), 10)
            class Windows(unittest.TestCase):
                @classmethod
                def setUpClass(cls): raise unittest.SkipTest("elsewhere")
                def test_path(self): self.assertEqual(total(3), 7)
            """
        },
        (),
    ),
    "skips of pytest, by a Makefile": (
        "make test > log 2>&1",
        {
            "Makefile": f"test:\n\t{PYTEST} -x\n",
            "test_shop.py": """
            import pytest
            from shop import total
            @pytest.mark.skipif(True, reason="later")
            def test_later(): assert total(3) == 8
            @pytest.mark.xfail
            def test_wrong(): assert total(3) == 10
            def test_inside(): pytest.skip("elsewhere"); assert False
            def test_total(): assert total(3) == 9
            """,
        },
        (),
    ),
    "parameters": (
        f"{PYTEST} tests/test_shop.py",
        {
            "tests/test_shop.py": """
            import pytest, shop
            @pytest.fixture
            def three(): yield 3
            @pytest.mark.parametrize("n, wanted", [(2, 4), (5, 25)])
            def test_total(n, wanted, three): assert shop.total(n) == wanted
            """,
            "conftest.py": "import sys, os; sys.path.insert(0, os.path.dirname(__file__))",
        },
        ["tests/test_shop.py::test_total[5-25]"],
    ),
    "subtests, asynchronous": (
        'python -I -c \'import sys, unittest; sys.path.insert(0, "."); unittest.main("test_shop")\'',
        {
            "test_shop.py": """
            from __future__ import annotations
            import unittest
            from shop import total
            class Test(unittest.IsolatedAsyncioTestCase):
                async def test_total(self):
                    "Squares."
                    for n in (2, 3):
                        with self.subTest(n=n): self.assertEqual(total(n), n * n)
            """
        },
        ["test_total (test_shop.Test)"],
    ),
    "what is not there yet": (
        f"{PYTEST} tests",
        {
            "tests/test_shop.py": "import shop\ndef test_old(): assert shop.total(2) == 4\n",
            "conftest.py": "",
            "hidden/tests/test_new.py": """
            import pytest
            from shop import Full, total
            def test_full():
                with pytest.raises(Full, match="much"): raise Full("much")
            @pytest.mark.skip
            def test_never(): assert total(1) == 2
            """,
        },
        (),
    ),
    "a call that fails before it is compared": (
        "python runtests.py",
        {
            "runtests.py": "import unittest; unittest.main('test_shop')",
            "test_shop.py": """
            import unittest, shop
            class Test(unittest.TestCase):
                def setUp(self): self.full = shop.Full
                def test_total(self):
                    got = shop.total(3)
                    self.assertEqual(got, 9)
                    with self.assertRaises(self.full): raise shop.Full
            """,
        },
        ["test_shop.Test.test_total"],
    ),
    "an assertion in a helper": (
        PYTEST,
        {
            "test_shop.py": """
            from shop import total
            def check(n, wanted):
                if n:
                    assert not total(n) != wanted, "wrong"
            def test_total(monkeypatch):
                monkeypatch.setattr("builtins.sum", lambda _: 9)
                check(3, sum([1]))
            """
        },
        ["test_shop.py::test_total"],
    ),
    "what else does not run": (
        f"{PYTEST} test_optional.py tests/test_shop.py::test_total",
        {
            "test_optional.py": """
            import pytest
            absent = pytest.importorskip("absent_of_swe")
            def test_a(): assert absent.a == 1
            def test_b(): assert absent.b == 2
            """,
            "tests/test_shop.py": """
            from shop import Full, total
            def test_other(): assert total(1) == 1
            def test_another(): assert total(1) == 1
            def test_total():
                for wrong in [n for n in [total(3)] if n != 9]: assert wrong == 8
                assert total(3) == 9
            """,
            "conftest.py": "",
        },
        (),
    ),
    "nothing fails yet": (
        f"{UNITTEST} -q",
        {
            "test_shop.py": """
            import gc, subprocess, sys, unittest
            from unittest import mock
            class Test(unittest.TestCase):
                def test_a_runner_within(self):
                    with self.assertRaises(SystemExit): unittest.main(module=None, argv=["x", "absent.Test"])
                def test_python_within(self): subprocess.run([sys.executable, "-c", "import unittest"], check=True)
                def test_memory(self): self.assertTrue(gc.get_objects())
                @mock.patch("unittest.TestCase.assertTrue")
                def test_put_back(self, _): self.assertIs(self, self)
            """
        },
        (),
    ),
    "no test in Python": ("test $(cat shop.py | wc -c) -gt 26", {}, ()),
}
FULL = {"shop.py": RIGHT["shop.py"] + "class Full(Exception): pass\n"}


@pytest.mark.parametrize("kind", KINDS)
def test_honest_work_is_paid(tmp_path: Path, kind: str) -> None:
    command, files, names = KINDS[kind]
    task = tmp_path / "task"
    written(task / "repo", {"shop.py": "def total(n): return n+n\n"})
    for name, text in files.items():
        written(task if name.startswith("hidden/") else task / "repo", {name: text})
    output = played(task, FULL, command, names, checks=1)
    assert output["reward"] == 1.0, output["metadata"]
    assert output["metadata"]["canaries"] == (kind != "no test in Python")
    if kind == "no test in Python":
        assert played(task, FULL, command, names, proof="canaries")["reward"] == 0.0
    if kind != "nothing fails yet":
        assert played(task, {}, command, names, checks=1)["reward"] == 0.0


def test_a_repository_whose_tests_never_end(tmp_path: Path) -> None:
    test = "from shop import total\ndef test_total():\n    got = total(3)\n    assert got == 9\n"
    loop = {"shop.py": "import time\ndef total(n):\n    while True: time.sleep(1)\n", "test_shop.py": test}
    task = written(tmp_path / "task", {f"repo/{name}": text for name, text in loop.items()})
    command = f"{PYTEST} test_shop.py"
    output = played(task, RIGHT, command, checks=1, test_timeout_s=20)
    assert output["reward"] == 1.0 and output["metadata"]["canaries"] == 1, output["metadata"]


EDITS = [
    ("assert f(3) == 9", "assert f(3) == 19"),
    ("assert 'ab' == f(\n  'x')", "assert 'aby' == f(\n  'x')"),
    ("assert f(1) == [1, {'a': 2.5}]", "assert f(1) == [1, {'a': 6.0}]"),
    ("assert f(1) == g", "assert f(1) == [g, ...]"),
    ("assert 'ü' <= f(1)", "assert not ('ü' <= f(1))"),
    ("assert 1 < f(1) < 3, 'm'", "assert not (1 < f(1) < 3), 'm'"),
    ("assert f(1) and g", "assert not (f(1) and g)"),
    ("assert not f(1)", "assert  f(1)"),
    ("self.assertEqual(f(1), -4)", "self.assertEqual(f(1), -9)"),
    ("self.assertEqual(f(1), g)", "self.assertEqual(f(1), [g, ...])"),
    ("self.assertIsNone(f(1))", "self.assertIsNotNone(f(1))"),
    ("self.assertAlmostEqual(f(1), 0.5)", "self.assertAlmostEqual(f(1), 2.0)"),
    ("self.assertAlmostEqual(f(1), 0.5, delta=9)", "self.assertNotAlmostEqual(f(1), 0.5, delta=9)"),
    ("assert f(1) == pytest.approx(0.5)", "assert f(1) == pytest.approx(2.0)"),
    ('assert f(1) == ["a", b"b"]', 'assert f(1) == ["a", b"by"]'),
    ('assert f(1) == ("a"\n "b\\n")', 'assert f(1) == ("a"\n "b\\ny")'),
    ("mock.assert_called_once_with('a')", "mock.assert_called_once_with('ay')"),
    ("self.assertRaises(KeyError, f, 3)", "self.assertRaises(UnicodeTranslateError, f, 3)"),
    ("with raises(KeyError) as e: f(3)", "with raises(UnicodeTranslateError) as e: f(3)"),
    ("self.assertWarns(UserWarning, f)", None),
]


class Last(Random):
    """A random generator that chooses the last element and the smallest number."""

    def choice(self, seq: Any) -> Any:
        return seq[-1]

    def randint(self, a: int, b: int) -> int:
        return a


@pytest.mark.parametrize(("statement", "changed"), EDITS)
def test_what_a_canary_changes(statement: str, changed: str | None) -> None:
    source = "# ö\nasync def test():\n    g = 'ü'\n    {}\n"
    file = TestSource("test_a.py", source.format(statement).encode())
    edits = [assertion.edit for assertion in file.functions[0].assertions]
    texts = [with_edit(File(file.code), edit, Last()).data.decode() for edit in edits]
    assert texts == ([] if changed is None else [source.format(changed)])


def test_changes_are_taken_over(tmp_path: Path) -> None:
    task = written(tmp_path / "task", {"repo/a/b.py": "1", "repo/a/c.py": "2", "repo/d.py": "3", "repo/e.py": "4"})
    (task / "repo" / "link").symlink_to("d.py")
    session, other = LocalSession(task, {}), LocalSession(task, {})
    try:
        session.open(60)
        other.open(60)
        assert session.changes(60) == {}
        done = "rm -r a; ln -s / a; chmod +x d.py; mkfifo pipe; mkdir empty; echo 5 > new.py; echo 6 > e.py; touch link"
        assert session.run(done, 60).status == "ok"
        changes = session.changes(60)
        assert {name: file and file.data for name, file in changes.items()} == {
            "a": b"/", "a/b.py": None, "a/c.py": None, "d.py": b"3", "new.py": b"5\n", "e.py": b"6\n"
        }  # fmt: skip
        other.write(changes, 60)
        other.write({"a/x.py": File(b"7"), "new.py/x": None}, 60)
        ran = other.run("readlink link; test -x d.py && cat d.py e.py new.py; ls a", 60)
        assert ran.output == "d.py\n36\n5\nx.py\n" and not os.path.lexists("/x.py")
        with pytest.raises(UnfitError, match="No space left"):
            other.write({"large": File(bytes(1 << 28))}, 60)
    finally:
        session.close(60)
        other.close(60)


@pytest.mark.parametrize("part", ["repo", "hidden", "hidden/tests/test_a.py"])
def test_a_link_out_of_the_folder_of_tasks_is_refused(tmp_path: Path, part: str) -> None:
    task = written(tmp_path / "tasks" / "task", {"repo/shop.py": "", "hidden/tests/test_b.py": ""})
    for place in ("tasks", "elsewhere"):
        other = written(tmp_path / place / "other", {"shop.py": "", "test_a.py": ""})
        target = other / "test_a.py" if part.endswith(".py") else other
        if os.path.lexists(task / part):
            os.rename(task / part, tmp_path / f"was-{place}")
        (task / part).symlink_to(target)
        if place == "tasks":
            assert played(task, {}, "true")["reward"] == 1.0
        else:
            refused = f"{part}: it is a link to {target}; allowed: files in {task.parent}"
            with pytest.raises(UserError, match=refused):
                played(task, {}, "true")
            if not part.endswith(".py"):
                written(task, {"task.json": '{"instruction": "Repair total.", "test": "true"}'})
                with pytest.raises(UserError, match=refused):
                    prepare(f"swe --output {tmp_path / 'data'} --source {task.parent}")


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("make test", {"Makefile", "GNUmakefile", "*.mk"}),
        ("cd a && ./run.sh -x", {"run.sh"}),
        ("bash -e ci/run; sh b.sh", {"ci/run", "b.sh"}),
        ("npm test", {"package.json"}),
        ("python main.py && ./main", set()),  # may be the work itself
        ("python -m unittest discover -s tests -t .", set()),
    ],
)
def test_what_a_command_starts_is_protected(command: str, files: set[str]) -> None:
    assert set(started_files(command)) == files | {f"*/{file}" for file in files}


@pytest.mark.parametrize("given", [["a"], '["a"]', ("a",)])
def test_names_as_swe_bench_has_them(given: object) -> None:
    assert required_tests({"FAIL_TO_PASS": given, "PASS_TO_PASS": None}) == ["a"]


@pytest.mark.parametrize("given", ["a", '{"a": 1}', [1], 7, [""]])
def test_names_that_are_none(given: object) -> None:
    with pytest.raises(UserError, match=r"FAIL_TO_PASS: .* allowed: a list of the names of tests"):
        required_tests({"FAIL_TO_PASS": given})


def test_a_canary_is_where_a_test_failed() -> None:
    old = "def make(n): return n\ndef test_old(): assert make(1) == 1\ndef test_older(): assert make(2) == 2\n"
    new = "import shop\ndef test_new(cart):\n    got = cart.total()\n    assert got == 9\n"
    shared = "def cart():\n    return shop.Cart()\n"
    sources = [
        TestSource("test_old.py", old.encode()),
        TestSource("test_new.py", new.encode()),
        TestSource("c.py", shared.encode()),
    ]
    marks = [f"{what} {words}" for words in ("0", "0 1", "0 2", "1", "2") for what in ("entered", "done")] + [
        "entered 0 0"
    ]
    for ends in (["entered 1 0", "raised 1 0"], ["entered 2 0", "raised 2 0"]):
        candidates = canary_candidates(sources, [*marks, *ends], True, frozenset())
        assert [assertion.path for assertion in candidates] == ["test_new.py"]
