"""Trajectories of a step, as a time estimate assumes them: tokens, seconds of environments, share of groups with a
signal."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skyrl_mega.config.schema import Config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.batch import StepSizes, batch
from skyrl_mega.planner.dynamic import SIGNAL_SHARE


@dataclass(frozen=True)
class Trajectories:
    """The trajectories of a step for a time estimate: mean lengths, and a sample for the slowest trajectory."""

    read: float
    """Mean tokens of the prompt and of the environment."""
    written: float
    """Mean tokens of the policy."""
    sample: tuple[tuple[float, float], ...]
    """Tokens written and seconds in the environment of each trajectory of a typical step, at most a few hundred."""
    environment_s: float = 0.0
    """Mean seconds in the environment."""
    signal: float = SIGNAL_SHARE
    """Share of groups with different rewards, for dynamic sampling."""
    prompt: float | None = None
    """Mean tokens of a prompt; None if unknown."""

    @property
    def mean(self) -> float:
        """Mean tokens of a trajectory: `read` + `written`."""
        return self.read + self.written

    @property
    def longest(self) -> float:
        """Tokens of the policy in the longest trajectory of `sample`, at least the mean."""
        return max(self.written, *(tokens for tokens, _ in self.sample))

    def waiting(self, token_s: float) -> float:
        """Returns the delay in seconds of the slowest trajectory of `sample` by environments, with `token_s`
        seconds per token of the policy."""
        alone = max(tokens for tokens, _ in self.sample) * token_s
        return max(tokens * token_s + seconds for tokens, seconds in self.sample) - alone

    def scaled(self, factor: float, limit: float) -> Trajectories:
        """Returns new trajectories with all lengths multiplied by `factor`, `read` included, and at most `limit` tokens
        of the policy each; seconds of environments stay."""
        sample = tuple((min(limit, tokens * factor), seconds) for tokens, seconds in self.sample)
        prompt = None if self.prompt is None else self.prompt * factor
        written = min(limit, self.written * factor)
        return replace(self, read=self.read * factor, written=written, sample=sample, prompt=prompt)

    def with_slower_environments(self, factor: float) -> Trajectories:
        """Returns new trajectories with all seconds of environments multiplied by `factor`."""
        sample = tuple((tokens, seconds * factor) for tokens, seconds in self.sample)
        return replace(self, environment_s=self.environment_s * factor, sample=sample)


def assumed(config: Config, parallel: ParallelDims) -> Trajectories:
    """Returns assumed trajectories: mean length `cluster.rates.length_share` times the limits, longest response at the
    limit, environments that take no time. `parallel` is the policy's grid. Raises ValueError if `policy.micro_tokens`
    is not decided."""
    return of_batch(config, batch(config, parallel))


def of_batch(config: Config, sizes: StepSizes) -> Trajectories:
    """Returns assumed trajectories with the mean length in `sizes`, the longest response at the limit, and environments
    that take no time. `sizes` are the sizes of a step (`batch.batch`)."""
    longest = sizes.generated / config.cluster.rates.length_share
    return Trajectories(max(0.0, sizes.mean - sizes.generated), sizes.generated, ((longest, 0.0),))


def at_limit(config: Config, parallel: ParallelDims, like: Trajectories) -> Trajectories:
    """Returns new trajectories with every prompt and response at its limit, and environment seconds and `signal` of
    `like`. `parallel` is the policy's grid. Raises ValueError if `policy.micro_tokens` is not decided."""
    limits = assumed(_with_share(config, 1.0), parallel)
    sample = tuple((limits.written, seconds) for _, seconds in like.sample)
    return replace(like, read=limits.read, written=limits.written, sample=sample, prompt=None)


def with_lengths(config: Config, parallel: ParallelDims, mean: float) -> Config:
    """Returns the settings with the `cluster.rates.length_share` for which `batch` estimates sequences of `mean`
    tokens, prompt included. The share is not limited: above 1 if `mean` exceeds the limits. `parallel` is the policy's
    grid. Raises ValueError if `policy.micro_tokens` is not decided."""
    share = config.cluster.rates.length_share * mean / batch(config, parallel).mean
    return _with_share(config, share)


def sizes_of(config: Config, parallel: ParallelDims, trajectories: Trajectories) -> tuple[Config, StepSizes]:
    """Returns new settings with the mean length of these trajectories (`with_lengths`), and the sizes of a step with
    these trajectories: `generated` is `trajectories.written`. `parallel` is the policy's grid. Raises ValueError if
    `policy.micro_tokens` is not decided."""
    config = with_lengths(config, parallel, trajectories.mean)
    return config, replace(batch(config, parallel, trajectories.prompt), generated=trajectories.written)


def _with_share(config: Config, share: float) -> Config:
    cluster = config.cluster
    return replace(config, cluster=replace(cluster, rates=replace(cluster.rates, length_share=share)))
