"""Thousands of schedules of asynchronous rollouts, in virtual time: engines die and come back, syncs come at every
moment and fail half-way, tools are slow, the run is killed and resumed.

Whatever happens: no step waits for ever, no group is lost or trained on twice, no token is older than the bound.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.engines.base import Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.router import Router
from skyrl_mega.rollout.service import RolloutService, ServiceRouter
from skyrl_mega.rollout.trajectory import Status
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer import asynchronous
from skyrl_mega.trainer.asynchronous import Asynchronous
from skyrl_mega.trainer.rollouts_ahead import StaleTooFar, Versions
from skyrl_mega.trainer.step import Step
from tests.support.simulated_time import LONGEST_S
from tests.support.virtual_rollouts import Engines, Player, Players

PROMPTS = 60


class Killed(Exception):
    """The run's process is gone."""


@dataclass
class Schedule:
    """One run, and everything that happens in it.

    Args:
        seed: Draws all of it.
        folder: For checkpoints.
    """

    seed: int
    folder: Path
    trained: list[tuple[int, list[str]]] = field(default_factory=list)
    """(step, names of its trajectories), of the steps that were not repeated."""
    log: list[Any] = field(default_factory=list)
    """Everything that was observed."""
    saved: int = 0
    """Steps in the newest checkpoint."""

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
        """All steps, over as many lives as it takes."""
        while self.saved < (self.config.run.steps or 0):
            try:
                with VirtualLoop(LONGEST_S) as loop:
                    self._live(loop)
            except Killed:
                self.trained = [(step, names) for step, names in self.trained if step <= self.saved]
        return self

    def _live(self, loop: VirtualLoop) -> None:
        engines = Engines(self.engines, self.random)
        service = RolloutService(Players(engines, self.random), self.config.rollout.sampling, loop)
        prompts = [Prompt(i, [], "mine", {}) for i in range(PROMPTS)]
        stream = PromptStream(PROMPTS, batch=self.config.data.prompts_per_step)
        version = self.saved

        def sync() -> None:
            engines.hold(half=False)
            self._chance(loop, engines)
            loop.sleep(self.random.random() * 3)
            if self.random.random() < 0.2:  # it fails and is repeated
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
                rollouts.keep(folder_of(self.folder, self.saved), self.saved)  # asked to end soon: it saves, and goes
                raise Killed
            self._observe(step, groups, version, loop.now)
            loop.sleep(self.random.random() * 20)  # it trains
            self._chance(loop, engines)
            version = number
            sync()
            if self.random.random() < 0.5 or number == self.config.run.steps:
                rollouts.keep(folder_of(self.folder, number), number)
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
        """An engine may die, and the run be killed."""
        if self.random.random() < 0.03:
            engines.kill(self.random.randrange(self.engines))
        if self.kills and self.random.random() < 0.03:
            self.kills -= 1
            raise Killed

    def check(self) -> None:
        """Nothing is lost or doubled."""
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
    """What goes wrong in the first schedule in which anything does."""
    for seed in range(300):
        own = folder / str(seed)
        own.mkdir(parents=True)
        try:
            Schedule(seed, own).play().check()
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
        own = tmp_path / str(seed)
        own.mkdir()
        Schedule(seed, own).play().check()


@pytest.mark.parametrize("seed", range(0, 1000, 100))
def test_a_schedule_is_its_seed(tmp_path: Path, seed: int) -> None:
    logs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        logs.append(Schedule(seed, tmp_path / name).play().log)
    assert logs[0] == logs[1] and logs[0]


def test_one_group_too_many_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission: one that is asked for too early is too old when its turn comes."""
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
    monkeypatch.setattr(ServiceRouter, "rejoin", lambda self: None)
    assert "somebody waits for ever" in str(fault(tmp_path))


def test_requests_that_a_dead_engine_takes_along_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServiceRouter, "_again", lambda self, engine, part: None)
    assert "somebody waits for ever" in str(fault(tmp_path))


def test_a_group_that_a_checkpoint_forgets_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = asynchronous.kept_rollouts.write

    def forgets(folder: Path, config: Config, about: dict[str, Any], *rows: Any) -> None:
        write(folder, config, {**about, "under_way": about["under_way"][1:]}, *rows)

    monkeypatch.setattr(asynchronous.kept_rollouts, "write", forgets)
    assert "a group was skipped" in str(fault(tmp_path))


def test_staleness_counts_syncs_and_not_steps() -> None:
    versions = Versions(2)
    for version in (0, 1, 4, 9):
        versions.add(version)
    assert [versions.behind(of) for of in (9, 4, 1)] == [0, 1, 2]


def live(folder: Path, change: Any, prompts: int = PROMPTS) -> tuple[Asynchronous, VirtualLoop, PromptStream]:
    """Rollouts of 4 prompts a step in virtual time, restored from the folder if there is anything."""
    config = Config()
    config.asynchrony.mode, config.asynchrony.max_staleness = "full", 1
    config.data.prompts_per_step, config.data.samples_per_prompt = 4, 2
    change(config)
    random, loop = Random(0), VirtualLoop(LONGEST_S)
    engines = Engines(2, random)
    service = RolloutService(Players(engines, random), config.rollout.sampling, loop)
    stream = PromptStream(prompts, batch=config.data.prompts_per_step)
    every = [Prompt(i, [], "mine", {}) for i in range(prompts)]
    rollouts = Asynchronous(config, every, stream, service, look=lambda: None, refill=lambda: None)
    print(rollouts.restore(folder))
    engines.revive(0)
    rollouts.synced(0)
    return rollouts, loop, stream


def smaller(config: Config) -> None:
    config.data.prompts_per_step = 1


def fresher(config: Config) -> None:
    config.asynchrony.max_staleness = 0


def one_step(config: Config) -> None:
    config.asynchrony.mode = "one_step"


def names(groups: list[Any]) -> set[str]:
    """Of their trajectories."""
    return {t.metadata["name"] for group in groups for t in group.trajectories}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (smaller, "data.prompts_per_step"),
        (fresher, "asynchrony.max_staleness"),
        (one_step, "asynchrony.mode"),
    ],
)
def test_other_settings_draw_the_prompts_again(
    tmp_path: Path, change: Any, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run with fewer prompts a step, or less staleness, would else wait for ever for room."""
    rollouts, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        step = Step(1, Console())
        groups = rollouts.next_groups(step)
        learned = {group.prompt.uid for group in groups}
        rollouts.keep(tmp_path, 1)
        before = names([*groups, *(one.group for one in rollouts.done.values())])
    again, loop, stream = live(tmp_path, change)
    told = "discarded: 4 groups generated ahead or under way, whose prompts are drawn again first; "
    assert capsys.readouterr().out.splitlines()[-1] == f"{told}not as in the checkpoint: {key}"
    with loop:
        assert stream.remaining == PROMPTS - len(learned)
        groups = again.next_groups(Step(2, Console()))
        found = {group.prompt.uid for group in groups}
        assert found and not found & learned
        assert before and not before & names(groups), "each has a random stream of its own"


def test_a_step_without_a_signal_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `max_rounds` times what it needs, and not when all of the data has been drawn."""

    def sampled(config: Config) -> None:
        config.algorithm.dynamic_sampling.enabled, config.algorithm.dynamic_sampling.max_rounds = True, 2

    monkeypatch.setattr(asynchronous, "with_signal", lambda groups, algorithm: [])
    rollouts, loop, stream = live(tmp_path, sampled, prompts=400)
    with loop:
        step = Step(1, Console())
        assert rollouts.next_groups(step) == []
        assert 8 <= step.metrics["rollout/groups_left_out"] <= 16 and stream.remaining >= 384
        assert step.metrics["rollout/rounds"] == 2 and step.metrics["rollout/groups_missing"] == 4


def test_what_was_played_of_groups_under_way_is_not_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples that had ended keep their tokens, turns of the others theirs, and groups are as old as they were."""
    first, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        first.next_groups(Step(1, Console()))
        first.synced(1)
        first.keep(tmp_path, 1)
        under_way = first.service.so_far()
    before = {t.metadata["name"]: t.tokens.tolist() for ticket in under_way for t in ticket.played.values()}
    written = {one.request: one for said in journal.read_all(tmp_path).values() for one in said}
    said = {request: [v for v, _ in one.completion.versions] for request, one in written.items()}
    assert before and said and any(ticket.left for ticket in under_way)
    asked: list[str] = []
    generate = Router.generate

    async def told(self: Router, request: Request) -> Any:
        asked.append(request.id)
        return await generate(self, request)

    monkeypatch.setattr(Router, "generate", told)
    capsys.readouterr()
    again, loop, _ = live(tmp_path, lambda config: None)
    done, begun = len(again.done), len(again.again)
    assert capsys.readouterr().out.strip() == (
        f"taken up again: {done} groups generated ahead, and {begun} under way, of which {len(before)} trajectories "
        f"are done and {len(said)} turns of others"
    )
    with loop:
        known = {ticket.number: ticket.version for ticket in again.again if ticket.played or ticket.said}
        assert known.items() <= {ticket.number: ticket.version for ticket in under_way}.items() and len(known) > 1
        again._ask()
        assert known == {n: t.version for n, t in again.service.under_way.items() if n in known}, "as old as they were"
        drawn = [t for step in (2, 3) for group in again.next_groups(Step(step, Console())) for t in group.trajectories]
    assert not said.keys() & set(asked) and not before.keys() & {name.rpartition("/")[0] for name in asked}
    found = {t.metadata["name"]: t for t in drawn}
    assert {name: found[name].tokens.tolist() for name in before if name in found} == before
    for name in {request.rpartition("/")[0] for request in said} & found.keys():
        versions = [v for request, of in said.items() if request.rpartition("/")[0] == name for v in of]
        assert [version for version, _ in found[name].versions][: len(versions)] == versions


def test_all_groups_that_were_under_way_are_asked_for_however_few_steps_are_left(tmp_path: Path) -> None:
    """They are older than others that may be done, and the next step has to take the oldest."""

    def fewer(config: Config) -> None:
        config.run.steps = 1

    first, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        first.next_groups(Step(1, Console()))
        first.keep(tmp_path, 1)
        numbers = {*first.service.under_way}
    again, loop, _ = live(tmp_path, fewer)
    with loop:
        again._ask()
        assert numbers and numbers <= again.service.under_way.keys()


def test_what_a_service_under_an_environment_has_ended_is_played_again(tmp_path: Path) -> None:
    first, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        first.next_groups(Step(1, Console()))
        (ticket, sample), *_ = [(t, s) for t in first.service.so_far() for s in t.played]
        first.service._played[ticket.number][sample].status = Status.ERROR_INFRASTRUCTURE
        (now,) = [t for t in first.service.so_far() if t.number == ticket.number]
        assert sample in now.left and sample not in ticket.left


def test_a_checkpoint_of_another_form_has_its_prompts_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        learned = {group.prompt.uid for group in rollouts.next_groups(Step(1, Console()))}
        with pytest.MonkeyPatch.context() as older:
            older.setattr(asynchronous.kept_rollouts, "FORM", 1)
            rollouts.keep(tmp_path, 1)
    again, loop, stream = live(tmp_path, lambda config: None)
    with loop:
        assert again.again == [] and again.done == {} and stream.remaining == PROMPTS - len(learned)
    assert capsys.readouterr().out.strip().endswith("; another version of the program has written it")


def test_other_prompts_in_the_place_of_those_that_were_played_are_drawn(tmp_path: Path) -> None:
    """A group's samples would else be of two questions."""
    rollouts, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        learned = {group.prompt.uid for group in rollouts.next_groups(Step(1, Console()))}
        rollouts.keep(tmp_path, 1)
    for question, groups in (("hello", 0), (None, None)):
        again, loop, stream = live(tmp_path, lambda config: None)
        with loop:
            again.again, again.done = [], {}
            if question is not None:
                for prompt in again.prompts:
                    prompt.messages.append({"role": "user", "content": question})
            again.restore(tmp_path)
            kept = len(again.again) + len(again.done)
            assert kept == groups if groups is not None else kept > 0
            assert groups is None or stream.remaining == PROMPTS - len(learned)


def test_an_environment_that_opens_slowly_holds_up_its_own_group_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = Player.open

    async def opens(self: Player, prompt: Prompt, sample: int) -> Any:
        if prompt.uid == 0:
            await asyncio.sleep(10_000)
        return await at_once(self, prompt, sample)

    monkeypatch.setattr(Player, "open", opens)
    rollouts, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        groups = rollouts.next_groups(Step(1, Console()))
        assert loop.now < 1000 and len(groups) == 4 and 0 not in {group.prompt.uid for group in groups}


def test_groups_without_a_signal_are_in_a_checkpoint_until_a_step_has_told_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled(config: Config) -> None:
        config.algorithm.dynamic_sampling.enabled = True

    monkeypatch.setattr(asynchronous, "with_signal", lambda groups, _: [g for g in groups if g.prompt.uid % 2])
    rollouts, loop, _ = live(tmp_path, sampled)
    with loop:
        step = Step(1, Console())
        rollouts.next_groups(step)
        told = {t.prompt.uid for t in step.trajectories}
        rollouts.synced(1)
        while not rollouts.left_out:  # of the next step
            rollouts.collect(1.0)
        rollouts.keep(tmp_path, 1)
        left_out = {one.group.prompt.uid for one in rollouts.left_out}
    again, loop, _ = live(tmp_path, sampled)
    with loop:
        step = Step(2, Console())
        again.next_groups(step)
        found = {t.prompt.uid for t in step.trajectories}
        assert left_out and left_out <= found and not found & told
        assert step.metrics["rollout/groups_left_out"] >= len(left_out)


def test_groups_that_failed_are_played_again_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that ended for its failures would end for the same ones each time."""

    def sampled(config: Config) -> None:
        config.algorithm.dynamic_sampling.enabled = True

    monkeypatch.setattr(asynchronous, "with_signal", lambda groups, _: [g for g in groups if g.prompt.uid % 2])
    rollouts, loop, _ = live(tmp_path, sampled)
    with loop:
        rollouts.next_groups(Step(1, Console()))
        rollouts.synced(1)
        while not rollouts.left_out:
            rollouts.collect(1.0)
        broken = rollouts.left_out[0]
        broken.group.trajectories[0].status = Status.ERROR_ENV
        rollouts.keep(tmp_path, 1)
    again, loop, _ = live(tmp_path, sampled)
    number = broken.ticket.number
    assert number in {ticket.number for ticket in again.again}
    assert number not in {one.ticket.number for one in again.left_out}
    with loop:
        again.next_groups(Step(2, Console()))
        assert number not in {ticket.number for ticket in again.again}, "it was asked for"
