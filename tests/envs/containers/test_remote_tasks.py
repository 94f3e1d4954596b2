"""A software task, worked on and judged in containers of each remote runtime."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import make
from tests.envs.containers.boxes import client
from tests.envs.processes import needs_namespaces
from tests.envs.swe.played import written

FILES = {
    "tools.py": "def last(items):\n    return items[0]\n",
    "tests/__init__.py": "",
    "tests/test_tools.py": """\
        import unittest

        import tools


        class Last(unittest.TestCase):
            def test_last(self):
                self.assertEqual(tools.last([1, 2, 3]), 3)
        """,
}
TEST = "python3 -m unittest discover -s tests -t ."
STARTER = f"{sys.executable} {Path(__file__).parent / 'rex_server.py'} {{image}}"

pytestmark = [
    needs_namespaces,
    pytest.mark.skipif(
        shutil.which("python3", path="/usr/bin") is None, reason="the task's tests need the system's python3"
    ),
]


def options_of(runtime: str, folder: Path) -> dict[str, Any]:
    """Returns the session's options, with a fake client or a small server."""
    if runtime == "swerex":
        return {"command": STARTER}
    program = client(folder, f"fake_{runtime}")
    if runtime == "kubectl":
        return {"program": program, "global_arguments": [f"--kubeconfig={folder}"]}
    return {"program": program, "folder": str(folder / "images")}


@pytest.mark.parametrize(
    "runtime",
    [
        "swerex",
        pytest.param("kubectl", marks=pytest.mark.nightly),
        pytest.param("apptainer", marks=pytest.mark.nightly),
    ],
)
def test_a_repair_is_paid_and_nothing_else(runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPTAINER_CONFIGDIR", str(tmp_path))
    task = tmp_path / "tasks" / "last"
    written(task / "repo", FILES)
    spec = {"instruction": "Repair last.", "image": "plain", "folder": "/tmp/testbed", "test": TEST}
    (task / "task.json").write_text(json.dumps(spec))
    settings = {"tasks": str(task.parent), "session": runtime, "session_options": options_of(runtime, tmp_path)}
    config = EnvironmentConfig(
        options={"swe": {**settings, "command_timeout_s": 300, "test_timeout_s": 300, "checks": 1}}
    )
    row = {"reward_spec": {"ground_truth": TEST}, "extra_info": {"task": "last"}}
    for command, reward in (("sed -i 's/items.0./items[-1]/' tools.py", 1.0), ("echo pass >tests/test_tools.py", 0.0)):
        env: Any = make("swe", row, config, 4)
        try:
            env.init([{"role": "user", "content": "Repair last."}])
            shown = env.step(f"<bash>{command}; cat tools.py; (sleep 98765432 &)</bash>")["observations"][0]["content"]
            assert "def last" in shown
            output = env.step("<submit/>")
        finally:
            env.close()
        assert output["reward"] == reward, output["metadata"]
