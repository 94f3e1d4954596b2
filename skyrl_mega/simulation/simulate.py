"""Simulation of a run in virtual time: the real rollout service, router and admission, with simulated engines, tools
and policy.

Durations come from the planner's estimates (`simulation.rates`) and from a workload. The real code determines all
waiting.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import StringIO
from random import Random
from typing import Any

from skyrl_mega.config.schema import AsynchronyConfig, Config, DataConfig
from skyrl_mega.data.order import PromptStream
from skyrl_mega.engines.base import Request, Sampling
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.player import Player
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.rollout.service import RolloutService
from skyrl_mega.simulation.calls import OWN_SECONDS, Bounds, Calls, HeldSlots
from skyrl_mega.simulation.engines import SimulatedFleet, Speed
from skyrl_mega.simulation.rates import MAX_TRAJECTORIES, Rates, scale_down
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.simulation.workload import Workload
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.asynchronous import Asynchronous
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Status, Trajectory

FIRST_MEASURED = 9
"""First measured step, equal in all modes so that all get the same prompts. Most earlier steps are skipped; only enough
for a steady state are simulated."""
TICKS_PER_ANSWER = 16
"""Clock ticks in the time `MAX_TRAJECTORIES` trajectories write an answer; shorter with fewer trajectories."""
UNITS_PER_ANSWER = 256
"""Largest average number of units per answer; longer answers count tokens in larger units, for speed."""


@dataclass(frozen=True)
class Outcome:
    """Averages over the measured steps of a simulated run."""

    seconds: float
    """Seconds per step."""
    policy_waits: float
    """Share of time, 0 to 1, with an idle policy; a sync counts as work."""
    engines_idle: float
    """Average share of time with an engine without requests, outside of syncs."""
    engines_filled: float
    """Average number of running sequences per engine, as a share of the maximum; zero during a sync."""
    staleness: float
    """Mean staleness over tokens, in syncs."""
    staleness_max: float
    """Largest staleness of a token, in syncs."""
    calls_filled: float
    """Average number of running environment calls, as a share of the maximum (the smaller of `environment.workers` and
    `environment.slots`). A lower bound for the share of a step spent on calls, independent of GPUs."""


def simulate(config: Config, rates: Rates, workload: Workload, *, steps: int, seed: int = 0) -> Outcome:
    """Returns the averages of `steps` simulated steps in a steady state. Takes seconds, without any process or GPU.
    `run.steps` and dynamic sampling have no effect.

    Args:
        config: The settings, mainly `asynchrony`, `data` and `environment`.
        rates: Durations of the run's parts at full size; scaled down here (`scale_down`).
        workload: Distribution of trajectories.
        steps: Number of measured steps, at least 1.
        seed: Seed of the trajectories, unless recorded; the same in every mode.
    """
    full_config = config
    config, rates = scale_down(_normalized(config), rates)
    bounds = Bounds.of(full_config.environment, full_config.data.prompts_per_step / config.data.prompts_per_step)
    grain = grain_of(workload)
    warmup = _warmup_steps(config.asynchrony)
    first = max(FIRST_MEASURED, warmup + 1)
    with VirtualLoop(tick_s=_tick(config, rates, workload)) as loop:
        fleet = SimulatedFleet(loop.loop, rates.engines, _scaled_speed(grain, rates.speed))
        calls = Calls(bounds.calls, loop.loop)
        engines: Any = fleet
        router = Router(engines, Sampling(), rates.speed.places, 1e9, service=True)
        player: Player = _Player(router, workload, config.data, seed, grain, calls)
        if bounds.slots is not None:
            player = HeldSlots(player, bounds.slots)
        service = RolloutService(player, engines, loop, config.rollout.request_timeout_s)
        size = config.data.prompts_per_step
        prompts = [Prompt(i, [], "simulated", {}) for i in range(size)]
        stream = PromptStream(size, batch=size, epochs=10**6, shuffle=False)
        rollouts = Asynchronous(config, prompts, stream, service, look=lambda: None, refill=lambda: None)
        begun, waited, stale = (0.0, 0.0, 0.0, 0.0), 0.0, list[Mapping[str, float]]()
        _synced(fleet, rollouts, first - warmup - 1)
        for number in range(first - warmup, first + steps):
            if number == first:
                begun, waited = (loop.now, *fleet.measured(), calls.measured()), 0.0
            step, start = Step(number, Console(StringIO())), loop.now
            groups = rollouts.next_groups(step)
            waited += loop.now - start
            tokens = grain * sum(len(t.tokens) for group in groups for t in group.trajectories)
            loop.sleep(rates.train_s * tokens + rates.other_s)
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
        calls_filled=min(1.0, (ended[2] - begun[3]) / span / bounds.at_once),  # places may stay occupied longer
    )


def grain_of(workload: Workload) -> int:
    """Returns the number of real tokens represented by a simulated token, at least 1: answers have at most about
    `UNITS_PER_ANSWER` simulated tokens on average."""
    length = workload.length
    return max(1, int(length.written / length.answers / UNITS_PER_ANSWER))


def _tick(config: Config, rates: Rates, workload: Workload) -> float:
    """Returns the resolution of the clock in seconds."""
    answer_s = rates.speed.seconds[-1] * workload.length.written / workload.length.answers
    return (
        answer_s / TICKS_PER_ANSWER * config.data.prompts_per_step * config.data.samples_per_prompt / MAX_TRAJECTORIES
    )


def _scaled_speed(grain: int, speed: Speed) -> Speed:
    """Returns an engine's speed for tokens representing `grain` real tokens each."""
    return Speed(tuple(s * grain for s in speed.seconds), speed.prefill_s * grain, speed.cache_tokens / grain)


def _synced(fleet: SimulatedFleet, rollouts: Asynchronous, version: int) -> None:
    fleet.resume(version)
    rollouts.synced(version)


def _warmup_steps(asynchrony: AsynchronyConfig) -> int:
    """Returns the number of steps until a steady state."""
    return asynchrony.max_staleness + (2 if asynchrony.mode == "full" else asynchrony.mode == "one_step")


def _normalized(config: Config) -> Config:
    """Returns settings with `off` as `full` without staleness, an equivalent, and without dynamic sampling."""
    asynchrony, algorithm = config.asynchrony, config.algorithm
    max_staleness = 0 if asynchrony.mode == "off" else asynchrony.max_staleness
    return replace(
        config,
        run=replace(config.run, steps=None),
        asynchrony=AsynchronyConfig(asynchrony.mode, max_staleness),
        algorithm=replace(algorithm, dynamic_sampling=replace(algorithm.dynamic_sampling, enabled=False)),
    )


class UnitCounter:
    """Counter of amounts in whole units, without bias: each remainder goes to the next amount, and the first remainder
    is random.

    Args:
        unit: Size of a unit; with 1 the first remainder is 0.
        random: Source of the first remainder.
    """

    def __init__(self, unit: float, random: Random) -> None:
        self.unit = unit
        self.over = 0.0 if unit == 1 else random.random()

    def units(self, of: float) -> int:
        """Returns the number of whole units in the amount `of` plus the previous remainder; keeps the new remainder."""
        self.over += of / self.unit
        whole = int(self.over)
        self.over -= whole
        return whole


class _Player:
    """A player with known durations, whose environments open and close in no time."""

    def __init__(
        self, router: Router, workload: Workload, data: DataConfig, seed: int, grain: int, calls: Calls
    ) -> None:
        self.router, self.workload, self.data, self.seed = router, workload, data, seed
        self.grain, self.calls = grain, calls

    def group(self, name: str) -> int:
        """Returns the group's number within the run, from a sample's name with step and position."""
        _, step, _, place = map(int, name.split("/"))
        return step * self.data.prompts_per_step + place // self.data.samples_per_prompt

    async def play(self, prompt: Prompt, sample: int, name: str, start: Start | None = None) -> Trajectory:
        """Runs all turns of a trajectory."""
        t = Trajectory(
            prompt,
            sample,
            tokens=array("b"),
            mask=array("b"),
            logprobs=array("f"),
            prompt_length=0,
            reward=0.0,
            status=Status.COMPLETED,
            turns=0,
        )
        random, loop, waiting = Random(f"{self.seed}/{name}"), self.calls.loop, 0.0
        begun, tick = loop.time(), loop.tick_s
        turns = self.workload.sample_turns(random, self.group(name), sample)
        read, written, waited = (
            UnitCounter(self.grain, random),
            UnitCounter(self.grain, random),
            UnitCounter(tick, random),
        )
        for turn in turns:
            _grow(t, read.units(turn.read), 0)
            if count := written.units(turn.written):
                request = Request(f"{name}/{t.turns}", t.tokens, count, seed=0)
                completion = await self.router.generate(request)
                t.versions += [(version, len(t.tokens) + at) for version, at in completion.versions]
                _grow(t, count, 1)
            t.turns += 1
            if ticks := waited.units(turn.env_s):
                waiting += await self.calls.run(ticks * tick)
        t.seconds[OWN_SECONDS] = loop.time() - begun - waiting
        return t


def _grow(t: Trajectory, count: int, mask: int) -> None:
    t.tokens.frombytes(bytes(count))
    t.mask.frombytes(bytes([mask]) * count)
