"""A run in virtual time: the real service, router and admission, with engines, tools and a policy that only take time.

How long these take is the planner's estimate (`planner.times`) and a workload; what waits for what, and for how long,
is found by the code that runs.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from io import StringIO
from random import Random
from typing import Any

from skyrl_mega.config.schema import AsynchronyConfig, Config, RolloutConfig
from skyrl_mega.data.order import PromptStream
from skyrl_mega.engines.base import Facts, Request, Sampling
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.memory import engine_memory
from skyrl_mega.planner.times import at_once, decoding, prefill_time, step_time
from skyrl_mega.rollout.router import Router
from skyrl_mega.rollout.service import RolloutService
from skyrl_mega.rollout.trajectory import Status, Trajectory
from skyrl_mega.simulation.engines import GRAIN, SimulatedFleet
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.simulation.workload import Workload
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.asynchronous import Asynchronous
from skyrl_mega.trainer.step import Step

MOST = 512
"""Trajectories of a step that are simulated each for itself."""


@dataclass(frozen=True)
class Rates:
    """How long things take."""

    engines: int
    seconds: tuple[float, ...]
    """Of one token of each sequence, by how many an engine runs, from 0 on; as many as it can at once."""
    prefill_s: float
    """For one token that an engine reads."""
    train_s: float
    """All that the policy does in a step, for each token of its batch."""
    sync_s: float
    cache_tokens: int
    """Of an engine."""

    @classmethod
    def planned(cls, config: Config, d: Decoder, parallel: ParallelDims) -> Rates:
        """As the planner estimates them."""
        made, memory = batch(config, parallel), engine_memory(config, d)
        found, decode = step_time(config, d, parallel), decoding(config, d, made.mean)
        places = at_once(config, memory.tokens, made)
        return cls(
            engines=config.rollout.engines,
            seconds=(0.0, *(decode(running) for running in range(1, places + 1))),
            prefill_s=prefill_time(config, d, made.mean),
            train_s=(found.logprobs + found.critic + found.train) / (made.sequences * made.mean),
            sync_s=found.sync,
            cache_tokens=memory.tokens,
        )


@dataclass(frozen=True)
class Outcome:
    """Of the steps that were measured."""

    seconds: float
    """Of a step."""
    policy_waits: float
    """Share of the time in which the policy has nothing to do, 0 to 1; a sync counts as work."""
    engines_idle: float
    """Share of the time in which an engine runs nothing, on average."""
    engines_filled: float
    """Sequences that an engine runs, as a share of those that it could, on average."""
    staleness: float
    """Syncs, mean over tokens."""
    staleness_max: float


def simulate(config: Config, rates: Rates, workload: Workload, *, steps: int, seed: int = 0) -> Outcome:
    """So many steps, after as many as it takes to be in full swing.

    Args:
        config: `asynchrony` and `data` are read.
        rates: How long things take.
        workload: What trajectories are like.
        steps: That are measured.
        seed: Draws them.
    """
    config, rates = smaller(_alone(config), rates)
    first = config.asynchrony.max_staleness + 2
    with VirtualLoop() as loop:
        facts = Facts(rates.cache_tokens // GRAIN, 0)  # as its tokens are counted
        fleet = SimulatedFleet(loop.loop, rates.engines, rates.seconds, rates.prefill_s, facts)
        config.run.steps = None
        service = RolloutService(_Players(fleet, workload, seed, len(rates.seconds) - 1), config.rollout.sampling, loop)
        size = config.data.prompts_per_step
        prompts = [Prompt(i, [], "simulated", {}) for i in range(size)]
        stream = PromptStream(size, batch=size, epochs=10**6, shuffle=False)
        rollouts = Asynchronous(config, prompts, stream, service, look=lambda: None, refill=lambda: None)
        rollouts.synced(0)
        begun, waited, stale = (0.0, 0.0, 0.0), 0.0, list[Mapping[str, float]]()
        for number in range(1, first + steps + 1):
            if number == first + 1:
                begun, waited = (loop.now, *fleet.measured()), 0.0
            step, start = Step(number, Console(StringIO())), loop.now
            groups = rollouts.next_groups(step)
            waited += loop.now - start
            tokens = GRAIN * sum(len(t.tokens) for group in groups for t in group.trajectories)
            loop.sleep(rates.train_s * tokens)
            if config.asynchrony.mode == "one_step":
                start = loop.now
                while service.under_way:
                    rollouts.collect(1.0)
                waited += loop.now - start
            fleet.pause()
            loop.sleep(rates.sync_s)
            fleet.resume(number)
            rollouts.synced(number)
            stale += [step.metrics] * (number > first)
        span, ended = loop.now - begun[0], fleet.measured()
    whole = span * rates.engines
    return Outcome(
        seconds=span / steps,
        policy_waits=waited / span,
        engines_idle=1 - (ended[0] - begun[1]) / whole,
        engines_filled=(ended[1] - begun[2]) / whole / (len(rates.seconds) - 1),
        staleness=sum(m["asynchrony/staleness_mean"] for m in stale) / steps,
        staleness_max=max(m["asynchrony/staleness_max"] for m in stale),
    )


def smaller(config: Config, rates: Rates) -> tuple[Config, Rates]:
    """A step of `MOST` trajectories at most, each of which stands for several, on engines that stand for several."""
    data = config.data
    factor = max(1, data.prompts_per_step * data.samples_per_prompt // MOST)
    engines = max(n for n in range(1, min(factor, rates.engines) + 1) if rates.engines % n == 0)
    each = factor / engines
    places = max(1, round((len(rates.seconds) - 1) / each))
    last = len(rates.seconds) - 1
    prompts = max(1, round(data.prompts_per_step / factor))
    return replace(config, data=replace(data, prompts_per_step=prompts)), Rates(
        engines=rates.engines // engines,
        seconds=(0.0, *(rates.seconds[max(1, min(last, round(n * each)))] for n in range(1, places + 1))),
        prefill_s=rates.prefill_s * each,
        train_s=rates.train_s * data.prompts_per_step / prompts,
        sync_s=rates.sync_s,
        cache_tokens=int(rates.cache_tokens / each),
    )


def with_mode(config: Config, mode: str, staleness: int) -> Config:
    """The same settings in another mode."""
    return replace(config, asynchrony=AsynchronyConfig(mode, staleness))


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

    def __init__(self, fleet: Any, workload: Workload, seed: int, concurrency: int) -> None:
        self.fleet, self.workload, self.seed, self.concurrency = fleet, workload, seed, concurrency
        self.rollout = RolloutConfig()

    def agent(self, sampling: Any, router: type[Router] | None = None) -> Any:
        """One for all trajectories."""
        made = (router or Router)(self.fleet, Sampling(), self.concurrency, 1e9)
        return _Player(made, self.workload, self.seed)


@dataclass(frozen=True)
class _Opened:
    prompt: Prompt
    sample: int


class _Player:
    """An agent that knows how long everything takes."""

    def __init__(self, router: Router, workload: Workload, seed: int) -> None:
        self.router, self.workload, self.seed = router, workload, seed

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
            tokens=array("i"),
            mask=array("b"),
            logprobs=array("f"),
            prompt_length=0,
            reward=0.0,
            status=Status.COMPLETED,
            turns=0,
        )
        for turn in self.workload.draw(Random(f"{self.seed}/{name}")):
            _grow(t, -(-turn.read // GRAIN), 0)
            count = max(1, round(turn.written / GRAIN))
            # What is new to the engine is in `routes_from`, of which a simulated engine makes nothing else.
            request = Request(f"{name}/{t.turns}", t.tokens, count, seed=0, routes_from=turn.read)
            completion = await self.router.generate(request)
            t.versions += [(version, len(t.tokens) + at) for version, at in completion.versions]
            _grow(t, count, 1)
            t.turns += 1
            if turn.env_s:
                await asyncio.sleep(turn.env_s)
        return t


def _grow(t: Trajectory, count: int, mask: int) -> None:
    t.tokens.extend([0] * count)
    t.mask.extend([mask] * count)


def values(outcome: Outcome) -> dict[str, float]:
    """As plain values."""
    return asdict(outcome)
