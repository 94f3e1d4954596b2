"""A trajectory in progress."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import dataclass, field, replace

from skyrl_mega.rollout.agent.environment import Environment
from skyrl_mega.rollout.agent.routes import TurnRoutes
from skyrl_mega.rollout.agent.token_rewards import TokenRewards
from skyrl_mega.trajectories.trajectory import Trajectory


@dataclass
class Opened:
    """A trajectory in progress, with the environment."""

    trajectory: Trajectory
    env: Environment
    clock: float
    """`time.perf_counter()` at opening."""
    until: float | None = None
    """`time.perf_counter()` at the end of the time limit; set once the trajectory runs."""
    routes: TurnRoutes = field(default_factory=TurnRoutes)
    """Expert routes of the tokens, from engines with route output."""
    token_rewards: TokenRewards = field(default_factory=TokenRewards)
    """Rewards of parts of the answers, if the environment gives any."""

    @property
    def seconds(self) -> float:
        """Seconds since opening."""
        return time.perf_counter() - self.clock

    @property
    def left(self) -> float | None:
        """Seconds left of the trajectory's time limit, negative after the limit; None without a limit, or before the
        trajectory runs."""
        return None if self.until is None else self.until - time.perf_counter()

    def copied(self) -> Opened:
        """Returns a copy that shares nothing that changes, except the environment."""
        t = copy(self.trajectory)
        t.tokens, t.mask, t.logprobs = t.tokens[:], t.mask[:], t.logprobs[:]
        t.steps = [replace(step) for step in t.steps]
        t.versions, t.messages, t.tools = [*t.versions], [*t.messages], [*t.tools]
        t.rewards, t.metadata, t.seconds = {**t.rewards}, {**t.metadata}, {**t.seconds}
        return replace(self, trajectory=t, routes=self.routes.copied(), token_rewards=self.token_rewards.copied())
