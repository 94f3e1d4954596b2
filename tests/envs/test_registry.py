"""Names and import paths of environments, and the messages about wrong names and paths."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs.registry import BUILT_IN, check, make, needs_close, resolve, with_absolute_paths

OWN = """
from skyrl_mega.envs import BaseTextEnv, BaseTextEnvStepOutput

class Echo(BaseTextEnv):
    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=len(action), done=True, metadata={})

class Bare:
    pass

class Silent(BaseTextEnv):
    pass

class Unmade(BaseTextEnv):
    def __init__(self):
        super().__init__()

    def step(self, action):
        pass

class Deaf(BaseTextEnv):
    def step(self):
        pass

class Deafened(Echo):
    def init(self):
        pass

class Closing(Echo):
    def __init__(self, env_config, extras):
        super().__init__(env_config, extras)
        self.close = print

class Plain:
    def __init__(self, **kwargs):
        pass

    def init(self, *args):
        pass

    @staticmethod
    def step(action):
        pass

    close = lambda self: None

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_file.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "own_package" / "grader.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    (tmp_path / "pasted.py").write_text("import re\n\nclass Mine(BaseTextEnv):\n    pass\n", encoding="utf-8")
    (tmp_path / "unfinished.py").write_text("x = 1\ndef step(self:\n", encoding="utf-8")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("path", ["own_file.py:Echo", "own_package.grader:Echo"])
def test_a_users_class_is_found_from_the_working_directory(folder: Path, path: str) -> None:
    config = EnvironmentConfig(classes={"echo": path})
    assert make("echo", {}, config).step("four")["reward"] == 4
    assert resolve("echo", config) is resolve("echo", config)


@pytest.mark.parametrize("path", ["own_file.py:Echo", "own_package.grader:Echo"])
def test_and_in_another_process_too(folder: Path, path: str) -> None:
    """Loads an environment like a Ray worker: configuration as data, in another interpreter."""
    code = (
        "import json, sys\n"
        "sys.path = [p for p in sys.path if p]\n"
        "from skyrl_mega.config.schema import EnvironmentConfig\n"
        "from skyrl_mega.envs import make\n"
        "print(make('echo', {}, EnvironmentConfig(**json.loads(sys.argv[1]))).step('four')['reward'])\n"
    )
    config = json.dumps(asdict(EnvironmentConfig(classes={"echo": path})))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code, config], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.stdout.strip() == "4", result.stderr


def test_absolute_paths_hold_in_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_absolute_paths(
        EnvironmentConfig(classes={"echo": "own_file.py:Echo", "m": "own_package.grader:Echo"})
    )
    assert config.classes["m"] == "own_package.grader:Echo"
    monkeypatch.chdir("/")
    assert make("echo", {}, config).step("four")["reward"] == 4


def test_a_users_name_goes_before_a_built_in_one(folder: Path) -> None:
    assert resolve("gsm8k", EnvironmentConfig(classes={"gsm8k": "own_file.py:Echo"})).__name__ == "Echo"


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_names_lead_somewhere(name: str) -> None:
    assert resolve(name, EnvironmentConfig()).__module__.startswith(f"skyrl_mega.envs.{name}")


@pytest.mark.parametrize(
    "path, said",
    [
        ("own_file.py", "allowed: package.module:Class or path/to/file.py:Class"),
        ("absent.py:Echo", "does not exist"),
        ("own_file.py:Eho", "did you mean Echo"),
        ("own_file.py:Judge", "own_file.py has no class Judge; it has Echo, Bare, Silent"),
        (
            "own_file.py:Unmade",
            "own_file.py:Unmade: Unmade cannot be created by Unmade(env_config=…, extras=…): got an",
        ),
        ("own_file.py:Unmade", "'env_config'; write `def __init__(self, env_config=None, extras=None)`"),
        ("own_file.py:Deaf", "Deaf.step cannot be called by step(action): too many positional arguments; write `def s"),
        ("own_file.py:Deafened", "Deafened.init cannot be called by init(prompt): too many positional arguments; writ"),
        ("empty.py:Judge", "empty.py has no class Judge; it has no class"),
        ("own_file.py:Silent", "Silent has no step; write `def step(self, action)`"),
        ("own_file.py:Bare", "init, step and close"),
        ("own_file.py:number", "init, step and close"),
        (
            "broken.py:Echo",
            "broken.py, line 1 cannot be imported: ModuleNotFoundError: No module named 'nothing_of_that",
        ),
        ("pasted.py:Mine", "line 3 cannot be imported: NameError: name 'BaseTextEnv' is not defined; add `from skyrl_"),
        ("unfinished.py:Mine", "unfinished.py, line 2 cannot be imported: SyntaxError: '(' was never closed"),
        ("script.py:Mine", "script.py, line 2 cannot be imported: SystemExit: 3"),
        ("no_such_package.grader:Echo", "no_such_package"),
    ],
)
def test_a_wrong_path_is_one_line_that_names_the_key(folder: Path, path: str, said: str) -> None:
    with pytest.raises(UserError, match=r"environment\.classes\.mine") as caught:
        check(EnvironmentConfig(classes={"mine": path}))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_close_set_on_the_instance_is_called(folder: Path) -> None:
    config = EnvironmentConfig(classes={"closing": "own_file.py:Closing", "echo": "own_file.py:Echo"})
    assert needs_close(make("closing", {}, config)) and not needs_close(make("echo", {}, config))


def test_a_class_that_takes_every_argument_is_allowed(folder: Path) -> None:
    check(EnvironmentConfig(classes={"plain": "own_file.py:Plain"}))


def test_a_file_that_takes_long_to_import_is_whole_for_every_thread(tmp_path: Path) -> None:
    """Imports a slow file from many threads. The file must be in `sys.modules` meanwhile: its dataclasses need the
    entry, and the file loads itself.
    """
    file = tmp_path / "heavy.py"
    file.write_text(
        "from __future__ import annotations\nimport dataclasses, pathlib, time\n"
        "from skyrl_mega.common.imports import load\nfrom skyrl_mega.envs import BaseTextEnv\n"
        "@dataclasses.dataclass\nclass Note:\n    text: str\n"
        "assert load(f'{__file__}:Note', 'itself') is Note\n"
        "pathlib.Path(__file__).with_name('begun').open('a').write('once ')\ntime.sleep(0.5)\n"
        "class Heavy(BaseTextEnv):\n    def step(self, action):\n        return Note(action)\n"
    )
    config = EnvironmentConfig(classes={"heavy": f"{file}:Heavy"})
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(make, "heavy", {}, config)
        while not (tmp_path / "begun").exists():
            assert first.running(), first.result()
        futures = [pool.submit(make, "heavy", {}, config) for _ in range(3)]
        notes = [one.result().step("said") for one in (first, *futures)]
    assert pickle.loads(pickle.dumps(notes)) == notes
    assert (tmp_path / "begun").read_text() == "once "


def test_an_unknown_name_is_told_the_nearest_and_the_allowed() -> None:
    line = r"'gsm9k' is unknown: did you mean 'gsm8k'\? allowed: addition, aime, calculator, gsm8k, "
    with pytest.raises(UserError, match=line):
        make("gsm9k", {}, EnvironmentConfig())
    with pytest.raises(UserError, match="unknown"):
        check(EnvironmentConfig(default="nothing"))


def test_options_of_an_unknown_environment_are_refused() -> None:
    with pytest.raises(UserError, match=r"environment\.options\.gsm8"):
        check(EnvironmentConfig(options={"gsm8": {}}))


def test_data_cannot_name_code() -> None:
    with pytest.raises(UserError, match="unknown"):
        make("os:system", {}, EnvironmentConfig())
