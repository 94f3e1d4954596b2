"""The routes of a trajectory's tokens (`models.routes`), gathered turn by turn.

An engine gives a request's routes but for its last token, which it did not read. Those of earlier turns are known when
the next one begins, so each turn brings the routes of what is new: the last turn's last token, what the environment
said, and what the policy said to it. A token keeps the route with which the next one was drawn, also where weights have
changed since and an engine has read it once more (R3, arXiv:2510.11370, replays what the sampler did).

Legend: T tokens of the trajectory, n of one turn, M MoE layers, K experts of a token.
"""

from __future__ import annotations

import numpy as np

from skyrl_mega.engines.base import Completion
from skyrl_mega.models.routes import COLUMN, WrongRoutes
from skyrl_mega.rollout.trajectory import Trajectory


class TurnRoutes:
    """The routes of one trajectory, as far as it is played. Stays empty with an engine that gives none."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.known = 0
        """Position in `Trajectory.tokens` up to which `parts` reach."""

    def first(self, t: Trajectory) -> int:
        """From where on in `t.context` routes are wanted: what comes before is known."""
        return max(0, self.known - (len(t.tokens) - len(t.context)))

    def add(self, t: Trajectory, completion: Completion) -> None:
        """Adds a turn's, whose tokens are not in the trajectory yet.

        Raises:
            WrongRoutes: They are of another number of tokens.
        """
        if completion.routes is None:
            return
        begins = len(t.tokens) - len(t.context) + self.first(t)
        end = len(t.tokens) + len(completion.tokens) - 1
        if len(completion.routes) != end - begins:
            raise WrongRoutes(
                f"request {completion.id}: routes of {len(completion.routes)} tokens for {end - begins} that are new "
                "to the engine"
            )
        if begins > self.known:  # the environment has put a new conversation in the place of the old one
            self.parts.append(_none(completion.routes, begins - self.known))
        self.parts.append(completion.routes)
        self.known = end

    def keep(self, t: Trajectory) -> None:
        """Puts them into the trajectory's columns, [T, M, K] aligned to the input, once it is played."""
        from skyrl_mega.megatron.sequences import Column, flat  # torch, which readers of trajectories do without

        if self.parts:
            rest = _none(self.parts[0], len(t.tokens) - self.known)
            t.columns[COLUMN] = Column(flat([*self.parts, rest], self.parts[0].dtype), "input")


def _none(like: np.ndarray, tokens: int) -> np.ndarray:
    """Of tokens that have no route."""
    return np.zeros((tokens, *like.shape[1:]), like.dtype)
