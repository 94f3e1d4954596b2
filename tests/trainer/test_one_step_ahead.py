"""Generating one batch ahead: the end of a run, steps without engines, and the checkpoint."""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_mega.cluster.fleet import NoServingActor
from skyrl_mega.config.schema import Config, SamplingConfig
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.one_step_ahead import OneStepAhead
from skyrl_mega.trainer.shutdown import GracefulStop
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.sequences import Column
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory


class Source:
    """A source of batches of two prompts with the weights of `version`, generated once `go` is set."""

    def __init__(self, config: Config) -> None:
        self.config, self.prompts = config, [Prompt(i, [], "mine", {}) for i in range(20)]
        self.stream = PromptStream(20, batch=2, shuffle=False)
        self.generator = SimpleNamespace(look=lambda: None)
        self.go, self.version, self.faults = threading.Event(), 0, 0
        self.go.set()

    def next_groups(self, step: Step) -> list[Group]:
        chosen = self.stream.take(2)
        while not self.go.wait(0.01):
            self.generator.look()
        if self.faults:
            self.faults -= 1
            raise NoServingActor("engine", 0, "service", "all are dead")
        groups = [Group(self.prompts[i], [self.played(i, sample) for sample in range(2)]) for i in chosen]
        step.trajectories += [t for group in groups for t in group.trajectories]
        return groups

    def played(self, prompt: int, sample: int) -> Trajectory:
        parts = array("i", [1, 2]), array("b", [0, 1]), array("f", [0.0, -1.0])
        t = Trajectory(self.prompts[prompt], sample, *parts, 1, 1.0, Status.COMPLETED, 1)
        t.versions = [(self.version, 1)]
        return t


@contextmanager
def ahead(config: Config, **calls: Any) -> Iterator[tuple[OneStepAhead, Source]]:
    source: Any = Source(config)
    rollouts = OneStepAhead(source, config, calls.get("look", lambda: None), calls.get("refill", lambda: None))
    rollouts.synced(0)
    yield rollouts, source
    rollouts.close()


@pytest.fixture
def config() -> Config:
    settings = Config()
    settings.asynchrony.mode, settings.data.prompts_per_step, settings.data.samples_per_prompt = "one_step", 2, 2
    return settings


def uids(groups: list[Group]) -> list[int]:
    return [group.prompt.uid for group in groups]


def step(number: int) -> Step:
    return Step(number, Console())


def test_a_batch_is_generated_while_the_one_before_is_trained_on(config: Config) -> None:
    with ahead(config) as (rollouts, source):
        for number in range(1, 5):
            current = step(number)
            assert uids(rollouts.next_groups(current)) == [2 * number - 2, 2 * number - 1]
            assert current.metrics["asynchrony/staleness_max"] == min(1, number - 1)
            rollouts.before_sync(current)
            source.version = number
            rollouts.synced(number)
        assert rollouts.prompts_left(4) == 12


def test_what_is_generated_is_abandoned_at_the_end(config: Config) -> None:
    """Ends the run in the middle of generating, and expects a fast end."""

    def asked() -> None:
        raise GracefulStop

    with ahead(config, look=asked) as (rollouts, source):
        rollouts.next_groups(step(1))
        source.go.clear()
        with pytest.raises(GracefulStop):
            rollouts.before_sync(step(1))
        start = time.monotonic()
    assert time.monotonic() - start < 15


def test_a_batch_without_engines_is_generated_once_they_are_back(config: Config) -> None:
    refilled: list[int] = []
    with ahead(config, refill=lambda: refilled.append(1)) as (rollouts, source):
        source.faults = 2
        assert uids(rollouts.next_groups(step(1))) == [0, 1], "the same prompts"
        assert refilled == [1, 1]


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_before_training_has_both_batches(config: Config, tmp_path: Path, whole: bool) -> None:
    """Saves the loop's batch, and the batch generated ahead if complete."""
    with ahead(config) as (rollouts, source):
        rollouts.next_groups(step(1))
        rollouts.before_sync(step(1))
        rollouts.synced(1)
        if not whole:
            source.go.clear()
        rollouts.next_groups(step(2))
        if whole:
            rollouts.before_sync(step(2))
        rollouts.save(tmp_path, 1)
    with ahead(config) as (again, _):
        steps = "step 2, 3" if whole else "step 2"
        assert again.restore(tmp_path) == f"restored the groups generated ahead for {steps}"
        again.synced(1)
        assert again.prompts_left(1) == 18
        uids_by_step = [uids(again.next_groups(step(number))) for number in (2, 3, 4)]
    assert uids_by_step == [[2, 3], [4, 5], [6, 7]]


def test_the_place_that_is_kept_is_before_the_batch_that_is_not_whole(config: Config, tmp_path: Path) -> None:
    """Saves the position before the two prompts of the incomplete batch, for a second draw."""
    with ahead(config) as (rollouts, source):
        rollouts.next_groups(step(1))
        rollouts.before_sync(step(1))
        source.go.clear()
        rollouts.next_groups(step(2))
        while source.stream.position < 6:
            time.sleep(0.001)
        rollouts.save(tmp_path, 2)
    assert json.loads((tmp_path / "rollouts.json").read_text())["stream"]["position"] == 4


def test_columns_of_a_batch_come_back_with_a_checkpoint(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves and restores a column (token rewards) of trajectories."""
    played = Source.played

    def with_columns(self: Source, prompt: int, sample: int) -> Trajectory:
        t = played(self, prompt, sample)
        t.columns["token_rewards"] = Column(torch.tensor([0.0, prompt + sample / 4], dtype=torch.float64))
        return t

    monkeypatch.setattr(Source, "played", with_columns)
    with ahead(config) as (rollouts, _):
        rollouts.next_groups(step(1))
        rollouts.before_sync(step(1))
        rollouts.save(tmp_path, 1)
    with ahead(config) as (again, _):
        again.restore(tmp_path)
        groups = again.next_groups(step(2))
        rewards = [t.columns["token_rewards"].values.tolist() for group in groups for t in group.trajectories]
    assert rewards == [[0.0, 2.0], [0.0, 2.25], [0.0, 3.0], [0.0, 3.25]]


@pytest.mark.parametrize(
    ("changed", "version"),
    [({"sampling": SamplingConfig(temperature=0.5)}, 1), ({"tensor": 2, "memory_fraction": 0.9, "restarts": 3}, 0)],
    ids=["other settings generate it again", "other engines leave it as it is"],
)
def test_what_is_kept_of_a_batch(config: Config, tmp_path: Path, changed: dict[str, Any], version: int) -> None:
    with ahead(config) as (rollouts, _):
        rollouts.next_groups(step(1))
        rollouts.before_sync(step(1))
        rollouts.save(tmp_path, 1)
    config.rollout = replace(config.rollout, **changed)
    with ahead(config) as (again, source):
        line = again.restore(tmp_path)
        assert line.startswith("discarded 2 groups" if version else "restored ")
        assert not version or line.endswith("settings unlike the checkpoint's: rollout.sampling")
        source.version = 1
        again.synced(1)
        groups = again.next_groups(step(2))
        assert uids(groups) == [2, 3] and groups[0].trajectories[0].versions == [(version, 1)]
