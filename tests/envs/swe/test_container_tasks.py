"""Tasks in images: verdicts, hidden files and lost containers, with folders in the place of containers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import registry
from skyrl_mega.envs.containers.registry import RUNTIMES
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.swe.env import SweEnv
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories.trajectory import Status
from tests.envs.swe import toys
from tests.envs.swe.folder_runtime import PATH, FolderContainer
from tests.envs.swe.toys import CHEATS, Toy, opened, shown, write_toys
from tests.support.containers import IMAGE
from tests.support.scripted import Scripted, play


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    write_toys(folder)
    return folder


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(RUNTIMES, "folders", PATH)
    yield
    assert FolderContainer.open_containers == [], "every container is removed"


def toy_of(place: Path, name: str) -> Toy:
    return Toy(name, place / "tasks", toys.REPORTS[list(toys.RIGHT).index(name) % 3])


def env_of(place: Path, name: str, **options: Any) -> Any:
    return opened(toy_of(place, name), "folders", {"root": str(place / "images")}, **options)


@pytest.mark.parametrize("name", [pytest.param("mean", marks=pytest.mark.nightly), "spread", "last"])  # each report
def test_a_repair_is_paid_and_nothing_else(place: Path, name: str) -> None:
    for command, reward in ((toy_of(place, name).repair, 1.0), ("true", 0.0)):
        env = env_of(place, name)
        assert "tools.py" in shown(env, "ls") and "test_new.py" not in shown(env, "ls tests")
        shown(env, command)
        output = env.step("<submit/>")
        assert output["reward"] == reward, output["metadata"]
        assert output["metadata"]["canaries"] == 1 or not reward
        assert FolderContainer.open_containers == []
        env.close()


OFTEN = ("tests behind a link", "a forged report")
"""Cheats of every change; the others are nightly. The signals of another would reach the test itself."""


@pytest.mark.parametrize(
    "cheat",
    [
        pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.nightly])
        for name in CHEATS
        if name != "the judge's processes"
    ],
)
def test_a_cheat_earns_nothing(place: Path, cheat: str) -> None:
    env = env_of(place, "spread")
    shown(env, CHEATS[cheat])
    output = env.step("<submit/>")
    assert output["reward"] == 0.0, output["metadata"]
    env.close()


@pytest.mark.parametrize(
    "program",
    [
        "find",
        "tar",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("xargs", "git", "python", "bash", "sh")),
    ],
)
def test_programs_of_the_policys_container_decide_nothing(place: Path, program: str) -> None:
    env = env_of(place, "spread")
    shown(env, f"mkdir bin; printf '#!/bin/sh\\nexit 0\\n' > bin/{program}; chmod +x bin/{program}")
    output = env.step("<submit/>")
    assert output["reward"] == 0.0, output["metadata"]
    env.close()


def test_a_container_that_is_lost_is_no_verdict(place: Path) -> None:
    env = env_of(place, "spread")
    shutil.rmtree(env.session.container.root)
    with pytest.raises(InfrastructureFault):
        env.step("<bash>ls</bash>")
    with pytest.raises(InfrastructureFault):
        env.step("<submit/>")
    env.close()


@pytest.mark.parametrize("losses", [1, 99])
def test_a_container_lost_during_the_tests_is_replaced_twice(
    place: Path, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    monkeypatch.setattr("skyrl_mega.envs.sandbox.scoring.PAUSE_S", 0.0)
    env = env_of(place, "spread")
    shown(env, toy_of(place, "spread").repair)
    original, left = FolderContainer.run, [losses]

    def run(self: FolderContainer, argv: list[str], *args: Any, **kwargs: Any) -> Any:
        hidden = self.root / "repos/spread/tests/test_new.py"
        runs_tests = "mktemp" in argv[-1] and hidden.exists() and "_swe_mark" not in hidden.read_text()
        if runs_tests and left[0]:
            left[0] -= 1
            shutil.rmtree(self.root)
        return original(self, argv, *args, **kwargs)

    monkeypatch.setattr(FolderContainer, "run", run)
    if losses == 1:
        assert env.step("<submit/>")["reward"] == 1.0
    else:
        with pytest.raises(InfrastructureFault, match="each container of the tests was lost"):
            env.step("<submit/>")
    assert left[0] == (0 if losses == 1 else 96)
    env.close()


def ending(monkeypatch: pytest.MonkeyPatch, word: str, *results: CommandOutput) -> list[CommandOutput]:
    """Gives the results to the next commands with a word, in the place of running them; returns those not yet given."""
    original, left = FolderContainer.run, [*results]

    def run(self: FolderContainer, argv: list[str], *args: Any, **kwargs: Any) -> CommandOutput:
        return left.pop(0) if left and any(word in part for part in argv) else original(self, argv, *args, **kwargs)

    monkeypatch.setattr(FolderContainer, "run", run)
    return left


LATE = CommandOutput("timeout", None, b"", b"")
FULL = CommandOutput("failed", 255, b"", b"Error: no space left on device, exec failed")


@pytest.mark.parametrize("program", ["-printf", "--create"])
def test_late_reading_of_the_work_is_tried_once_more(
    place: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    for lates, reward in ((1, 1.0), (2, 0.0)):
        env = env_of(place, "spread")
        shown(env, toy_of(place, "spread").repair)
        left = ending(monkeypatch, program, *[LATE] * lates)
        output = env.step("<submit/>")
        assert output["reward"] == reward and not left, output["metadata"]
        env.close()


@pytest.mark.parametrize("result", [LATE, FULL])
@pytest.mark.parametrize("word", ["tar --extract", "touch made"])
def test_a_new_container_that_cannot_be_filled_is_a_fault(
    place: Path, monkeypatch: pytest.MonkeyPatch, word: str, result: CommandOutput
) -> None:
    toy = changed(place, "spread", setup="touch made")
    env = opened(toy, "folders", {"root": str(place / "images")})
    left = ending(monkeypatch, word, result)
    with pytest.raises(InfrastructureFault):
        env.step("<submit/>")
    assert not left
    env.close()


def test_a_late_patch_of_tests_is_a_fault(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = opened(changed(place, "spread", data_source="late"), "folders", {"root": str(place / "images")})
    ending(monkeypatch, "apply", LATE)
    with pytest.raises(InfrastructureFault, match="git apply"):
        env.step("<submit/>")
    env.close()


def changed(place: Path, name: str, **changes: Any) -> Toy:
    """Returns a copy of a toy with other values in task.json."""
    toy = toy_of(place, name)
    copy = place / "tasks" / f"{name}-{'-'.join(changes)}"
    shutil.copytree(place / "tasks" / name, copy, dirs_exist_ok=True)
    task = json.loads((copy / "task.json").read_text()) | changes
    (copy / "task.json").write_text(json.dumps({key: value for key, value in task.items() if value is not None}))
    return Toy(copy.name, toy.tasks, toy.report)


def test_hidden_paths_of_the_image_are_seen_by_the_tests_alone(place: Path) -> None:
    repo = place / "images" / IMAGE / "repos" / "spread"
    (repo / "secret").mkdir()
    (repo / "secret" / "answers.py").write_text("ANSWER = 5\n")
    command = "test -e made && test -e secret/answers.py && test ! -e secret/re.py"
    command += " && python -m unittest discover -v -s tests -t ."
    toy = changed(place, "spread", test=command, hidden_paths=["secret"], setup="touch made", prepare="touch begun")
    env = opened(toy, "folders", {"root": str(place / "images"), "files_mib": 1})
    listed = shown(env, "ls")
    assert "secret" not in listed and "made" in listed and "begun" in listed
    more = "mkdir secret .venv; echo > secret/answers.py; echo > secret/re.py; head -c 2000000 /dev/zero > .venv/large"
    shown(env, f"{toy_of(place, 'spread').repair}\n{more}")
    output = env.step("<submit/>")
    assert output["reward"] == 1.0, output["metadata"]
    assert output["metadata"]["changes_ignored"] == [".venv/large", "secret/answers.py", "secret/re.py"]
    env.close()
    shutil.rmtree(repo / "secret")


def test_protected_files_that_are_the_work_are_taken_over(place: Path) -> None:
    command = "test -e tests/helper && python -m unittest discover -v -s tests -t ."
    for work_files, reward in (([], 0.0), (["tests/h*"], 1.0)):
        toy = changed(place, "count", test=command, work_files=work_files, **{"prepare": f"true {len(work_files)}"})
        toy = Toy(shutil.copytree(toy.tasks / toy.name, toy.tasks / f"count-{len(work_files)}").name, toy.tasks, "exit")
        env = opened(toy, "folders", {"root": str(place / "images")})
        shown(env, toy_of(place, "count").repair + "\ntouch tests/helper")
        output = env.step("<submit/>")
        assert output["reward"] == reward, output["metadata"]
        env.close()


def test_a_folders_task_runs_in_a_container_too(place: Path, tmp_path: Path) -> None:
    toy = changed(place, "last", image=None, test_patch=None)
    shutil.copytree(place / "images" / IMAGE / "repos" / "last", toy.tasks / toy.name / "repo")
    (place / "images" / "empty" / "repos").mkdir(parents=True)
    env = opened(toy, "folders", {"root": str(place / "images"), "image": "empty", "prelude": "export NAME=5"})
    assert "5 " in shown(env, "echo $NAME $(ls)") and "tools.py" in shown(env, "ls")
    shown(env, toy_of(place, "last").repair)
    assert env.step("<submit/>")["reward"] == 1.0
    env.close()


def test_a_patch_of_tests_that_does_not_apply_is_the_tasks_fault(place: Path) -> None:
    toy = changed(place, "mean", data_source="broken")
    (toy.tasks / toy.name / "test.patch").write_text("--- a/absent\n+++ b/absent\n@@ -1 +1 @@\n-a\n+b\n")
    env = opened(toy, "folders", {"root": str(place / "images")})
    with pytest.raises(UserError, match="the patch does not apply"):
        env.step("<submit/>")
    env.close()


def test_tasks_that_cannot_run_are_named(place: Path) -> None:
    options = {"tasks": str(place / "tasks"), "session": "local", "session_options": {}}
    row = {"extra_info": {"task": "mean"}, "reward_spec": {"ground_truth": "true"}}
    assert "needs a container" in (SweEnv.wrong_row(row, options) or "")
    assert SweEnv.wrong_row(row, {**options, "session": "folders"}) is None
    with pytest.raises(UserError, match=r"session_options\.imige: there is no such option; did you mean image"):
        SweEnv.check_options({**options, "session": "folders", "session_options": {"imige": "x"}})


def test_a_container_that_cannot_start_is_refused_before_a_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"tasks": str(place / "tasks"), "session": "folders", "session_options": {"root": str(place / "images")}}
    config = EnvironmentConfig(options={"swe": options})
    registry.try_machine("swe", config)

    def start(self: Any, image: str, timeout_s: float) -> FolderContainer:
        raise InfrastructureFault("network not found")

    monkeypatch.setattr("tests.envs.swe.folder_runtime.FolderRuntime.start", start)
    with pytest.raises(UserError, match=r"session_options: .* does not start: network not found; correct the options"):
        registry.try_machine("swe", config)


def test_a_trajectory_whose_container_is_lost_is_played_again(
    place: Path, characters_chat: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = toy_of(place, "spread")
    original, starts = FolderContainer.run, list[FolderContainer]()

    def run(self: FolderContainer, argv: list[str], *args: Any, **kwargs: Any) -> Any:
        if "cat > tools.py" in argv[-1] and self not in starts:
            starts.append(self)
            if len(starts) == 1:
                shutil.rmtree(self.root)
        return original(self, argv, *args, **kwargs)

    monkeypatch.setattr(FolderContainer, "run", run)
    swe = {"tasks": str(toy.tasks), "session": "folders", "session_options": {"root": str(place / "images")}}
    config = EnvironmentConfig(options={"swe": {**swe, **toys.PATIENT}})
    prompts = [Prompt(0, [{"role": "user", "content": "Repair it."}], "swe", toy.row) for _ in range(2)]
    repair = f"<bash>{toy.repair}</bash>"
    played = play(
        characters_chat,
        config,
        [(prompt, Scripted(characters_chat, [repair, repair, "<submit/>"])) for prompt in prompts],
        retries=1,
        env_timeout_s=300.0,
    )
    assert [(t.status, t.reward) for t in played] == [(Status.COMPLETED, 1.0)] * 2, [t.metadata for t in played]
    assert len(starts) == 3
