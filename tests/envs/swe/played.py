"""A trajectory of a task created by a test: files written by the policy, then the tests."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import make

UNITTEST = "python -m unittest"
PYTEST = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -q -p no:cacheprovider"
PATIENT = {"command_timeout_s": 600, "test_timeout_s": 300, "session_options": {"memory_mib": 1024}}


def written(folder: Path, files: Mapping[str, str]) -> Path:
    """Writes the files into the folder and returns the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def played(task: Path, work: Mapping[str, str], command: str, names: Iterable[str] = (), **options: Any) -> Any:
    """Submits the work on a task and returns the environment's output."""
    settings = {"swe": {"tasks": str(task.parent), **PATIENT, **options}}
    info = {"task": task.name, "FAIL_TO_PASS": [*names]}
    row = {"reward_spec": {"ground_truth": command}, "extra_info": info}
    env: Any = make("swe", row, EnvironmentConfig(options=settings), 4)
    env.init([{"role": "user", "content": "Repair total."}])
    try:
        written(env.session.folder, work)
        return env.step("<submit/>")
    finally:
        env.close()
