"""Limits of a trajectory: tokens, turns and time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from skyrl_mega.config.derived import length_limit, response_limit
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.trajectories.trajectory import Trajectory


@dataclass(frozen=True)
class TrajectoryLimits:
    """Token, turn and time limits of a trajectory, and permissions of the environment."""

    turn: int
    """Most tokens of a turn of the policy."""
    response: int
    """Most tokens of responses and observations over all turns."""
    length: int
    """Most tokens of the whole sequence: the engine's longest."""
    turns: int
    """Most turns of the policy."""
    env_timeout_s: float
    """Time limit of a call of the environment, in seconds."""
    trajectory_timeout_s: float | None = None
    """Seconds from the first request; None sets no limit."""
    input: int | None = None
    """Most tokens of the context of any turn after the first; None sets no extra limit."""
    rewrites: bool = False
    """True if an environment may replace the conversation."""

    @classmethod
    def of(cls, rollout: RolloutConfig) -> TrajectoryLimits:
        """Returns the limits set by the configuration, with defaults filled in."""
        return cls(
            turn=rollout.sampling.max_tokens,
            response=response_limit(rollout),
            length=length_limit(rollout),
            turns=rollout.max_turns,
            env_timeout_s=rollout.env_timeout_s,
            trajectory_timeout_s=rollout.trajectory_timeout_s,
            input=rollout.max_input_tokens,
            rewrites=rollout.step_wise != "off",
        )

    def deadline(self) -> float | None:
        """Returns the end of a trajectory that begins now, on the clock of `time.perf_counter`; None: without limit."""
        return None if self.trajectory_timeout_s is None else time.perf_counter() + self.trajectory_timeout_s

    def room(self, t: Trajectory) -> int:
        """Returns the most tokens that the next turn of a trajectory may have under the limits of the turn, of all
        responses and of the whole sequence; below 1 if no turn is possible."""
        return min(self.turn, self.response - t.response_length, self.length - len(t.context))
