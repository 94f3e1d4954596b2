"""Duration of a whole run: steps with evaluations and checkpoints, and an error bar.

The error bar is derived from stated uncertainties. Every uncertain input (a rate, an assumed length, an assumed share
of groups with a signal) is moved alone to either end of its interval, and the run's seconds are computed again. The
logarithms of the resulting factors are added in quadrature, because the inputs are independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from skyrl_mega.config.derived import evaluation_sampling
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.rates import Rate, with_scaled_rate
from skyrl_mega.planner.times import StepTime, rollout_times, step_time
from skyrl_mega.planner.trajectories import Trajectories, at_limit, sizes_of

USUAL_STEPS = 100
"""Number of steps of an estimate if neither `run.steps` nor the data tell the number."""
SHORT = 0.5
"""Lengths of the short column, as a share of the mean column's."""
FORMULAS = 1.2
"""Uncertainty of the formulas with exact rates: assumed. Dry run and simulation of the same trajectories differed by up
to 19 % (searchr1_30b, swe_30b, dapo, and DAPO of a dense model of 32B)."""
SIGNAL = (0.25, 1.0)
"""Ends of the interval of an assumed share of groups with a signal."""
SHOWN = 1.02
"""Smallest factor of an uncertain input that is listed; all inputs count."""


@dataclass(frozen=True)
class Counts:
    """Sizes of a run, from settings and data files."""

    steps: int | None
    """Number of RL steps; None if unknown."""
    evaluated: int
    """Trajectories of an evaluation."""
    checkpoint_bytes: int
    """Bytes of a checkpoint written by the busiest node."""


@dataclass(frozen=True)
class RunTime:
    """Seconds of the parts of a run."""

    step: StepTime
    """Seconds of a step."""
    steps: int
    """Number of steps."""
    evaluation: float
    """Seconds of an evaluation."""
    evaluations: int
    """Number of evaluations."""
    checkpoint: float
    """Seconds of writing a checkpoint."""
    checkpoints: int
    """Number of checkpoints."""

    @property
    def seconds(self) -> float:
        """Seconds of the run: all steps, evaluations and checkpoints."""
        return self.steps * self.step.step + self.evaluations * self.evaluation + self.checkpoints * self.checkpoint

    @property
    def values(self) -> dict[str, float]:
        """Name → seconds per step: the fields of `StepTime`, of which `ahead` is an overlap and no phase; `step`, the
        sum of the phases minus `ahead`; `evaluation` and `checkpoint`, the step's share of all evaluations and
        checkpoints; and `whole`, the sum of `step` and both shares.

        In a run of 0 steps both shares are the seconds of the whole run, and `whole` leaves out `step`."""
        steps = max(1, self.steps)
        return {
            **asdict(self.step),
            "step": self.step.step,
            "evaluation": self.evaluations * self.evaluation / steps,
            "checkpoint": self.checkpoints * self.checkpoint / steps,
            "whole": self.seconds / steps,
        }


@dataclass(frozen=True)
class Uncertainty:
    """Effect of an uncertain input on the run's seconds."""

    name: str
    """Name of the input: a setting, or words."""
    low: float
    """Factor of the run's seconds at the favourable end of the input, at most 1."""
    high: float
    """Factor at the other end, at least 1."""


@dataclass(frozen=True)
class ErrorBar:
    """Interval of a run's seconds as factors of the estimate, and the causes."""

    low: float
    """Factor at the lower end, at most 1."""
    high: float
    """Factor at the upper end, at least 1."""
    causes: tuple[Uncertainty, ...]
    """Uncertain inputs with an effect on the seconds by a factor of at least `SHOWN`."""


Sync = Callable[[Config], float]
"""Function from settings (with other links) to the seconds of a weight sync."""


@dataclass(frozen=True)
class Planned:
    """Everything that a duration depends on, apart from rates and trajectories."""

    decoder: Decoder
    """The model."""
    parallel: ParallelDims
    """The policy's grid."""
    sync: Sync
    """Function for the seconds of a weight sync."""
    counts: Counts
    """Steps, evaluated trajectories and checkpoint bytes of the run."""

    def run_time(self, config: Config, trajectories: Trajectories, *, is_assumed: bool = False) -> RunTime:
        """Estimates the seconds of a run, with `USUAL_STEPS` steps if the number of steps is unknown.

        Args:
            config: The settings, with `policy.micro_tokens` decided.
            trajectories: Lengths and environments.
            is_assumed: True if the lengths are assumed from the limits; `evaluation.max_tokens` then changes the
                lengths of an evaluation.

        Raises:
            UserError: The estimator of advantages or the files of drafts cannot be used, or a critic's layout does not
                fit its ranks.
        """
        steps = USUAL_STEPS if self.counts.steps is None else self.counts.steps
        rate = config.cluster.rates.disk_gb_s * 1e9
        return RunTime(
            step=step_time(config, self.decoder, self.parallel, self.sync(config), trajectories),
            steps=steps,
            evaluation=self._evaluation(config, trajectories, is_assumed),
            evaluations=evaluations(config, steps) if self.counts.evaluated else 0,
            checkpoint=self.counts.checkpoint_bytes / rate,
            checkpoints=-(-steps // config.checkpoint.every) if config.checkpoint.every else 0,
        )

    def _evaluation(self, config: Config, trajectories: Trajectories, is_assumed: bool) -> float:
        """Returns the seconds of an evaluation: one round of generation, environments included."""
        if not self.counts.evaluated:
            return 0.0
        if is_assumed:
            factor = evaluation_sampling(config).max_tokens / config.rollout.sampling.max_tokens
            sample = tuple((tokens * factor, seconds) for tokens, seconds in trajectories.sample)
            trajectories = replace(trajectories, written=trajectories.written * factor, sample=sample)
        config, sizes = sizes_of(config, self.parallel, trajectories)
        sizes = replace(sizes, samples=1, greedy=0)
        return sum(rollout_times(config, self.decoder, sizes, trajectories, [self.counts.evaluated]))


def evaluations(config: Config, steps: int) -> int:
    """Returns the number of evaluations of a run of `steps` steps: before the first step with `evaluation.before`,
    and, unless `evaluation.every` is 0, every `evaluation.every` steps and after the last step, which counts once. Does
    not look at the data: without evaluated rows a run has no evaluation."""
    every = config.evaluation.every
    return int(config.evaluation.before) + (-(-steps // every) if every else 0)


def columns(config: Config, parallel: ParallelDims, mean: Trajectories) -> dict[str, Trajectories]:
    """Returns the trajectories for the three columns of an estimate: `short` (half of the mean lengths), `mean`, and
    `limit` (every length at its limit). `parallel` is the policy's grid. Raises ValueError if `policy.micro_tokens` is
    not decided."""
    limit = at_limit(config, parallel, mean)
    return {"short": mean.scaled(SHORT, limit.written), "mean": mean, "limit": limit}


def error_bar(
    seconds: Callable[[Config, Trajectories], float],
    config: Config,
    mean: Trajectories,
    rates: Sequence[Rate],
    lengths: Sequence[Trajectories] = (),
    *,
    environments: Sequence[Trajectories] = (),
    signal: bool = False,
) -> ErrorBar:
    """Estimates the uncertainty of a run's seconds: moves each uncertain input alone to both ends of its interval, and
    adds the logarithms of the resulting factors in quadrature, with `FORMULAS` for the formulas themselves. If the
    estimate is 0 seconds, only `FORMULAS` is left.

    Args:
        seconds: Function from settings and trajectories to the seconds of the run.
        config: The settings with all rates, as from `rates.with_measured`.
        mean: The trajectories of the estimate.
        rates: Rates with their uncertainties; rates with the factor 1 or the value 0 are skipped.
        lengths: Shortest and longest trajectories, if the lengths are assumed; () leaves lengths out.
        environments: Trajectories with the fastest and the slowest environments, if these seconds are assumed; ()
            leaves environments out.
        signal: True if the share of groups with differing rewards is assumed and matters.
    """
    estimate = seconds(config, mean)
    moved: dict[str, list[float]] = {}
    if lengths:
        moved["lengths of the trajectories"] = [seconds(config, each) for each in lengths]
    if environments:
        moved["seconds of environments"] = [seconds(config, each) for each in environments]
    if signal:
        moved["share of groups with a signal"] = [seconds(config, replace(mean, signal=share)) for share in SIGNAL]
    for rate in rates:
        if rate.factor > 1 and rate.value:
            factors = (rate.factor, 1 / rate.factor)
            moved[rate.key] = [seconds(with_scaled_rate(config, rate, factor), mean) for factor in factors]
    if not estimate:  # a run without a step: no input changes the seconds
        moved.clear()
    causes = [
        Uncertainty(name, min(1.0, *(s / estimate for s in ends)), max(1.0, *(s / estimate for s in ends)))
        for name, ends in moved.items()
    ]
    causes.append(Uncertainty("formulas", 1 / FORMULAS, FORMULAS))
    return ErrorBar(
        low=math.exp(-math.hypot(*(math.log(cause.low) for cause in causes))),
        high=math.exp(math.hypot(*(math.log(cause.high) for cause in causes))),
        causes=tuple(cause for cause in causes if max(cause.high, 1 / cause.low) >= SHOWN),
    )
