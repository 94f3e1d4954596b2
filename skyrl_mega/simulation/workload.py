"""Distributions of trajectories: number of turns, tokens of each turn, and seconds in the environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.terminal import one_line, printable
from skyrl_mega.telemetry.run_dir import by_step
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Kind, TrajectoryStep

SHOWN_CHARS = 40
"""Characters of an option shown in an error."""
MAX_SIGMA = 3.0
"""Largest allowed sigma: the largest of a thousand values is then a hundred times the mean."""


class Turn(NamedTuple):
    """An answer of the policy, with the tokens before it and the seconds after it."""

    read: int
    """Tokens before the answer that are new to the engine."""
    written: int
    """Tokens of the answer."""
    env_s: float
    """Seconds in the environment after the answer."""


class Length(NamedTuple):
    """Averages per trajectory: tokens read, tokens written, and turns."""

    read: float
    """Tokens of the prompt and of the environment."""
    written: float
    """Tokens of the policy."""
    answers: float
    """Turns with text of the policy."""

    @property
    def total(self) -> float:
        """Tokens in total: read + written."""
        return self.read + self.written


@dataclass(frozen=True)
class LogNormal:
    """A long-tailed distribution.

    Args:
        mean: Mean of the values themselves, not of the logarithms.
        sigma: Standard deviation of the natural logarithm. 0: always the mean; 1: a value in a hundred is six times the
            mean.
    """

    mean: float
    sigma: float

    def sample(self, random: Random) -> float:
        """Returns a random value of the distribution; 0 if the mean is 0."""
        if not self.mean:
            return 0.0
        return random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)

    def capped_mean(self, most: float) -> float:
        """Returns the exact mean of min(value, most) over the distribution. `most` is above 0 and finite."""
        if not self.mean or not self.sigma:
            return min(self.mean, most)
        z = math.log(most / self.mean) / self.sigma
        below, above = NormalDist().cdf(z - self.sigma / 2), NormalDist().cdf(-z - self.sigma / 2)
        return self.mean * below + most * above

    @classmethod
    def parsed(cls, text: str, option: str, lowest: float, highest: float, key: str = "") -> LogNormal:
        """Returns the distribution that a text `MEAN` or `MEAN,SIGMA` describes.

        Args:
            text: The text; without SIGMA, sigma is 0.
            option: Name of the option, for the error.
            lowest, highest: Bounds of the mean, both allowed.
            key: Setting that gives the upper bound, for the error; empty without any.

        Raises:
            UserError: The text is malformed or out of bounds.
        """
        try:
            mean, sigma = (float(part) for part in [*text.split(","), "0"][:2])
        except ValueError:
            mean = sigma = math.nan
        if text.count(",") > 1 or not (lowest <= mean <= highest and 0 <= sigma <= MAX_SIGMA):
            given = printable(text[:SHOWN_CHARS]) or "''"
            raise UserError(
                f"{option} {given}: allowed is MEAN,SIGMA with a MEAN of {lowest:g} to {highest:g}"
                f"{f' ({key})' if key else ''} and a SIGMA of 0 to {MAX_SIGMA:g}, the spread of the "
                "logarithm (without SIGMA: always MEAN)"
            )
        return cls(mean, sigma)


@dataclass(frozen=True)
class Synthetic:
    """Trajectories with a fixed number of turns and independent random lengths and durations."""

    prompt: int
    """Tokens of the prompt."""
    tokens: LogNormal
    """Tokens written in all turns together."""
    environment: LogNormal
    """Seconds in the environment per turn."""
    turns: int
    """Number of answers of a trajectory."""
    max_tokens: int
    """Limit on the tokens written in a trajectory."""
    max_env_s: float = math.inf
    """Time limit of an environment turn, in seconds."""
    start: LogNormal = LogNormal(0, 0)
    """Seconds in the environment before the first turn."""
    end: LogNormal = LogNormal(0, 0)
    """Seconds in the environment after the last turn, in addition to `environment`."""

    def sample_turns(self, random: Random, group: int, sample: int) -> list[Turn]:
        """Returns the turns of a random trajectory; `group` and `sample` have no effect.

        The written tokens are shared equally by the turns, the remainder goes to the last. Each turn has at least one,
        even beyond `max_tokens`. Only the first turn reads tokens: the prompt. A turn without tokens before the first
        stands for the start of the environment, if the start takes time.
        """
        written = max(self.turns, min(self.max_tokens, round(self.tokens.sample(random))))
        each = [written // self.turns] * self.turns
        each[-1] += written % self.turns
        turns = [
            Turn(self.prompt if n == 0 else 0, count, min(self.max_env_s, self.environment.sample(random)))
            for n, count in enumerate(each)
        ]
        if self.end.mean:
            ended = turns[-1].env_s + min(self.max_env_s, self.end.sample(random))
            turns[-1] = turns[-1]._replace(env_s=ended)
        if self.start.mean:
            turns.insert(0, Turn(0, 0, min(self.max_env_s, self.start.sample(random))))
        return turns

    @property
    def length(self) -> Length:
        """Average tokens read, tokens written and answers of a trajectory."""
        return Length(self.prompt, max(self.turns, self.tokens.capped_mean(self.max_tokens)), self.turns)

    @property
    def environment_s(self) -> float:
        """Average seconds in the environment per trajectory: start, turns and end, each capped at `max_env_s`."""
        ends = self.start.capped_mean(self.max_env_s) + self.end.capped_mean(self.max_env_s)
        return ends + self.turns * self.environment.capped_mean(self.max_env_s)


@dataclass(frozen=True)
class Recorded:
    """Recorded trajectories of a run, by group: samples of a hard prompt are all long, and a step waits for the
    longest."""

    groups: Sequence[Sequence[list[Turn]]]
    """Turns by group and sample."""

    def sample_turns(self, random: Random, group: int, sample: int) -> list[Turn]:
        """Returns the recorded turns of a sample of a group; `random` has no effect.

        Groups repeat only after all were used, and samples after all of the group were used.
        """
        samples = self.groups[group % len(self.groups)]
        repetition = group // len(self.groups)  # a repeated group starts with another sample
        return samples[(sample + repetition) % len(samples)]

    @property
    def trajectories(self) -> list[list[Turn]]:
        """All trajectories, group by group."""
        return [turns for group in self.groups for turns in group]

    @property
    def length(self) -> Length:
        """Average tokens read, tokens written and answers of a recorded trajectory."""
        turns = [turn for trajectory in self.trajectories for turn in trajectory]
        sums = sum(turn.read for turn in turns), sum(turn.written for turn in turns), len(turns)
        return Length(*(value / len(self.trajectories) for value in sums))

    @property
    def prompt(self) -> float:
        """Average tokens read before the first answer."""
        return sum(trajectory[0].read for trajectory in self.trajectories) / len(self.trajectories)

    @property
    def environment_s(self) -> float:
        """Average seconds in the environment per trajectory."""
        return sum(turn.env_s for trajectory in self.trajectories for turn in trajectory) / len(self.trajectories)

    @classmethod
    def of_run(cls, folder: Path) -> Recorded:
        """Returns the recorded trajectories of all steps of a run. The order of groups is random but fixed.
        Trajectories without an answer are left out.

        Args:
            folder: Folder of the run, the user's `--like` in errors.

        Raises:
            UserError: A file is unreadable, or there are no trajectories with an answer, as in a missing folder.
        """
        groups = []
        for file in by_step(folder / "trajectories", ".parquet").values():
            try:
                trajectories = parquet.read_steps(file)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"the trajectories in {file.name} cannot be read ({one_line(str(error))})",
                    key="--like",
                    value=folder,
                    fix="remove this file from the folder, or give the folder of another run",
                ) from error
            for group in trajectories:
                if answered := [turns for turns in map(turns_of, group) if turns]:
                    groups.append(answered)
        if not groups:
            raise UserError(
                "there are no trajectories",
                key="--like",
                value=folder,
                fix="give a run's folder, of a run with telemetry.trajectories_every=1",
            )
        Random(0).shuffle(groups)  # so that few simulated steps cover the whole run
        return cls(groups)


Workload = Synthetic | Recorded
"""A distribution of trajectories."""


def turns_of(steps: Sequence[TrajectoryStep]) -> list[Turn]:
    """Returns the answers in a trajectory's steps as turns, without empty answers. [] if no answer has a token; tokens
    after the last answer are not counted."""
    turns, read = [], 0
    for step in steps:
        if step.kind is Kind.RESPONSE:
            turns.append(Turn(read, step.end - step.start, step.env_s))
            read = 0
        else:
            read += step.end - step.start
    return [turn for turn in turns if turn.written]
