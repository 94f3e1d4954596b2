"""What trajectories are like: how many turns, how many tokens in each, how long the environment takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import NamedTuple

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.terminal import one_line, printable
from skyrl_mega.rollout import trajectory_io
from skyrl_mega.rollout.trajectory import Kind, Step
from skyrl_mega.telemetry.run_dir import by_step

LONGEST = 40
"""Characters of an option that an error shows."""
HIGHEST_SIGMA = 3.0
"""With it the largest of a thousand values is a hundred times the mean."""


class Turn(NamedTuple):
    """One answer of the policy."""

    read: int
    """Tokens that are new to the engine before it."""
    written: int
    env_s: float
    """Seconds of the environment after it."""


class Length(NamedTuple):
    """Of a trajectory, on average."""

    read: float
    """Tokens of the prompt and of the environment."""
    written: float
    """Tokens of the policy."""
    answers: float
    """Turns in which it writes."""

    @property
    def total(self) -> float:
        """Tokens."""
        return self.read + self.written


@dataclass(frozen=True)
class LogNormal:
    """A long-tailed distribution.

    Args:
        mean: Of the values themselves, not of their logarithms.
        sigma: Standard deviation of the natural logarithm. 0: always the mean; 1: one in a hundred is six times as
            large.
    """

    mean: float
    sigma: float

    def draw(self, random: Random) -> float:
        """A value."""
        if not self.mean:
            return 0.0
        return random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)

    def mean_up_to(self, most: float) -> float:
        """The mean of values of which those above `most` count as that."""
        if not self.mean or not self.sigma:
            return min(self.mean, most)
        z = math.log(most / self.mean) / self.sigma
        below, above = NormalDist().cdf(z - self.sigma / 2), NormalDist().cdf(-z - self.sigma / 2)
        return self.mean * below + most * above

    @classmethod
    def parsed(cls, text: str, option: str, lowest: float, highest: float, key: str = "") -> LogNormal:
        """From `MEAN` or `MEAN,SIGMA`.

        Args:
            text: That.
            option: Its name, for the error.
            lowest, highest: Means that are allowed.
            key: Setting that the highest comes from.

        Raises:
            UserError: It is something else.
        """
        try:
            mean, sigma = (float(part) for part in [*text.split(","), "0"][:2])
        except ValueError:
            mean = sigma = math.nan
        if text.count(",") > 1 or not (lowest <= mean <= highest and 0 <= sigma <= HIGHEST_SIGMA):
            given = printable(text[:LONGEST]) or "''"
            raise UserError(
                f"{option} {given}: allowed is MEAN,SIGMA with a MEAN of {lowest:g} to {highest:g}"
                f"{f' ({key})' if key else ''} and a SIGMA of 0 to {HIGHEST_SIGMA:g}"
            )
        return cls(mean, sigma)


@dataclass(frozen=True)
class Drawn:
    """Trajectories of so many turns, whose tokens and seconds are drawn each for itself."""

    prompt: int
    tokens: LogNormal
    """Written in all turns."""
    environment: LogNormal
    """Seconds of one turn."""
    turns: int
    most: int
    """Tokens that a trajectory may write."""
    longest_s: float = math.inf
    """Seconds after which a turn of the environment is ended."""

    def draw(self, random: Random, group: int, sample: int) -> list[Turn]:
        """A sample of a group, which says nothing of the others."""
        written = max(self.turns, min(self.most, round(self.tokens.draw(random))))
        each = [written // self.turns] * self.turns
        each[-1] += written % self.turns
        return [
            Turn(self.prompt if n == 0 else 0, count, min(self.longest_s, self.environment.draw(random)))
            for n, count in enumerate(each)
        ]

    @property
    def length(self) -> Length:
        """On average."""
        return Length(self.prompt, max(self.turns, self.tokens.mean_up_to(self.most)), self.turns)

    @property
    def environment_s(self) -> float:
        """Seconds of the environment in a trajectory, on average."""
        return self.turns * self.environment.mean_up_to(self.longest_s)


@dataclass(frozen=True)
class Recorded:
    """Trajectories as a run has had them, group by group: those of a hard prompt are all long, and a step waits for
    the longest."""

    groups: Sequence[Sequence[list[Turn]]]

    def draw(self, random: Random, group: int, sample: int) -> list[Turn]:
        """A sample of a group. All groups come before one comes again."""
        found = self.groups[group % len(self.groups)]
        again = group // len(self.groups)  # a group of more samples has others to say then
        return found[(sample + again) % len(found)]

    @property
    def played(self) -> list[list[Turn]]:
        """All trajectories."""
        return [turns for group in self.groups for turns in group]

    @property
    def length(self) -> Length:
        """On average."""
        turns = [turn for played in self.played for turn in played]
        sums = sum(turn.read for turn in turns), sum(turn.written for turn in turns), len(turns)
        return Length(*(value / len(self.played) for value in sums))

    @property
    def environment_s(self) -> float:
        """Seconds of the environment in a trajectory, on average."""
        return sum(turn.env_s for played in self.played for turn in played) / len(self.played)

    @classmethod
    def of_run(cls, folder: Path) -> Recorded:
        """Those that a run has written, of all its steps, in an order of their own.

        Raises:
            UserError: There are none, or a file is of something else.
        """
        found = []
        for file in by_step(folder / "trajectories", ".parquet").values():
            try:
                played = trajectory_io.read_steps(file)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"--like {folder}: {file.name} has no trajectories that can be read ({one_line(str(error))}); take "
                    "it out of the folder, or give another run's"
                ) from error
            for group in played:
                if answered := [turns for turns in map(turns_of, group) if turns]:
                    found.append(answered)
        if not found:
            raise UserError(
                f"--like {folder}: there are no trajectories; give a run's folder, of a run with "
                "telemetry.trajectories_every=1"
            )
        Random(0).shuffle(found)  # a few steps are then of the whole run
        return cls(found)


Workload = Drawn | Recorded


def turns_of(steps: Sequence[Step]) -> list[Turn]:
    """A trajectory's answers."""
    turns, read = [], 0
    for step in steps:
        if step.kind is Kind.RESPONSE:
            turns.append(Turn(read, step.end - step.start, step.env_s))
            read = 0
        else:
            read += step.end - step.start
    return [turn for turn in turns if turn.written]
