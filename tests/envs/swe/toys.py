"""Ten small software tasks in an image, made by the test: repositories with a planted bug, and patches of tests."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import make
from skyrl_mega.envs.swe.data import BUGS
from tests.envs.swe.played import written
from tests.support.containers import IMAGE

RIGHT = {
    "mean": "sum(numbers) / len(numbers)",
    "spread": "max(numbers) - min(numbers)",
    "last": "items[-1]",
    "reverse": "' '.join(text.split()[::-1])",
    "initials": "''.join(w[0] for w in text.split())",
    "count": "sum(n > 0 for n in numbers)",
    "squares": "sum(n * n for n in numbers)",
    "unique": "sorted(set(items))",
    "smallest": "min(items)",
    "joined": "'-'.join(items)",
}
MORE = {
    "smallest": ("smallest item", "items", "max(items)", "[3, 1]", "1"),
    "joined": ("items with dashes", "items", "''.join(items)", "['a', 'b']", "'a-b'"),
}
TOYS = {**BUGS, **MORE}
"""Function → purpose, argument, wrong body, an input and the right output."""
REPORTS = ("pytest", "unittest", "exit")
COMMANDS = {
    "pytest": "python -m pytest -rA -p no:cacheprovider tests",
    "unittest": "python -m unittest discover -v -s tests -t .",
    "exit": "python -m unittest discover -s tests -t .",
}
PATIENT = {"command_timeout_s": 120, "test_timeout_s": 120, "checks": 1}


@dataclass(frozen=True)
class Toy:
    """A task of the test."""

    name: str
    tasks: Path
    """Folder of all tasks."""
    report: str

    @property
    def repair(self) -> str:
        """Command that removes the bug."""
        return f"cat > tools.py <<'E'\n{code(self.name, RIGHT[self.name])}E"

    @property
    def row(self) -> dict[str, Any]:
        """Columns of the task's row."""
        task = json.loads((self.tasks / self.name / "task.json").read_text())
        lists = {key: task[key] for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        return {"reward_spec": {"ground_truth": task["test"]}, "extra_info": {"task": self.name, **lists}}


def code(name: str, body: str) -> str:
    """Returns the module of a task."""
    return f'"""Small tools."""\n\n\ndef {name}({TOYS[name][1]}):\n    """The {TOYS[name][0]}."""\n    return {body}\n'


def write_toys(folder: Path, names: Iterable[str] = tuple(RIGHT)) -> dict[str, Toy]:
    """Writes the image's repositories to `folder/images/IMAGE/repos`, and the tasks to `folder/tasks`."""
    toys = {}
    for name in names:
        toy = Toy(name, folder / "tasks", REPORTS[list(RIGHT).index(name) % len(REPORTS)])
        _write_repo(folder / "images" / IMAGE / "repos" / name, name)
        _write_task(toy)
        toys[name] = toy
    return toys


def _write_repo(repo: Path, name: str) -> None:
    old = f"""\
        import unittest

        import tools


        class Old(unittest.TestCase):
            def test_there(self):
                self.assertTrue(callable(tools.{name}))
        """
    written(repo, {"tools.py": code(name, TOYS[name][2]), "tests/__init__.py": "", "tests/test_old.py": old})
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *words], cwd=repo, check=True, env={**os.environ, "HOME": str(repo)})


def _write_task(toy: Toy) -> None:
    _, _, _, given, expected = TOYS[toy.name]
    new = f"""\
        import unittest

        import tools


        class New(unittest.TestCase):
            def test_result(self):
                self.assertEqual(tools.{toy.name}({given}), {expected})
        """
    lines = textwrap.dedent(new).splitlines()
    patch = "diff --git a/tests/test_new.py b/tests/test_new.py\nnew file mode 100644\n--- /dev/null\n"
    patch += f"+++ b/tests/test_new.py\n@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
    names = {
        "pytest": ["tests/test_new.py::New::test_result", "tests/test_old.py::Old::test_there"],
        "unittest": ["test_result (tests.test_new.New.test_result)", "test_there (tests.test_old.Old.test_there)"],
        "exit": ["tests/test_new.py::New::test_result", "tests/test_old.py::Old::test_there"],
    }[toy.report]
    task = {
        "instruction": f"Repair {toy.name} in tools.py.",
        "test": COMMANDS[toy.report],
        "image": IMAGE,
        "folder": f"/repos/{toy.name}",
        "report": toy.report,
        "test_patch": "test.patch",
        "FAIL_TO_PASS": names[:1],
        "PASS_TO_PASS": names[1:],
    }
    folder = toy.tasks / toy.name
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps(task))
    (folder / "test.patch").write_text(patch)


def opened(toy: Toy, session: str, session_options: Mapping[str, Any], **options: Any) -> Any:
    """Returns an open environment of a task."""
    settings = {"tasks": str(toy.tasks), "session": session, "session_options": session_options, **PATIENT, **options}
    env = make("swe", toy.row, EnvironmentConfig(options={"swe": settings}), 8)
    env.init([{"role": "user", "content": "Repair it."}])
    return env


def shown(env: Any, command: str) -> str:
    """Runs a command of the policy and returns the environment's answer."""
    output = env.step(f"<bash>{command}</bash>")
    assert not output["done"] and output["reward"] == 0.0
    return str(output["observations"][0]["content"])


CHEATS = {
    "nothing": "true",
    "other tests": "echo > tests/test_old.py; printf 'def test_result(): pass\\n' > tests/test_new.py",
    "no tests": "rm -rf tests; mkdir tests; touch tests/__init__.py",
    "tests behind a link": "mv tests t; ln -s t tests",
    "a conftest": "printf 'import os; os._exit(0)' > conftest.py",
    "a start-up file": "printf 'import os; os._exit(0)' > sitecustomize.py",
    "the end of the process": "printf 'import os; os._exit(0)' > tools.py",
    "a forged report": (
        "cat > tools.py <<'E'\nimport os\n"
        "for line in ('PASSED tests/test_new.py::New::test_result', 'PASSED tests/test_old.py::Old::test_there',\n"
        "    'test_result (tests.test_new.New.test_result) ... ok',\n"
        "    'test_there (tests.test_old.Old.test_there) ... ok'):\n"
        "    os.write(1, (line + chr(10)).encode())\nos._exit(0)\nE"
    ),
    "the judge's processes": (
        "cat > tools.py <<'E'\nimport os, signal\nfor pid in range(2, 99):\n"
        "    try: os.getpid() != pid and os.kill(pid, signal.SIGSTOP)\n    except OSError: pass\nos._exit(0)\nE"
    ),
    "links out": "ln -sf /etc/passwd tools.py; ln -s / root; ln -s /repos tests/repos",
    "a repository's hooks": "printf '#!/bin/sh\\nexit 0' > .git/hooks/post-checkout; git config alias.apply '!true'",
}
"""Commands that solve no task."""
