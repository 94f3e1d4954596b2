"""Checkpoints with a `rollouts.json` of other versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.config.schema import Config, RetrieverConfig
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.saved_rollouts import _settings
from skyrl_mega.trainer.step import Step
from tests.support.rollouts_ahead import live, names, smaller


def larger(config: Config) -> None:
    config.data.prompts_per_step = 8


@pytest.mark.parametrize("change", [lambda config: None, smaller, larger], ids=["same", "smaller", "larger"])
def test_of_a_form_that_tells_no_named_steps_no_name_recurs(tmp_path: Path, change: Any) -> None:
    """Resumes a form without `named` and with other settings, and expects new names: a step of 8 prompts numbers names
    differently from two steps of 4."""
    rollouts, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        before = names([group for number in (1, 2) for group in rollouts.next_groups(Step(number, Console()))])
        rollouts.save(tmp_path, 2)
        before |= {name for ticket in rollouts.service.so_far() for name in ticket.names}
    _change(tmp_path, lambda about: about.pop("named"), form=3)
    again, loop, _ = live(tmp_path, change)
    with loop:
        assert before and not before & names(again.next_groups(Step(3, Console())))


@pytest.mark.parametrize("settings", [None, "absent"])
def test_a_checkpoint_without_settings_has_its_prompts_drawn_again(
    tmp_path: Path, settings: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        rollouts.next_groups(Step(1, Console()))
        rollouts.save(tmp_path, 1)
    _change(tmp_path, lambda about: about.pop("settings") if settings else about.update(settings=None))
    again, _, _ = live(tmp_path, lambda config: None)
    assert again.interrupted == [] and again.done == {}
    assert capsys.readouterr().out.strip().endswith("; another version of the program saved them")


def _change(folder: Path, change: Callable[[dict[str, Any]], Any], **more: Any) -> None:
    file = folder / "rollouts.json"
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps({**about, **more}))


def test_a_moved_retrieval_service_keeps_the_saved_rollouts() -> None:
    """Compares digests: a run's service has another address in each start, but another index changes the answers."""

    def settings(**retriever: Any) -> dict[str, str]:
        config = Config()
        config.environment.retriever = RetrieverConfig(**retriever)
        return _settings(config)

    assert settings(index="a", url="http://10.0.0.1:1") == settings(index="a", url="http://10.0.0.2:9")
    assert settings(index="a") != settings(index="b") and settings(topk=1) != settings(topk=2)
