"""Durations in a simulated run, taken from the planner's estimates and scaled to fewer trajectories."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skyrl_mega.config.derived import engine_count, engine_data
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.memory import engine_memory
from skyrl_mega.planner.times import decoding, mean_concurrency, policy_times, prefill_time, step_time
from skyrl_mega.planner.trajectories import with_lengths
from skyrl_mega.simulation.engines import Speed
from skyrl_mega.simulation.workload import Length

MAX_TRAJECTORIES = 512
"""Largest number of individually simulated trajectories per step."""


@dataclass(frozen=True)
class Rates:
    """Durations of a simulated run's parts: engines, training and weight syncs."""

    engines: int
    """Number of engines."""
    speed: Speed
    """Speed of an engine."""
    train_s: float
    """Seconds of all work of policy and driver in a step, per token of the batch."""
    sync_s: float
    """Seconds of a weight sync, including moves between GPU and host memory (`residency.keep`)."""
    other_s: float = 0.0
    """Seconds of the driver besides the phases of a step (`cluster.rates.step_s`); engines go on."""

    @classmethod
    def planned(cls, config: Config, model: Decoder, parallel: ParallelDims, length: Length) -> Rates:
        """Returns the planner's estimates for trajectories with the mean length `length`.

        `cluster.rates` applies as in a plan, except for the mean length from `cluster.rates.length_share`, which
        `length` replaces.

        Args:
            config: The settings, with `policy.micro_tokens` decided (else ValueError).
            model: The policy's model.
            parallel: The policy's layout.
            length: Mean tokens and turns of a trajectory.

        Raises:
            UserError: The files of a draft model or head (`rollout.drafts`) cannot be used.
        """
        scaled = with_lengths(config, parallel, length.total)
        step_batch, memory = replace(batch(scaled, parallel), generated=length.written), engine_memory(scaled, model)
        times, decode = step_time(scaled, model, parallel), decoding(scaled, model, step_batch.mean)
        places = mean_concurrency(
            scaled, memory, replace(step_batch, prompts=step_batch.prompts * steps_under_way(config))
        )
        return cls(
            engines=engine_count(config),
            speed=Speed(
                seconds=(0.0, *(decode(running) for running in range(1, places + 1))),
                prefill_s=prefill_time(scaled, model, step_batch.mean),
                cache_tokens=memory.tokens * engine_data(config.rollout),
            ),
            train_s=(sum(policy_times(scaled, model, parallel, step_batch)) + times.critic)
            / (step_batch.sequences * step_batch.mean)
            + config.cluster.rates.trajectory_us * 1e-6 / step_batch.mean,
            sync_s=times.sync + times.residency,
            other_s=times.other,
        )


def steps_under_way(config: Config) -> int:
    """Returns the number of steps whose groups are in progress at the same time.

    `asynchrony.max_staleness` + 1 with `asynchrony.mode=full`, else 1.
    """
    return config.asynchrony.max_staleness + 1 if config.asynchrony.mode == "full" else 1


def prompts_played(config: Config) -> int:
    """Returns the number of simulated prompts per step, which represent all prompts of a real step.

    At most as many as give `MAX_TRAJECTORIES` trajectories, but at least 1.
    """
    return min(config.data.prompts_per_step, max(1, MAX_TRAJECTORIES // config.data.samples_per_prompt))


def scale_down(config: Config, rates: Rates) -> tuple[Config, Rates]:
    """Returns settings and rates of a step with fewer prompts (`prompts_played`) on fewer engines, where each simulated
    trajectory and engine represents several.

    A simulated engine with n running sequences writes and reads at the total rate of the represented real engines with
    the represented sequences. The training time of a step stays the same. `environment` stays unscaled
    (`calls.Bounds.of`).
    """
    data, prompts = config.data, prompts_played(config)
    factor = data.prompts_per_step / prompts
    merged = max(n for n in range(1, min(int(factor), rates.engines) + 1) if rates.engines % n == 0)
    per_place = factor / merged  # real sequences per simulated sequence, on each real engine
    speed = Speed(
        seconds=(
            0.0,
            *(_slower(rates.speed, n * per_place) for n in range(1, -int(-rates.speed.places // per_place) + 1)),
        ),
        prefill_s=rates.speed.prefill_s * per_place,
        cache_tokens=rates.speed.cache_tokens / per_place,
    )
    return (
        replace(config, data=replace(data, prompts_per_step=prompts)),
        Rates(rates.engines // merged, speed, rates.train_s * factor, rates.sync_s, rates.other_s),
    )


def _slower(speed: Speed, running: float) -> float:
    """Returns the seconds per token of each of `running` sequences; sequences beyond the places take turns."""
    inside = min(running, speed.places)
    low = int(inside)
    part = inside - low
    seconds = speed.seconds[low] + (part * (speed.seconds[low + 1] - speed.seconds[low]) if part else 0.0)
    return seconds * running / inside
