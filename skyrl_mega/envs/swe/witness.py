"""Tells that a test runner came to its end, and how many tests passed. PYTEST_DONT_REWRITE

The environment puts this file before everything else on the path of a test's Python, as `sitecustomize`: it is loaded
before any of the repository's code, with the standard library's `unittest` and the installed `pytest`, so that modules
of these names in the repository come too late. What it writes has a number used once that the repository's code is
not told. Standard library only, Python 3.6 or newer.
"""

import os
import sys

FIELDS = ("SKYRL_MEGA_PROOF", "SKYRL_MEGA_RUNNERS")


def _begin(nonce, runners):
    out = os.dup(9)  # stdout of the whole command, whatever becomes of this process's own
    told: list = []

    def tell(passed):
        if passed > 0 and not told:
            told.append(passed)
            os.write(out, f"\nproof {nonce} {passed}\n".encode())

    if "unittest" in runners:
        _unittest(tell)
    if "pytest" in runners:
        try:
            import pytest
        except ImportError:
            return None
        return _pytest(pytest, tell)
    return None


def _unittest(tell):
    import unittest

    classes = [c for c in vars(unittest).values() if isinstance(c, type)]
    outermost: list = []
    original = unittest.TestProgram.__init__

    def run(self, *args, **kwargs):
        first = not outermost
        outermost.append(self)  # another that the repository's code runs meanwhile proves nothing
        try:
            original(self, *args, **kwargs)
        finally:
            result = getattr(self, "result", None)
            if first and result is not None and result.wasSuccessful() and _state(classes) == before:
                tell(result.testsRun - len(result.skipped) - len(result.expectedFailures))

    unittest.TestProgram.__init__ = run  # type: ignore[method-assign]  # that is what it is for
    before = _state(classes)


def _state(classes):
    """What the classes are made of: another method, or another body of one, is another state."""
    return [
        (name, id(value), id(getattr(value, "__code__", None)))
        for cls in classes
        for name, value in vars(cls).items()
        if name not in ("__abstractmethods__", "_abc_impl") and callable(value)
    ]


def _pytest(pytest, tell):
    class Plugin:
        config = None
        passed = 0

        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self, early_config):
            if Plugin.config is None:
                Plugin.config = early_config

        def pytest_runtest_logreport(self, report):
            if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
                Plugin.passed += 1

        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish(self, session, exitstatus):
            if session.config is Plugin.config and exitstatus == 0 and session.testsfailed == 0:
                tell(Plugin.passed)

    return Plugin()


_given = [os.environ.pop(_name, "") for _name in FIELDS]
if _given[0]:
    _plugin = _begin(*_given)
    if _plugin is not None:
        pytest_load_initial_conftests = _plugin.pytest_load_initial_conftests
        pytest_runtest_logreport = _plugin.pytest_runtest_logreport
        pytest_sessionfinish = _plugin.pytest_sessionfinish
del _given, sys
