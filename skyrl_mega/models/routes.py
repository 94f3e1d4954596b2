"""Routes: the experts chosen for a token by every MoE layer, sent from an engine to the policy.

A route stores the expert's index + 1, and 0 for no route. So values never filled in do not count as routes.

Legend: T tokens, M MoE layers of the model in order, K experts of a token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skyrl_mega.models.decoder import Decoder

COLUMN = "routes"
"""Column of a trajectory and of a batch: [T, M, K], aligned to the input."""
REPLAY_OFF = "policy.moe.replay=off runs without router replay"
"""Advice in messages about wrong routes."""
REPLAY_POLICY = "give policy.moe.replay=policy, and report this"
"""Advice in messages about routes that an engine recorded wrongly."""


class WrongRoutes(RuntimeError):
    """Error for missing routes, routes impossible for the model, or routes of another token, layer or version."""


@dataclass(frozen=True)
class RouteShape:
    """The shape of a model's routes: the MoE layers, the number of experts, and the experts per token."""

    layers: tuple[int, ...]
    """[M]: the decoder layers with experts, counted from 0."""
    experts: int
    """E: experts of a layer."""
    per_token: int
    """K: experts chosen for a token in a layer."""

    @classmethod
    def of(cls, decoder: Decoder) -> RouteShape | None:
        """Returns the shape for a decoder; None for a model without experts."""
        experts = decoder.experts
        if experts is None:
            return None
        return cls(tuple(sorted(decoder.moe_layers)), experts.count, experts.per_token)

    @property
    def dtype(self) -> type[np.uint8] | type[np.int16]:
        """The smallest dtype for 0 … E supported by both numpy and torch."""
        return np.uint8 if self.experts <= np.iinfo(np.uint8).max else np.int16

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's routes over all layers: M · K · bytes of `dtype`."""
        return len(self.layers) * self.per_token * np.dtype(self.dtype).itemsize

    def none(self, tokens: int) -> np.ndarray:
        """Returns zeros [tokens, M, K] of `dtype`: tokens without a route."""
        return np.zeros((tokens, len(self.layers), self.per_token), self.dtype)

    def check(self, routes: np.ndarray, tokens: int, what: str) -> None:
        """Raises an error unless this model's routers can have chosen `routes` for `tokens` tokens: a token without a
        route is refused too.

        Args:
            routes: [tokens, M, K], each an expert's index + 1 (0: no route), with distinct experts in each layer.
            tokens: The required number of tokens.
            what: Origin of the routes, for the message.

        Raises:
            WrongRoutes: Wrong shape, no route, an index outside of the experts, or an expert twice; names the first
                position.
        """
        shape = (tokens, len(self.layers), self.per_token)
        if routes.shape != shape:
            raise WrongRoutes(
                f"{what}: routes have shape {list(routes.shape)}; needed is {list(shape)} (token, MoE layer, expert); "
                f"{REPLAY_OFF}"
            )
        ordered = np.sort(routes, -1)
        outside = (ordered[..., 0] < 1) | (ordered[..., -1] > self.experts)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if (wrong := outside | twice).any():
            token, layer = np.argwhere(wrong)[0]
            experts = (routes[token, layer].astype(int) - 1).tolist()
            raise WrongRoutes(
                f"{what}: token {token} in layer {self.layers[layer]} has experts {experts} (-1: none); allowed are "
                f"{self.per_token} different experts from 0 to {self.experts - 1}; {REPLAY_OFF}"
            )
