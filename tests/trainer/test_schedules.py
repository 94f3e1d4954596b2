"""Thousands of schedules of asynchronous rollouts in virtual time: engines crash and recover, weight syncs start at any
moment and fail half-way, tools are slow, the run is killed and resumed.

Checked for every schedule: no step waits forever, no group is lost or trained on twice, no token is older than allowed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer import asynchronous
from skyrl_mega.trainer.asynchronous import Asynchronous
from skyrl_mega.trainer.rollouts_ahead import StaleTooFar, Versions
from skyrl_mega.trainer.step import Step
from tests.support.simulated_time import LONGEST_S
from tests.support.virtual_rollouts import Engines, service_of

PROMPTS = 60
SOON_S = 1e4
"""Shorter virtual time limit, still five times as long as a schedule without a fault."""


class Killed(Exception):
    """The simulated death of the run's process."""


@dataclass
class Schedule:
    """A run with all random events.

    Args:
        seed: Determines every event.
        folder: Place of the checkpoints.
    """

    seed: int
    folder: Path
    trained: list[tuple[int, list[str]]] = field(default_factory=list)
    """(step, names of the step's trajectories), without repeated steps."""
    log: list[Any] = field(default_factory=list)
    """All observations."""
    saved: int = 0
    """Number of steps in the newest checkpoint."""

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.config = Config()
        self.config.data.prompts_per_step = self.random.randint(1, 4)
        self.config.data.samples_per_prompt = self.random.randint(1, 3)
        self.config.asynchrony.max_staleness = self.random.randint(0, 3)
        self.config.run.steps = self.random.randint(1, 6)
        dynamic = self.config.algorithm.dynamic_sampling
        dynamic.enabled = self.config.data.samples_per_prompt > 1 and self.random.random() < 0.3
        dynamic.max_rounds = self.random.randint(1, 3)
        self.kills = self.random.choice([0, 0, 1, 2])
        self.engines = self.random.randint(1, 3)

    def play(self) -> Schedule:
        """Runs all steps, over as many restarts as needed."""
        while self.saved < (self.config.run.steps or 0):
            try:
                with VirtualLoop(LONGEST_S) as loop:
                    self._live(loop)
            except Killed:
                self.trained = [(step, names) for step, names in self.trained if step <= self.saved]
        return self

    def _live(self, loop: VirtualLoop) -> None:
        engines = Engines(self.engines, self.random)
        service = service_of(engines, self.random, loop)
        prompts = [Prompt(i, [], "mine", {}) for i in range(PROMPTS)]
        stream = PromptStream(PROMPTS, batch=self.config.data.prompts_per_step)
        version = self.saved

        def sync() -> None:
            engines.hold(half=False)
            self._chance(loop, engines)
            loop.sleep(self.random.random() * 3)
            if self.random.random() < 0.2:  # the sync fails and is repeated
                engines.hold(half=True)
                loop.sleep(self.random.random() * 3)
            engines.revive(version)
            rollouts.synced(version)

        rollouts = Asynchronous(
            self.config, prompts, stream, service, look=lambda: self._chance(loop, engines), refill=sync
        )
        if self.saved or (self.folder / "0").exists():
            rollouts.restore(self.folder / str(self.saved))
        sync()
        for number in range(self.saved + 1, (self.config.run.steps or 0) + 1):
            step = Step(number, Console())
            groups = rollouts.next_groups(step)
            if self.saved == number - 1 and self.kills and self.random.random() < 0.2:
                self.kills -= 1
                # On a request to end soon the run saves and ends
                rollouts.save(folder_of(self.folder, self.saved), self.saved)
                raise Killed
            self._observe(step, groups, version, loop.now)
            loop.sleep(self.random.random() * 20)  # training
            self._chance(loop, engines)
            version = number
            sync()
            if self.random.random() < 0.5 or number == self.config.run.steps:
                rollouts.save(folder_of(self.folder, number), number)
                self.saved = number

    def _observe(self, step: Step, groups: list[Any], version: int, now: float) -> None:
        names = [t.metadata["name"] for group in groups for t in group.trajectories]
        self.trained.append((step.number, names))
        self.log.append((step.number, round(now, 6), names, [t.versions for g in groups for t in g.trajectories]))
        for t in (t for group in groups for t in group.trajectories):
            for of, _ in t.versions:
                assert version - of <= self.config.asynchrony.max_staleness, "older than the bound"
                assert of <= version, "of weights that are not there yet"
        assert len({len(group.trajectories) for group in groups}) <= 1

    def _chance(self, loop: VirtualLoop, engines: Engines) -> None:
        """Kills an engine or the run at random."""
        if self.random.random() < 0.03:
            engines.kill(self.random.randrange(self.engines))
        if self.kills and self.random.random() < 0.03:
            self.kills -= 1
            raise Killed

    def check(self) -> None:
        """Checks the trained groups: none lost, none doubled."""
        names = Counter(name for _, of_step in self.trained for name in of_step)
        assert not [name for name, times in names.items() if times > 1], "trained on twice"
        assert [step for step, _ in self.trained] == [*range(1, (self.config.run.steps or 0) + 1)], "a step is missing"
        if not self.config.algorithm.dynamic_sampling.enabled:
            size, steps = self.config.data.prompts_per_step, self.config.run.steps or 0
            assert all(len(of_step) == size * self.config.data.samples_per_prompt for _, of_step in self.trained)
            assert {self._number(name) for name in names} == {*range(size * steps)}, "a group was skipped"

    def _number(self, name: str) -> int:
        _, step, _, place = name.split("/")
        data = self.config.data
        return (int(step) - 1) * data.prompts_per_step + int(place) // data.samples_per_prompt


def folder_of(folder: Path, step: int) -> Path:
    (folder / str(step)).mkdir(exist_ok=True)
    return folder / str(step)


def fault(folder: Path) -> Exception | None:
    """Returns the first error among 300 schedules, or None."""
    for seed in range(300):
        schedule_folder = folder / str(seed)
        schedule_folder.mkdir(parents=True)
        try:
            Schedule(seed, schedule_folder).play().check()
        except (AssertionError, RuntimeError) as error:
            return error
    return None


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(100), id="a hundred"),
        pytest.param(range(100, 300), id="two hundred more", marks=pytest.mark.slow),
        pytest.param(range(300, 1000), id="a thousand in all", marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_no_schedule_loses_doubles_or_ages_anything(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        schedule_folder = tmp_path / str(seed)
        schedule_folder.mkdir()
        Schedule(seed, schedule_folder).play().check()


@pytest.mark.parametrize("seed", range(0, 1000, 100))
def test_a_schedule_is_its_seed(tmp_path: Path, seed: int) -> None:
    logs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        logs.append(Schedule(seed, tmp_path / name).play().log)
    assert logs[0] == logs[1] and logs[0]


def test_one_group_too_many_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests one group too many, and expects an error: the group is too old when trained on."""
    monkeypatch.setattr(Asynchronous, "wanted", property(lambda self: self.config.data.prompts_per_step + 1))
    assert fault(tmp_path)


def test_a_group_that_is_not_waited_for_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asynchronous, "_leaves_too_many", lambda self, chosen: False)
    assert isinstance(fault(tmp_path), StaleTooFar)


def test_a_group_that_is_taken_twice_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Asynchronous._choose

    def twice(self: Asynchronous) -> Any:
        chosen = choose(self)
        if chosen and len(chosen) > 1:
            self.done[chosen[0].ticket.number] = chosen[0]
        return chosen

    monkeypatch.setattr(Asynchronous, "_choose", twice)
    assert fault(tmp_path)


def test_an_engine_that_never_comes_back_into_service_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "rejoin", lambda self: None)
    monkeypatch.setitem(globals(), "LONGEST_S", SOON_S)
    assert "a task waits for an event that never comes" in str(fault(tmp_path))


def test_requests_that_a_dead_engine_takes_along_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "_requeue", lambda self, load, batch: None)
    monkeypatch.setitem(globals(), "LONGEST_S", SOON_S)
    assert "a task waits for an event that never comes" in str(fault(tmp_path))


def test_a_group_that_a_checkpoint_forgets_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = asynchronous.saved_rollouts.write

    def forgets(folder: Path, config: Config, about: dict[str, Any], *rows: Any) -> None:
        write(folder, config, {**about, "under_way": about["under_way"][1:]}, *rows)

    monkeypatch.setattr(asynchronous.saved_rollouts, "write", forgets)
    assert "a group was skipped" in str(fault(tmp_path))


def test_staleness_counts_syncs_and_not_steps() -> None:
    versions = Versions(2)
    for version in (0, 1, 4, 9):
        versions.add(version)
    assert [versions.syncs_since(of) for of in (9, 4, 1)] == [0, 1, 2]
