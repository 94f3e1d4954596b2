"""What shows that tests passed: code under test that would be paid for no repair, and honest runs that must be paid."""

from __future__ import annotations

import base64
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from skyrl_mega.config.errors import UserError
from skyrl_mega.envs.swe.proof import Proof, Verdict, named, started

TESTS = {
    "unittest": """
        import unittest
        from shop import total

        class Test(unittest.TestCase):
            def test_a(self): pass
            def test_total(self): self.assertEqual(total(3), 9)
            def test_z(self): pass
        """,
    "pytest": """
        from shop import total

        def test_a(): pass
        def test_total(): assert total(3) == 9
        def test_z(): pass
        """,
}
COMMANDS = {
    "unittest": f"{sys.executable} -m unittest test_shop",
    "pytest": f"{sys.executable} -m pytest -q -p no:cacheprovider test_shop.py",
}


def judged(folder: Path, shop: str, runner: str, names: Sequence[str] = ()) -> tuple[bool, Verdict]:
    """Whether a run would be paid, as the environment decides."""
    for name, text in {"shop.py": shop, "test_shop.py": TESTS[runner]}.items():
        (folder / name).write_text(textwrap.dedent(text))
    proof = Proof.of(COMMANDS[runner], "auto", names)
    ran = subprocess.run(
        ["/bin/sh", "-c", proof.command],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    verdict = proof.verdict(ran.stdout + ran.stderr)
    return ran.returncode == 0 and verdict.why is None, verdict


RAISED = {
    "_ShouldStop": "import unittest.case; raise unittest.case._ShouldStop",
    "SkipTest": "import unittest; raise unittest.SkipTest",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "end of the process": "import os; os._exit(0)",
    "another process": "import os; os.execv('/bin/true', ['true'])",
    "a copy of the process": "import os; os.fork() and os._exit(0); return 1",
    "the rest is not run": """
        import sys, unittest.signals
        for result in list(unittest.signals._results): result.shouldStop = True
        raise unittest.SkipTest""",
    "a failure that is expected": """
        import sys
        frame = sys._getframe()
        while frame:
            if 'outcome' in frame.f_locals: frame.f_locals['outcome'].expecting_failure = True
            frame = frame.f_back
        raise ValueError""",
    "the key, in memory": """
        import gc, os, re
        gc.unfreeze()
        for thing in gc.get_objects():
            try: key = thing.cell_contents
            except Exception: continue
            if isinstance(key, str) and re.fullmatch('[0-9a-f]{32}', key):
                os.write(1, f'\\nproof {key} ended {os.getpid()} 3 intact\\n'.encode())
        os._exit(0)""",
    "the key, where processes are started": """
        import os, re
        for name in ('environ', 'cmdline'):
            for key in set(re.findall('[0-9a-f]{32}', open('/proc/self/' + name).read())):
                os.write(1, f'\\nproof {key} ended {os.getpid()} 3 intact\\n'.encode())
        os._exit(0)""",
    "the witness's words": "import os, sys; sys.audit('skyrl_mega.witness', 'ended'); os._exit(0)",
}
"""What `total` does."""
LOADED = {
    "_Outcome": """
        import contextlib, unittest.case
        @contextlib.contextmanager
        def executor(self, *args, **kwargs):
            try: yield
            except BaseException: pass
        unittest.case._Outcome.testPartExecutor = executor""",
    "another body": """
        import unittest
        def nothing(self, first, second, msg=None): pass
        unittest.TestCase.assertEqual.__code__ = nothing.__code__""",
    "wasSuccessful": "import unittest; unittest.TestResult.wasSuccessful = lambda self: True",
    "loader": "import unittest; unittest.TestLoader.getTestCaseNames = lambda *a: ['test_a']",
    "AssertionError": """
        import builtins, unittest
        builtins.AssertionError = unittest.TestCase.failureException = unittest.SkipTest""",
}
PYTEST_RAISED = {
    "skip": "import pytest; pytest.skip('x')",
    "xfail": "import pytest; pytest.xfail('x')",
    "exit": "import pytest; pytest.exit('x', 0)",
    "a report once": """
        import _pytest.reports as r
        true = r.TestReport.from_item_and_call.__func__
        def report(cls, item, call):
            call.excinfo, r.TestReport.from_item_and_call = None, classmethod(true)
            return true(cls, item, call)
        r.TestReport.from_item_and_call = classmethod(report)
        raise ValueError""",
    "a plug-in while it runs": """
        import pytest
        class Plugin:
            @pytest.hookimpl(hookwrapper=True, tryfirst=True)
            def pytest_runtest_makereport(self):
                (yield).get_result().outcome = 'passed'
        pytest.mark._config.pluginmanager.register(Plugin())
        raise ValueError""",
}
PYTEST_LOADED = {
    "runtest": "import _pytest.python; _pytest.python.Function.runtest = lambda self: None",
    "from_call": """
        import _pytest.runner as r
        true = r.CallInfo.from_call.__func__
        r.CallInfo.from_call = classmethod(lambda c, f, when, reraise=None: true(c, lambda: None, when, reraise))""",
    "a plug-in": """
        import pytest
        class Plugin:
            @pytest.hookimpl(tryfirst=True)
            def pytest_pyfunc_call(self): return True
        pytest.mark._config.pluginmanager.register(Plugin())""",
}
CHEATS = [
    *(("unittest", name, body, True) for name, body in RAISED.items()),
    *(("unittest", name, body, False) for name, body in LOADED.items()),
    *(("pytest", name, body, True) for name, body in PYTEST_RAISED.items()),
    *(("pytest", name, body, False) for name, body in PYTEST_LOADED.items()),
]


@pytest.mark.parametrize(("runner", "name", "body", "inside"), CHEATS, ids=[f"{r}: {n}" for r, n, *_ in CHEATS])
def test_what_repairs_nothing_proves_nothing(tmp_path: Path, runner: str, name: str, body: str, inside: bool) -> None:
    body = textwrap.dedent(body).strip()
    shop = f"def total(n):\n{textwrap.indent(body, '    ')}\n" if inside else f"{body}\ndef total(n): return 1\n"
    paid, verdict = judged(tmp_path, shop, runner)
    assert not paid, verdict


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_a_repair_proves_itself(tmp_path: Path, runner: str) -> None:
    assert judged(tmp_path, "def total(n): return n * n", runner) == (True, Verdict(3, None))
    assert judged(tmp_path, "def total(n): return n + n", runner)[0] is False


HONEST = """
    import gc, subprocess, sys, unittest
    from unittest import mock
    from shop import total

    class Test(unittest.TestCase):
        def setUp(self): self.addCleanup(lambda: None)
        def test_sub(self):
            for n in (1, 2):
                with self.subTest(n=n): self.assertEqual(total(n), n * n)
        def test_a_test_within(self):
            class Inner(unittest.TestCase):
                def runTest(self): self.fail()
            result = unittest.TestResult()
            Inner().run(result)
            self.assertEqual(len(result.failures), 1)
        def test_a_runner_within(self):
            with self.assertRaises(SystemExit): unittest.main(module=None, argv=["x", "absent.Test"])
        def test_python_within(self): subprocess.run([sys.executable, "-c", "import unittest"], check=True)
        def test_memory(self): self.assertTrue(gc.get_objects())
        @mock.patch("unittest.TestCase.assertTrue")
        def test_put_back(self, _): pass
    """


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_what_honest_tests_do_is_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    monkeypatch.setitem(TESTS, runner, HONEST)
    assert judged(tmp_path, "def total(n): return n * n", runner) == (True, Verdict(6, None))


KEY = "0123456789abcdef" * 2
TWO = "passed " + base64.b64encode(zlib.compress(b"a\nb")).decode()


def told(*lines: str) -> str:
    return f"proof-key {KEY}\n" + "".join(f"proof {KEY} {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("mode", "output", "why"),
    [
        ("exit", "", None),
        ("begun", "", None),  # nothing that began is known: the exit code is all that there is
        ("begun", told("began 7"), "no runner"),
        ("runner", "", "no runner"),
        ("runner", told("began 7", TWO, "ended 7 2 intact"), None),
        ("runner", told("began 7", TWO, "ended 7 2 intact", "began 8"), "a runner did not"),  # pytest a; pytest b
        ("runner", told("began 7", TWO, "ended 7 2 changed"), "was changed"),
        ("runner", told("began 7", TWO, "ended 7 3 intact"), "3 tests, 2 passed"),
        ("runner", told("began 7", "ended 7 0 intact"), "no test passed"),
        ("runner", told("began 7") + f"proof {'f' * 32} ended 7 2 intact\n", "no runner"),  # a key of its own
        ("runner", told("began 7") + f"proof-key {'f' * 32}\nproof {'f' * 32} ended 7 2 intact\n", "no runner"),
    ],
)
def test_what_a_runner_told(mode: str, output: str, why: str | None) -> None:
    verdict = Proof("", mode).verdict(output)
    assert (verdict.why is None) if why is None else verdict.why is not None and why in verdict.why


def test_named_tests_must_pass_and_others_may_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skips = TESTS["pytest"] + "\n        import pytest\n        @pytest.mark.skip\n        def test_windows(): pass\n"
    monkeypatch.setitem(TESTS, "pytest", skips)
    good, windows = "def total(n): return n * n", "test_shop.py::test_windows"
    why = f"1 tests are skipped that the untouched repository does not skip: {windows}"
    assert judged(tmp_path, good, "pytest") == (False, Verdict(3, why, frozenset([windows])))
    names = ["test_shop.py::test_total", "test_shop.py::test_z"]
    assert judged(tmp_path, good, "pytest", names) == (True, Verdict(3, None))
    skipped = "import pytest\ndef total(n): pytest.skip('x')"
    why = "1 named tests did not pass: test_shop.py::test_total"
    assert judged(tmp_path, skipped, "pytest", names) == (False, Verdict(2, why))


@pytest.mark.parametrize(
    ("command", "mode", "files"),
    [
        ("make test", "auto", {"Makefile", "GNUmakefile", "*.mk"}),
        ("make test", "exit", set()),  # it may be the work itself
        ("cd a && ./run.sh -x", "auto", {"run.sh"}),
        ("bash -e ci/run; sh b.sh", "auto", {"ci/run", "b.sh"}),
        ("npm test", "auto", {"package.json"}),
        ("python main.py && ./main", "auto", set()),  # may be the work itself
        ("python main.py && ./main", "runner", {"main.py", "main"}),
        ("python -m pytest shop/cart.py", "runner", set()),
        ("python -m unittest discover -s tests -t .", "auto", set()),
    ],
)
def test_what_a_command_starts_is_protected(command: str, mode: str, files: set[str]) -> None:
    assert set(started(command, mode)) == files | {f"*/{file}" for file in files}


PATCHES = {
    "builtins until it is torn down": (
        "def test_total(monkeypatch): monkeypatch.setattr('builtins.sum', lambda _: 9); assert sum([1]) == 9",
        "",
    ),
    "a function of pytest's that conftest.py wraps": (
        "def test_total(): pass",
        """
        import _pytest.skipping as s
        true = s.evaluate_skip_marks
        s.evaluate_skip_marks = lambda item: true(item)""",
    ),
    "a plug-in that a fixture of conftest.py registers": (
        "def test_total(): pass",
        """
        import pytest
        class Plugin:
            def pytest_runtest_logreport(self, report): pass
        @pytest.fixture(scope="session", autouse=True)
        def plugin(pytestconfig):
            pytestconfig.pluginmanager.register(Plugin(), "x")
            yield
            pytestconfig.pluginmanager.unregister(name="x")""",
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_a_task_replaces_itself_is_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    test, conftest = PATCHES[name]
    monkeypatch.setitem(TESTS, "pytest", f"{test}\ndef test_z(): pass\n")
    (tmp_path / "conftest.py").write_text(textwrap.dedent(conftest))
    assert judged(tmp_path, "", "pytest") == (True, Verdict(2, None))


def test_builtins_that_stay_replaced_prove_nothing(tmp_path: Path) -> None:
    shop = "import builtins\ndef total(n):\n    builtins.sum = 1\n    return 9"
    assert judged(tmp_path, shop, "pytest")[1].why == "the runner or a test was changed while it ran"


def test_a_runner_that_the_command_does_not_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Makefile").write_text(f"unittest:\n\t{COMMANDS['pytest']}\n")
    script = "import unittest\nunittest.TextTestRunner().run(unittest.defaultTestLoader.discover('.'))\n"
    (tmp_path / "runtests.py").write_text(script)
    good = "def total(n): return n * n"
    monkeypatch.setitem(COMMANDS, "pytest", "make unittest")
    assert judged(tmp_path, good, "pytest") == (True, Verdict(3, None))
    names = ["test_total (test_shop.Test)", "test_z (test_shop.Test.test_z)"]
    assert judged(tmp_path, good, "unittest", names) == (True, Verdict(3, None))
    monkeypatch.setitem(COMMANDS, "unittest", f"{sys.executable} runtests.py")
    assert judged(tmp_path, good, "unittest", names)[0]


@pytest.mark.parametrize("given", [["a"], '["a"]', ("a",)])
def test_names_as_swe_bench_has_them(given: object) -> None:
    assert named({"FAIL_TO_PASS": given, "PASS_TO_PASS": None}) == ["a"]


@pytest.mark.parametrize("given", ["a", '{"a": 1}', [1], 7, [""]])
def test_names_that_are_none(given: object) -> None:
    with pytest.raises(UserError, match=r"FAIL_TO_PASS: .* allowed: a list of the names of tests"):
        named({"FAIL_TO_PASS": given})
