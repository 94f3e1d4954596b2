"""A run in virtual time: the real service, router and admission, with engines, tools and a policy that only take time.

How long these take is the planner's estimate (`simulation.rates`) and a workload; what waits for what, and for how
long, is found by the code that runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import StringIO
from random import Random
from typing import Any

from skyrl_mega.config.schema import AsynchronyConfig, Config, DataConfig, RolloutConfig
from skyrl_mega.data.order import PromptStream
from skyrl_mega.engines.base import Request, Sampling
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.router import Router
from skyrl_mega.rollout.service import RolloutService
from skyrl_mega.rollout.slots import LocalPlayer
from skyrl_mega.rollout.trajectory import Status, Trajectory
from skyrl_mega.simulation.calls import OWN, Bounds, Calls, HeldSlots, Places
from skyrl_mega.simulation.engines import SimulatedFleet, Speed
from skyrl_mega.simulation.rates import MOST, Rates, smaller
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.simulation.workload import Workload
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.asynchronous import Asynchronous
from skyrl_mega.trainer.step import Step

FIRST = 9
"""The first step that is measured, in every mode, so that all have the same prompts. Those before it, as many as it
takes to be in full swing, are not all played."""
TICKS = 16
"""In which as many trajectories as `MOST` write an answer; fewer have shorter ticks."""
FINEST = 256
"""Tokens by which an answer is counted on average, where it has more: there are thousands of answers in a step."""


@dataclass(frozen=True)
class Outcome:
    """Of the steps that were measured."""

    seconds: float
    """Of a step."""
    policy_waits: float
    """Share of the time in which the policy has nothing to do, 0 to 1; a sync counts as work."""
    engines_idle: float
    """Share of the time in which an engine has no request and no sync goes on, on average."""
    engines_filled: float
    """Sequences that an engine runs, as a share of those that it could, on average; of none during a sync."""
    staleness: float
    """Syncs, mean over tokens."""
    staleness_max: float
    calls_filled: float
    """Calls of environments that run, as a share of those that may (`environment.workers`, and no more than
    `environment.slots`), on average. A step takes at least this share of its seconds for them, whatever the GPUs do."""


def simulate(config: Config, rates: Rates, workload: Workload, *, steps: int, seed: int = 0) -> Outcome:
    """So many steps, after as many as it takes to be in full swing.

    Args:
        config: `asynchrony` and `data` are read.
        rates: How long things take.
        workload: What trajectories are like.
        steps: That are measured.
        seed: Draws them, but for recorded ones: in every mode the same ones.
    """
    whole = config
    config, rates = smaller(_alone(config), rates)
    bounds = Bounds.of(whole.environment, whole.data.prompts_per_step / config.data.prompts_per_step)
    grain = grain_of(workload)
    before = _before(config.asynchrony)
    first = max(FIRST, before + 1)
    with VirtualLoop(tick_s=_tick(config, rates, workload)) as loop:
        fleet = SimulatedFleet(loop.loop, rates.engines, _counted_by(grain, rates.speed))
        calls = Calls(bounds.calls, loop.loop)
        players = _Players(fleet, workload, config.data, seed, grain, calls)
        players.slots = bounds.slots
        service = RolloutService(players, config.rollout.sampling, loop)
        size = config.data.prompts_per_step
        prompts = [Prompt(i, [], "simulated", {}) for i in range(size)]
        stream = PromptStream(size, batch=size, epochs=10**6, shuffle=False)
        rollouts = Asynchronous(config, prompts, stream, service, look=lambda: None, refill=lambda: None)
        begun, waited, stale = (0.0, 0.0, 0.0, 0.0), 0.0, list[Mapping[str, float]]()
        _synced(fleet, rollouts, first - before - 1)
        for number in range(first - before, first + steps):
            if number == first:
                begun, waited = (loop.now, *fleet.measured(), calls.measured()), 0.0
            step, start = Step(number, Console(StringIO())), loop.now
            groups = rollouts.next_groups(step)
            waited += loop.now - start
            tokens = grain * sum(len(t.tokens) for group in groups for t in group.trajectories)
            loop.sleep(rates.train_s * tokens)
            if config.asynchrony.mode == "one_step":
                start = loop.now
                while service.under_way:
                    rollouts.collect(1.0)
                waited += loop.now - start
            fleet.pause()
            loop.sleep(rates.sync_s)
            _synced(fleet, rollouts, number)
            stale += [step.metrics] * (number >= first)
        span, ended = loop.now - begun[0], (*fleet.measured(), calls.measured())
    of_engines = span * rates.engines
    return Outcome(
        seconds=span / steps,
        policy_waits=waited / span,
        engines_idle=(ended[0] - begun[1]) / of_engines,
        engines_filled=(ended[1] - begun[2]) / of_engines / rates.speed.places,
        staleness=sum(m["asynchrony/staleness_mean"] for m in stale) / steps,
        staleness_max=max(m["asynchrony/staleness_max"] for m in stale),
        calls_filled=min(1.0, (ended[2] - begun[3]) / span / bounds.at_once),  # a place may be taken into the next step
    )


def grain_of(workload: Workload) -> int:
    """Tokens that one of a simulated trajectory stands for."""
    length = workload.length
    return max(1, int(length.written / length.answers / FINEST))


def _tick(config: Config, rates: Rates, workload: Workload) -> float:
    """Seconds to which the clock is exact."""
    answer_s = rates.speed.seconds[-1] * workload.length.written / workload.length.answers
    return answer_s / TICKS * config.data.prompts_per_step * config.data.samples_per_prompt / MOST


def _counted_by(grain: int, speed: Speed) -> Speed:
    """An engine's, for tokens that stand for so many."""
    return Speed(tuple(s * grain for s in speed.seconds), speed.prefill_s * grain, speed.cache_tokens / grain)


def _synced(fleet: SimulatedFleet, rollouts: Asynchronous, version: int) -> None:
    fleet.resume(version)
    rollouts.synced(version)


def _before(asynchrony: AsynchronyConfig) -> int:
    """Steps until a run is in full swing."""
    return asynchrony.max_staleness + (2 if asynchrony.mode == "full" else asynchrony.mode == "one_step")


def _alone(config: Config) -> Config:
    """A copy in which `off` is `full` without staleness, which is the same, and every group has a signal."""
    asynchrony, algorithm = config.asynchrony, config.algorithm
    most = 0 if asynchrony.mode == "off" else asynchrony.max_staleness
    return replace(
        config,
        run=replace(config.run, steps=None),
        asynchrony=AsynchronyConfig(asynchrony.mode, most),
        algorithm=replace(algorithm, dynamic_sampling=replace(algorithm.dynamic_sampling, enabled=False)),
    )


class _Players:
    """In the place of a generator."""

    slots: Places | None = None
    """For trajectories; None has no bound."""

    def __init__(self, fleet: Any, workload: Workload, data: DataConfig, seed: int, grain: int, calls: Calls) -> None:
        self.fleet, self.workload, self.data, self.seed = fleet, workload, data, seed
        self.grain, self.calls = grain, calls
        self.rollout = RolloutConfig()

    def agent(self, sampling: Any, router: type[Router] | None = None) -> Any:
        """One for all trajectories."""
        engine = self.fleet.engines[0]
        made = (router or Router)(self.fleet, Sampling(), engine.speed.places, 1e9)
        player: Any = _Player(made, self.workload, self.data, self.seed, self.grain, engine.loop.tick_s)
        player.calls = self.calls
        return player if self.slots is None else HeldSlots(LocalPlayer(player), self.slots)


@dataclass(frozen=True)
class _Opened:
    prompt: Prompt
    sample: int


class Whole:
    """Counts in units, so that nothing short is favoured: what is left over is of the next part, and the first one
    begins anywhere within a unit.

    Args:
        unit: What is counted by.
        random: Draws where it begins.
    """

    def __init__(self, unit: float, random: Random) -> None:
        self.unit = unit
        self.over = 0.0 if unit == 1 else random.random()

    def units(self, of: float) -> int:
        """Of the next part."""
        self.over += of / self.unit
        whole = int(self.over)
        self.over -= whole
        return whole


class _Player:
    """An agent that knows how long everything takes."""

    calls: Calls
    """Of environments."""

    def __init__(
        self, router: Router, workload: Workload, data: DataConfig, seed: int, grain: int, tick: float
    ) -> None:
        self.router, self.workload, self.data, self.seed = router, workload, data, seed
        self.grain, self.tick = grain, tick

    def group(self, name: str) -> int:
        """A group's place among all of the run; its samples have names that say the step and their place in it."""
        _, step, _, place = map(int, name.split("/"))
        return step * self.data.prompts_per_step + place // self.data.samples_per_prompt

    async def open(self, prompt: Prompt, sample: int) -> _Opened:
        """At once."""
        return _Opened(prompt, sample)

    async def close(self, opened: _Opened) -> None:
        """At once."""

    async def play(self, opened: _Opened, name: str) -> Trajectory:
        """All turns."""
        t = Trajectory(
            opened.prompt,
            opened.sample,
            tokens=array("b"),
            mask=array("b"),
            logprobs=array("f"),
            prompt_length=0,
            reward=0.0,
            status=Status.COMPLETED,
            turns=0,
        )
        random, tick, start, asleep = Random(f"{self.seed}/{name}"), self.tick, self.calls.loop.time(), 0.0
        turns = self.workload.draw(random, self.group(name), opened.sample)
        read, written, waited = Whole(self.grain, random), Whole(self.grain, random), Whole(tick, random)
        for turn in turns:
            _grow(t, read.units(turn.read), 0)
            if count := written.units(turn.written):
                request = Request(f"{name}/{t.turns}", range(len(t.tokens)), count, seed=0)
                completion = await self.router.generate(request)
                t.versions += [(version, len(t.tokens) + at) for version, at in completion.versions]
                _grow(t, count, 1)
            t.turns += 1
            if ticks := waited.units(turn.env_s):
                asleep += await self.calls.take(ticks * tick)
        t.seconds[OWN] = self.calls.loop.time() - start - asleep
        return t


def _grow(t: Trajectory, count: int, mask: int) -> None:
    t.tokens.frombytes(bytes(count))
    t.mask.frombytes(bytes([mask]) * count)
