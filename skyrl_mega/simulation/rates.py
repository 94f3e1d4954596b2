"""How long things take in a run that is simulated: as the planner estimates them, and for fewer trajectories."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.memory import engine_memory
from skyrl_mega.planner.times import decoding, mean_concurrency, policy_times, prefill_time, step_time
from skyrl_mega.simulation.engines import Speed
from skyrl_mega.simulation.workload import Length

MOST = 512
"""Trajectories of a step that are simulated each for itself."""


@dataclass(frozen=True)
class Rates:
    """How long things take."""

    engines: int
    speed: Speed
    """Of an engine."""
    train_s: float
    """All that the policy does in a step, for each token of its batch."""
    sync_s: float
    """Also of what moves between a GPU and host memory (`residency.keep`)."""

    @classmethod
    def planned(cls, config: Config, d: Decoder, parallel: ParallelDims, length: Length) -> Rates:
        """As the planner estimates them, for trajectories of this mean length in place of `cluster.rates`'."""
        at = _of_length(config, parallel, length)
        made, memory = replace(batch(at, parallel), generated=length.written), engine_memory(at, d)
        found, decode = step_time(at, d, parallel), decoding(at, d, made.mean)
        places = mean_concurrency(at, memory.tokens, replace(made, prompts=made.prompts * steps_under_way(config)))
        return cls(
            engines=config.rollout.engines,
            speed=Speed(
                seconds=(0.0, *(decode(running) for running in range(1, places + 1))),
                prefill_s=prefill_time(at, d, made.mean),
                cache_tokens=memory.tokens,
            ),
            train_s=(sum(policy_times(at, d, parallel, made)) + found.critic) / (made.sequences * made.mean),
            sync_s=found.sync + found.residency,
        )


def steps_under_way(config: Config) -> int:
    """Steps whose groups may be played at the same time."""
    return config.asynchrony.max_staleness + 1 if config.asynchrony.mode == "full" else 1


def _of_length(config: Config, parallel: ParallelDims, length: Length) -> Config:
    """The settings with another mean length of a trajectory."""
    rates = config.cluster.rates
    share = rates.length_share * length.total / batch(config, parallel).mean
    return replace(config, cluster=replace(config.cluster, rates=replace(rates, length_share=share)))


def prompts_played(config: Config) -> int:
    """Prompts of a step that stand for all of its."""
    return min(config.data.prompts_per_step, max(1, MOST // config.data.samples_per_prompt))


def smaller(config: Config, rates: Rates) -> tuple[Config, Rates]:
    """A step of `MOST` trajectories at most, each of which stands for several, on engines that stand for several.

    An engine of which n sequences run writes and reads as many tokens a second as the real ones do for which it stands,
    while they run the sequences for which those n stand; and a step trains on as many.
    """
    data, prompts = config.data, prompts_played(config)
    factor = data.prompts_per_step / prompts
    merged = max(n for n in range(1, min(int(factor), rates.engines) + 1) if rates.engines % n == 0)
    each = factor / merged  # sequences of a real engine, where a simulated one has one
    speed = Speed(
        seconds=(0.0, *(_slower(rates.speed, n * each) for n in range(1, -int(-rates.speed.places // each) + 1))),
        prefill_s=rates.speed.prefill_s * each,
        cache_tokens=rates.speed.cache_tokens / each,
    )
    return (
        replace(config, data=replace(data, prompts_per_step=prompts)),
        Rates(rates.engines // merged, speed, rates.train_s * factor, rates.sync_s),
    )


def _slower(speed: Speed, running: float) -> float:
    """Seconds of one token of each of so many sequences, which take turns where there are more than places."""
    inside = min(running, speed.places)
    low = int(inside)
    part = inside - low
    seconds = speed.seconds[low] + (part * (speed.seconds[low + 1] - speed.seconds[low]) if part else 0.0)
    return seconds * running / inside
