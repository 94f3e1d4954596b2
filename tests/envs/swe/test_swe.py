"""Software tasks: a repository created by the test, edited through a session, judged by its tests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import load_prompts
from skyrl_mega.envs import BaseTextEnv, make
from skyrl_mega.envs.swe.env import PROTECTED
from skyrl_mega.envs.swe.session import CommandResult, File, Files, LocalSession
from tests.envs.swe.played import PYTEST, written

TEST = """
import unittest
from shop.cart import total

class Test(unittest.TestCase):
    def test_total(self):
        self.assertEqual(total([(2, 5), (1, 4)]), 14)
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    files = {
        "shop/__init__.py": "",
        "shop/cart.py": "def total(items):\n    return sum(count + price for count, price in items)\n",
        "tests/__init__.py": "",
        "tests/test_cart.py": TEST,
        "README.md": "A shop.",
        "Makefile": "test:\n\tpython -m unittest discover -s tests -t .\n",
    }
    written(folder / "cart" / "repo", files)
    return folder


COMMAND = "python -m unittest discover -s tests -t ."


def game(tasks: Path, turns: int = 8, command: str = COMMAND, **options: Any) -> BaseTextEnv:
    patient = {"command_timeout_s": 600, "test_timeout_s": 300, "checks": 1}
    config = EnvironmentConfig(options={"swe": {"tasks": str(tasks), **patient, **options}})
    row = {"reward_spec": {"ground_truth": command}, "extra_info": {"task": "cart"}}
    env = make("swe", row, config, turns)
    env.init([{"role": "user", "content": "Mend total."}])
    return env


def ran(env: BaseTextEnv, command: str) -> str:
    output = env.step(f"First: <bash>{command}</bash>")
    assert not output["done"] and output["reward"] == 0.0
    return output["observations"][0]["content"]


def test_a_repository_is_mended_over_several_turns(tasks: Path) -> None:
    env = game(tasks)
    assert "cart.py" in ran(env, "ls shop")
    assert "count + price" in ran(env, "cat shop/cart.py")
    assert "FAIL" in ran(env, COMMAND) and "count + price" in ran(env, "grep -n price shop/cart.py")
    assert "(exit code 0)" in ran(env, "sed -i 's/count + price/count * price/' shop/cart.py")
    assert "OK" in ran(env, COMMAND)
    session: Any = env.session
    folder = session.folder
    assert folder.is_dir()
    output = env.step("It works. <submit/>")
    assert (output["reward"], output["done"]) == (1.0, True) and output["metadata"]["tests"] == "ok"
    assert not folder.exists(), "the session is closed before judging"
    env.close()
    assert "count + price" in (tasks / "cart" / "repo" / "shop" / "cart.py").read_text()


def test_work_is_judged_where_its_time_is_over(tasks: Path) -> None:
    for command, reward in (("sed -i 's/count + price/count * price/' shop/cart.py", 1.0), ("ls", 0.0)):
        env = game(tasks)
        ran(env, command)
        output = env.out_of_time()
        assert output is not None and output["reward"] == reward
        env.close()


def test_work_not_done_earns_nothing(tasks: Path) -> None:
    env = game(tasks)
    assert env.step("<submit />")["reward"] == 0.0
    env.close()
    env = game(tasks, turns=2)
    assert "Give one command" in env.step("hm")["observations"][0]["content"]
    assert env.step("<bash>sed -i 's/+/*/' shop/cart.py</bash>")["reward"] == 1.0  # the last turn is judged too
    env.close()


EXIT = "import os; os._exit(0)"


@pytest.mark.parametrize(
    "cheat",
    [
        "echo > tests/test_cart.py",
        "rm -rf tests; mkdir tests; touch tests/__init__.py",
        "rm -rf tests; ln -s shop tests",
        "rm tests/test_cart.py; ln -s /etc/hosts tests/test_cart.py",
        "rm -rf tests; echo > tests",
        f"printf '{EXIT}' > tests/__init__.py",
        f"printf '{EXIT}' > sitecustomize.py",
        f"printf '{EXIT}' > unittest.py",
        f"mkdir unittest; printf '{EXIT}' > unittest/__init__.py; printf '{EXIT}' > unittest/__main__.py",
        f"printf '{EXIT}' > usercustomize.py",
        f"p=$(python -m site --user-site); mkdir -p $p; printf '{EXIT}' > $p/usercustomize.py",
    ],
)
def test_what_repairs_nothing_earns_nothing(tasks: Path, cheat: str) -> None:
    env = game(tasks)
    ran(env, cheat)
    output = env.step("<submit/>")
    assert output["reward"] == 0.0, output["metadata"]
    env.close()


@pytest.mark.parametrize(
    "name", ["pkg/tests/x.py", "pkg/test_x.py", "a/b/x_test.py", "__pycache__/test_x.cpython-311.pyc", "a/conftest.py"]
)
def test_tests_are_protected_in_every_folder(name: str) -> None:
    assert any(fnmatch(name, pattern) for pattern in PROTECTED)


REPAIR = "sed -i 's/count + price/count * price/' shop/cart.py"
END = "printf 'Name: x\\nVersion: 1\\n' > X.DIST-INFO/METADATA; echo 'import os; os._exit(0)' > x.py"


@pytest.mark.parametrize(
    "command, done, reward",
    [
        (COMMAND, REPAIR, 1.0),
        (PYTEST, REPAIR, 1.0),
        (PYTEST, f"printf '{EXIT}' > pytest.py", 0.0),
        (PYTEST, "printf '[pytest]\\naddopts=--co' > .pytest.ini", 0.0),
        (f"{PYTEST} --co", REPAIR, 0.0),  # no test was run
        (PYTEST, f"mkdir X.DIST-INFO; printf '[pytest11]\\nx = x' > X.DIST-INFO/entry_points.txt; {END}", 0.0),
        ("make test", REPAIR, 1.0),
        ("make test", "printf 'test:\\n\\ttrue\\n' > Makefile", 0.0),
        ("true", "true", 1.0),  # nothing fails and nothing ran in Python: only the exit code counts
    ],
)
def test_what_decides_what_is_run_is_the_tasks_own(tasks: Path, command: str, done: str, reward: float) -> None:
    env = game(tasks, command=command, session_options={"memory_mib": 1024})
    ran(env, done)
    output = env.step("<submit/>")
    assert output["reward"] == reward, output["metadata"]
    env.close()


def test_the_tests_home_is_not_the_policys(tasks: Path) -> None:
    env = game(tasks, command='test "$PWD" != "$HOME" && test -z "$(ls "$HOME")"')
    ran(env, "touch here ~/there")
    assert env.step("<submit/>")["reward"] == 1.0
    env.close()


def test_commands_are_confined_and_bounded(tasks: Path) -> None:
    env = game(tasks, command_timeout_s=4.0)
    start = time.monotonic()
    assert "(timeout)" in ran(env, "sleep 60")
    assert "(timeout)" in ran(env, "sleep 60 & sleep 60")
    assert time.monotonic() - start < 55
    assert "(exit code 0)" not in ran(env, "cat /etc/passwd")
    assert "(exit code 0)" not in ran(env, f"ls {tasks}")
    long = ran(env, "seq 1 20000")
    assert len(long) < 4200 and "\n1\n2\n" in long and "20000" in long and "left out" in long
    env.close()


def test_a_task_that_a_user_changed_is_not_written_over(tmp_path: Path) -> None:
    for _ in range(2):
        prepare(f"swe --output {tmp_path}")
    file = min(tmp_path.rglob("tools.py"))
    file.write_text("mine")
    with pytest.raises(UserError, match=r"tools\.py was not written by this command, or was changed since"):
        prepare(f"swe --output {tmp_path}")
    assert file.read_text() == "mine"


def test_hidden_tests_appear_only_at_the_end(tmp_path: Path) -> None:
    prepare(f"swe --output {tmp_path}")
    config = EnvironmentConfig(options={"swe": {"tasks": str(tmp_path / "tasks")}})
    train, test = (load_prompts([tmp_path / f"{s}.parquet"], config) for s in ("train", "test"))
    assert {p.extras["extra_info"]["task"] for p in train}.isdisjoint({p.extras["extra_info"]["task"] for p in test})
    prompt = next(p for p in test if p.extras["extra_info"]["task"] == "squares")
    for command, reward in (("true", 0.0), ("sed -i 's/n [*] 2/n * n/' tools.py", 1.0)):
        env = make("swe", prompt.extras, config, 5)
        env.init(prompt.messages)
        assert "test_squares" not in ran(env, "ls tests")
        ran(env, command)
        assert env.step("<submit/>")["reward"] == reward
        env.close()


def test_a_source_of_tasks(tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \*/task\.json"):
        prepare(f"swe --output {tmp_path} --source {tasks}")
    (tasks / "cart" / "task.json").write_text(f'{{"instruction": "Mend it.", "test": "{COMMAND}"}}')
    prepare(f"swe --output {tmp_path} --source {tasks}")
    assert not (tmp_path / "test.parquet").exists()
    with pytest.raises(UserError, match=r"environment\.options\.swe\.tasks = None"):
        load_prompts([tmp_path / "train.parquet"], EnvironmentConfig())


class Remote:
    """A session in a user's style: implements the contract and records the calls."""

    log: list[str] = []  # noqa: RUF012

    def __init__(self, task: Path, options: Mapping[str, Any]) -> None:
        self.log.append(f"{task.name} {options['image']}")

    def open(self, timeout_s: float) -> None:
        self.log.append("open")

    def run(self, command: str, timeout_s: float) -> CommandResult:
        self.log.append(f"{command.splitlines()[-1]} {timeout_s:.3g}")
        return CommandResult("ok", 0, "done")

    def changes(self, timeout_s: float) -> Files:
        return {name: File(b"1") for name in ("a.py", "tests/x.py", "tests", "/etc/x", "b/../../x", ".git/config")}

    def write(self, files: Files, timeout_s: float) -> None:
        self.log.append(f"write {' '.join(files)}")

    def close(self, timeout_s: float) -> None:
        self.log.append("close")


def test_a_session_of_ones_own(tasks: Path) -> None:
    options = {"session": f"{__name__}:Remote", "session_options": {"image": "small"}}
    env = game(tasks, **options, command_timeout_s=20, test_timeout_s=9, proof="exit")
    ran(env, "make")
    assert env.step("<submit/>")["reward"] == 1.0
    env.close()
    first_call = "write tests/__init__.py tests/test_cart.py"
    run = ["cart small", "open", "write a.py", first_call, f"{COMMAND} 9", "close"]
    assert Remote.log == ["cart small", "open", "make 20", "close", *run]
    for wrong in ("nowhere", "os:Absent", "os:path", "no_such_module:X"):
        with pytest.raises(UserError, match=r"environment\.options\.swe\.session = "):
            game(tasks, session=wrong)


def test_a_session_that_was_never_opened_can_be_closed(tasks: Path) -> None:
    session = LocalSession(tasks / "cart", {})
    session.close(1)
    with pytest.raises(RuntimeError, match="not open"):
        session.run("true", 1)
    missing = LocalSession(tasks / "absent", {})
    with pytest.raises(UserError, match="does not exist"):
        missing.open(1)
    folder = missing.folder
    missing.close(1)
    assert not folder.exists()
