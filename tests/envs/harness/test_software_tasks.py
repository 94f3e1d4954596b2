"""Software tasks for any program: the task's container, the policy as the only help, and the task's tests as judge."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.envs.containers import pool, removal
from skyrl_mega.envs.containers.registry import RUNTIMES
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.harness import container_program
from skyrl_mega.envs.harness.env import HarnessEnv, ProgramFailed
from tests.envs.harness.policy import answering
from tests.envs.harness.test_harness import ASK, PROMPT, play
from tests.envs.processes import wait_until
from tests.envs.swe.folder_runtime import PATH, FolderContainer
from tests.envs.swe.toys import PATIENT, RIGHT, Toy, code, write_toys

REPAIR = ASK + "open('tools.py', 'w').write(ask('How?'))\n"
"""A program that writes the policy's answer to the file of the bug."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return write_toys(tmp_path_factory.mktemp("toys"), ["spread"])["spread"]


@pytest.fixture
def make(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HarnessEnv]]:
    """Returns a function that makes the environment of a Python program, with folders in the place of containers."""
    monkeypatch.setitem(RUNTIMES, "podman", PATH)
    monkeypatch.setattr(FolderContainer, "process", lambda self: os.getpid(), raising=False)
    monkeypatch.setattr(container_program, "FOLDER", "/testbed_program")
    monkeypatch.chdir(tmp_path)

    def made(text: str, **options: Any) -> HarnessEnv:
        Path("agent.py").write_text(text)
        options_of_session = {"root": str(toy.tasks.parent / "images"), "prelude": "export PRELUDE='was run'"}
        judge = {
            "tasks": str(toy.tasks),
            "session": "podman",
            "session_options": options_of_session,
        }
        given = {"command": f"{sys.executable} -S agent.py", "reward": "swe", "reward_options": {**judge, **PATIENT}}
        env = HarnessEnv({**given, "timeout_s": 60, **options}, toy.row)
        env.prepare()
        return env

    yield made
    assert FolderContainer.open_containers == [], "every container is removed"


def test_the_work_of_any_program_is_judged_by_the_tests(make: Callable[..., HarnessEnv]) -> None:
    for answer, reward in ((RIGHT["spread"], 1.0), ("0", 0.0)):
        with answering(code("spread", answer)) as policy:
            output = play(make(REPAIR), policy)
        assert output["reward"] == reward, output["metadata"]
        assert output["metadata"]["program"]["status"] == "ok"


def test_the_program_sees_the_repository_and_no_test_that_judges(make: Callable[..., HarnessEnv]) -> None:
    look = (
        "import json, os\nfolder = os.path.join(os.environ['HOME'], 'testbed_program')\n"
        "task = json.load(open(folder + '/task.json'))\n"
        "print(json.dumps([sorted(os.listdir('.')), os.listdir('tests'), task, sorted(os.listdir(folder)), "
        "os.environ['PRELUDE']]))"
    )
    with answering("4") as policy:
        output = play(make(look), policy)
    here, tests, task, folder, prelude = json.loads(output["metadata"]["program"]["stdout"])
    assert prelude == "was run"
    assert "tools.py" in here and "agent.py" not in here and "test_new.py" not in tests
    assert task == {"prompt": PROMPT, "extra_info": {"task": "spread"}} and folder == ["agent.py", "task.json"]


def test_a_program_that_cheats_or_fails_or_is_late(make: Callable[..., HarnessEnv]) -> None:
    with answering(code("spread", RIGHT["spread"])) as policy:
        cheat = make("open('sitecustomize.py', 'w').write('import os; os._exit(0)')")
        assert play(cheat, policy)["reward"] == 0.0
        late = play(make(REPAIR + "import time\ntime.sleep(60)", timeout_s=5), policy)
        assert late["reward"] == 1.0 and late["metadata"]["metrics"]["program_cut"] == 1.0
        with pytest.raises(ProgramFailed, match="exit code 1: ZeroDivisionError"):
            play(make(REPAIR + "1 / 0"), policy)
        assert play(make(REPAIR + "1 / 0", failed_exit="judge"), policy)["reward"] == 1.0
        lost = make(REPAIR)
        FolderContainer.open_containers[0].remove(1)
        with pytest.raises(InfrastructureFault):
            play(lost, policy)


def test_a_container_whose_removal_fails_is_no_fault_and_is_removed_later(
    make: Callable[..., HarnessEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "REMOVAL_S", 0.0)
    monkeypatch.setattr(removal, "PAUSE_S", 0.1)
    tried: set[FolderContainer] = set()
    remove = FolderContainer.remove

    def failing(container: FolderContainer, timeout_s: float) -> None:
        if container not in tried:
            tried.add(container)
            raise InfrastructureFault("the policy made a million files")
        remove(container, timeout_s)

    monkeypatch.setattr(FolderContainer, "remove", failing)
    with answering(code("spread", RIGHT["spread"])) as policy:
        assert play(make(REPAIR), policy)["reward"] == 1.0
    assert wait_until(lambda: not FolderContainer.open_containers) and tried
