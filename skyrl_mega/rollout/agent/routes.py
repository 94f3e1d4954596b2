"""Expert routes of a trajectory's tokens (`models.routes`), collected turn by turn.

An engine returns the routes of a request's tokens except the last, which was not processed. Routes of earlier turns are
known when the next turn begins, so each turn adds the routes of the new tokens: the last token of the turn before, the
observation, and the new response. A token keeps the route used for sampling the next token, even if an engine processed
the token again with later weights (R3, arXiv:2510.11370, replays the sampler's routes).

Legend: T tokens of the trajectory, n of one turn, M MoE layers, K experts of a token.
"""

from __future__ import annotations

import numpy as np

from skyrl_mega.engines.base import Completion
from skyrl_mega.models.routes import COLUMN, WrongRoutes
from skyrl_mega.trajectories.trajectory import Trajectory


class TurnRoutes:
    """Collector of a trajectory's expert routes, turn by turn. Stays empty for engines without route output."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.known = 0
        """Position in `Trajectory.tokens` up to which `parts` reach."""

    def first(self, t: Trajectory) -> int:
        """Returns the position in `t.context` from which the next request must return routes; routes of earlier tokens
        are known."""
        return max(0, self.known - (len(t.tokens) - len(t.context)))

    def add(self, t: Trajectory, completion: Completion) -> None:
        """Adds the routes that an engine returned with a turn. To be called before the turn's tokens are appended to
        the trajectory. Does nothing without routes.

        Raises:
            WrongRoutes: The number of routes does not match the number of new tokens.
        """
        if completion.routes is None:
            return
        begins = len(t.tokens) - len(t.context) + self.first(t)
        end = len(t.tokens) + len(completion.tokens) - 1
        if len(completion.routes) != end - begins:
            raise WrongRoutes(
                f"request {completion.id}: the engine returned routes of {len(completion.routes)} tokens instead of "
                f"{end - begins}"
            )
        if begins > self.known:  # the environment replaced the conversation
            self.parts.append(_none(completion.routes, begins - self.known))
        self.parts.append(completion.routes)
        self.known = end

    def copied(self, end: int | None = None) -> TurnRoutes:
        """Returns a copy with the routes of the tokens before position `end`, or of all tokens. The copy's next request
        returns the routes from the last token kept."""
        copy = TurnRoutes()
        copy.parts, copy.known = [*self.parts], self.known
        if end is not None and self.parts and end - 1 < self.known:
            copy.known = end - 1
            copy.parts = [np.concatenate(self.parts)[: copy.known]]
        return copy

    def keep(self, t: Trajectory) -> None:
        """Stores the routes of a finished trajectory as its column `models.routes.COLUMN`, shape [T, M, K] (K experts
        of each of M layers), aligned to the input; zeros for tokens without a route. Does nothing without routes."""
        from skyrl_mega.trajectories.sequences import Column, flat  # torch, which readers of trajectories do without

        if self.parts:
            rest = _none(self.parts[0], len(t.tokens) - self.known)
            t.columns[COLUMN] = Column(flat([*self.parts, rest], self.parts[0].dtype), "input")


def _none(like: np.ndarray, tokens: int) -> np.ndarray:
    """Returns zeros for tokens without a route."""
    return np.zeros((tokens, *like.shape[1:]), like.dtype)
