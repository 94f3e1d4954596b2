"""`python -m skyrl_mega.envs.containers`: pulls images before a run, and checks a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import images
from skyrl_mega.envs.containers.prepare import run
from tests.support import fake_podman


def options(folder: Path) -> str:
    return json.dumps({"program": str(Path(fake_podman.__file__)), "global_arguments": [f"--root={folder}"]})


def test_images_of_tasks_are_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "PAUSES_S", (0.0, 0.0))
    for task, image in (("a", "one"), ("b", "two"), ("c", "one"), ("d", None)):
        (tmp_path / "tasks" / task).mkdir(parents=True)
        (tmp_path / "tasks" / task / "task.json").write_text(json.dumps({"image": image} if image else {}))
    given = ["pull", "--tasks", str(tmp_path / "tasks"), "three", "--options", options(tmp_path), "--at-once", "1"]
    assert run(given) == 0
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["one", "three", "two"]
    assert "3 of 3 images are on this machine" in capsys.readouterr().out
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "pull").write_text(json.dumps([{"exit": 125, "stderr": "Error: manifest unknown"}]))
    assert run(["pull", "four", "five", "--options", options(tmp_path), "--at-once", "1"]) == 1
    printed = capsys.readouterr()
    assert "image = four: the image cannot be pulled: Error: manifest unknown" in printed.err
    assert "1 of 2 images" in printed.out


def test_a_node_is_checked_with_a_container(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "one", "--options", options(tmp_path)]) == 0
    assert "one: " in capsys.readouterr().out and not list((tmp_path / "containers").iterdir())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["pull"], "no image is named"),
        (["pull", "--tasks", "/nothing"], "--tasks /nothing: there is no such folder"),
        (["check", "one", "--options", "{"], "allowed is a JSON object"),
        (["check", "one", "--options", '{"memory": 1}'], "did you mean memory_mib"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: list[str], error: str) -> None:
    given = arguments if "--options" in arguments else [*arguments, "--options", options(tmp_path)]
    with pytest.raises(UserError, match=error):
        run(given)
