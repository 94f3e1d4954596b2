"""Tests that are skipped or expected to fail in the untouched repository too say nothing about the work."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import make
from skyrl_mega.envs.swe import untouched
from skyrl_mega.envs.swe.proof import Proof
from skyrl_mega.envs.swe.session import Ran

TESTS = {
    "unittest": """
import unittest
from shop import total

class Total(unittest.TestCase):
    def test_a(self): pass
    def test_total(self): self.assertEqual(total(3), 9)
    @unittest.skip("later")
    def test_later(self): pass
    @unittest.expectedFailure
    def test_wrong(self): self.assertEqual(total(3), 10)

class Windows(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise unittest.SkipTest("elsewhere")
    def test_path(self): pass
""",
    "pytest": """
import pytest
from shop import total

def test_a(): pass
def test_total(): assert total(3) == 9
@pytest.mark.skipif(True, reason="later")
def test_later(): pass
@pytest.mark.xfail
def test_wrong(): assert total(3) == 10
def test_inside(): pytest.skip("elsewhere")
""",
}
COMMANDS = {"unittest": "python -m unittest -f", "pytest": "make test"}
RIGHT = "echo 'def total(n): return n * n' > shop.py"
SKIPS = "printf 'import unittest\\ndef total(n): raise unittest.SkipTest' > shop.py"


@pytest.mark.parametrize(
    ("runner", "done", "reward", "why"),
    [
        ("unittest", RIGHT, 1.0, None),
        ("pytest", RIGHT, 1.0, None),
        ("unittest", SKIPS, 0.0, "test_shop.Total.test_total"),
        ("unittest", "true", 0.0, None),
    ],
)
def test_what_the_untouched_repository_skips_too(
    tmp_path: Path, runner: str, done: str, reward: float, why: str | None
) -> None:
    repo = tmp_path / "skips" / "repo"
    repo.mkdir(parents=True)
    (repo / "shop.py").write_text("def total(n): return n + n\n")
    (repo / "test_shop.py").write_text(TESTS[runner])
    (repo / "Makefile").write_text("test:\n\tpython -m pytest -q -x -p no:cacheprovider\n")
    options = {"swe": {"tasks": str(tmp_path), "session_options": {"memory_mib": 1024}}}
    row = {"reward_spec": {"ground_truth": COMMANDS[runner]}, "extra_info": {"task": "skips"}}
    env = make("swe", row, EnvironmentConfig(options=options), 4)
    env.init([{"role": "user", "content": "Repair total."}])
    env.step(f"<bash>{done}</bash>")
    output = env.step("<submit/>")
    env.close()
    assert output["reward"] == reward, output["metadata"]
    if why is not None:
        said = output["metadata"]["tests_unproved"]
        assert said == f"1 tests are skipped that the untouched repository does not skip: {why}"


class Fake:
    """A session that counts the runs in it."""

    ran: list[str] = []  # noqa: RUF012

    def __init__(self, status: str) -> None:
        self.status = status

    def open(self, timeout_s: float) -> None: ...

    def restore(self, patterns: Iterable[str], timeout_s: float) -> None: ...

    def run(self, command: str, timeout_s: float) -> Ran:
        self.ran.append(self.status)
        return Ran(self.status, None, "")

    def close(self, timeout_s: float) -> None: ...


def test_a_task_is_run_once_and_again_where_that_took_too_long() -> None:
    def ask(status: str) -> object:
        return untouched.skipped("a task", lambda: Fake(status), [], Proof("", "runner"), (1.0, 1.0))

    assert [ask("timeout"), ask("timeout")] == [None, None]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, ["failed"] * 4)) == [frozenset()] * 4
    assert Fake.ran == ["timeout", "timeout", "failed"]
