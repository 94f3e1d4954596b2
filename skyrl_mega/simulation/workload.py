"""What trajectories are like: how many turns, how many tokens in each, how long the environment takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from skyrl_mega.config.errors import UserError
from skyrl_mega.rollout import trajectory_io
from skyrl_mega.rollout.trajectory import Kind, Trajectory


class Turn(NamedTuple):
    """One answer of the policy."""

    read: int
    """Tokens that are new to the engine before it."""
    written: int
    env_s: float
    """Seconds of the environment after it."""


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

    @classmethod
    def parsed(cls, text: str, option: str) -> LogNormal:
        """From `MEAN` or `MEAN,SIGMA`.

        Raises:
            UserError: It is something else.
        """
        try:
            mean, sigma = (float(part) for part in [*text.split(","), "0"][:2])
        except ValueError:
            mean = sigma = math.nan
        if text.count(",") > 1 or not (0 <= mean < math.inf and 0 <= sigma <= 10):
            raise UserError(f"{option} {text}: allowed is MEAN,SIGMA, such as 2000,1, with a SIGMA of 0 to 10")
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

    def draw(self, random: Random) -> list[Turn]:
        """One trajectory."""
        written = max(self.turns, min(self.most, round(self.tokens.draw(random))))
        each = [written // self.turns] * self.turns
        each[-1] += written % self.turns
        return [
            Turn(self.prompt if n == 0 else 0, count, self.environment.draw(random)) for n, count in enumerate(each)
        ]


@dataclass(frozen=True)
class Recorded:
    """Trajectories as a run has had them."""

    played: Sequence[list[Turn]]

    def draw(self, random: Random) -> list[Turn]:
        """One trajectory."""
        return random.choice(self.played)

    @classmethod
    def of_run(cls, folder: Path) -> Recorded:
        """Those that a run has written, of all its steps.

        Raises:
            UserError: There are none.
        """
        files = sorted((folder / "trajectories").glob("step_*.parquet"))
        found = [turns for file in files for t in trajectory_io.read(file) if (turns := turns_of(t))]
        if not found:
            raise UserError(
                f"--like {folder}: there are no trajectories; give a run's folder, of a run with "
                "telemetry.trajectories_every=1"
            )
        return cls(found)


Workload = Drawn | Recorded


def turns_of(t: Trajectory) -> list[Turn]:
    """A trajectory's answers."""
    turns, read = [], 0
    for step in t.steps:
        if step.kind is Kind.RESPONSE:
            turns.append(Turn(read, step.end - step.start, step.env_s))
            read = 0
        else:
            read += step.end - step.start
    return [turn for turn in turns if turn.written]
