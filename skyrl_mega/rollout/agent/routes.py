"""Expert routes of a trajectory's tokens (`models.routes`), collected turn by turn.

An engine returns the routes of a request's tokens except the last, which was not processed. Routes of earlier turns are
known when the next turn begins, so each turn adds the routes of the new tokens: the last token of the turn before, the
observation, and the new response. A token keeps the route used for sampling the next token, even if an engine processed
the token again with later weights (R3, arXiv:2510.11370, replays the sampler's routes).

Legend: T tokens of the trajectory, n of one turn, M MoE layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skyrl_mega.engines.base import Completion
from skyrl_mega.models.routes import COLUMN, REPLAY_POLICY, WrongRoutes
from skyrl_mega.trajectories.trajectory import Trajectory


class TurnRoutes:
    """Collector of a trajectory's expert routes, turn by turn. Stays empty for engines without route output."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray | int] = []
        """As in `filled`."""
        self.known = 0
        """Position in `Trajectory.tokens` up to which `parts` reach."""

    def first(self, t: Trajectory) -> int:
        """Returns the position in `t.context` from which the next request must return routes; routes of earlier tokens
        are known."""
        return max(0, self.known - (len(t.tokens) - len(t.context)))

    def add(self, t: Trajectory, completion: Completion) -> None:
        """Adds the routes that an engine returned with a turn. To be called before the turn's tokens are appended to
        the trajectory. Does nothing without routes.

        Args:
            t: The trajectory.
            completion: The engine's answer of the turn.

        Raises:
            WrongRoutes: The number of routes does not match the number of new tokens.
        """
        if completion.routes is None:
            return
        begins = len(t.tokens) - len(t.context) + self.first(t)
        end = len(t.tokens) + len(completion.tokens) - 1
        check_count(completion.id, completion.routes, end - begins)
        self.parts += [begins - self.known, completion.routes]  # a gap: the environment replaced the conversation
        self.known = end

    def copied(self, end: int | None = None) -> TurnRoutes:
        """Returns a copy with the routes of the tokens before position `end`, or of all tokens. The copy's next request
        returns the routes from the last token kept."""
        copy = TurnRoutes()
        copy.parts, copy.known = [*self.parts], self.known
        if end is not None and self.parts and end - 1 < self.known:
            copy.known = end - 1
            copy.parts = [np.concatenate(filled(self.parts))[: copy.known]]
        return copy

    def keep(self, t: Trajectory) -> None:
        """Stores the routes of a finished trajectory as `keep` does."""
        keep(t, [*self.parts, len(t.tokens) - self.known])


def check_count(request: str, routes: np.ndarray, tokens: int) -> None:
    """Raises WrongRoutes unless the routes returned for a request are the routes of this number of tokens."""
    if len(routes) != tokens:
        raise WrongRoutes(
            f"request {request}: the engine returned routes of {len(routes)} tokens instead of {tokens}; "
            f"{REPLAY_POLICY}"
        )


def keep(t: Trajectory, parts: Sequence[np.ndarray | int]) -> None:
    """Stores the routes of a finished trajectory as its column `models.routes.COLUMN`, shape [T, M, K] (K experts of
    each of M layers), aligned to the input. Does nothing without routes. `parts` as in `filled`."""
    if arrays := filled(parts):
        from skyrl_mega.trajectories.sequences import Column, flat  # torch, which readers of trajectories do without

        t.columns[COLUMN] = Column(flat(arrays, arrays[0].dtype), "input")


def filled(parts: Sequence[np.ndarray | int]) -> list[np.ndarray]:
    """Returns the parts with every number replaced by an array of zeros; [] if no part has routes. The result is a list
    of arrays [n, M, K], in the order of the tokens: the K experts of each of M layers for n tokens.

    Args:
        parts: Routes [n, M, K], in the order of the tokens, or a number n of tokens without a route.
    """
    like = next((part for part in parts if isinstance(part, np.ndarray)), None)
    if like is None:
        return []
    return [np.zeros((part, *like.shape[1:]), like.dtype) if isinstance(part, int) else part for part in parts]
