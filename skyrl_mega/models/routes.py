"""Routes: the experts that every MoE layer of a model has chosen for a token, as they travel from an engine to the
policy.

A route is an expert's number + 1, so that 0 says: there is none. Values that were never filled in are therefore no
routes, whichever way they came about.

Legend: T tokens, M MoE layers of the model in their order, K experts of a token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skyrl_mega.models.decoder import Decoder

COLUMN = "routes"
"""The column of a trajectory and of a batch: [T, M, K], aligned to the input."""


class WrongRoutes(RuntimeError):
    """Routes are missing, are not ones that the model can have, or are another token's, layer's or version's."""


@dataclass(frozen=True)
class RouteShape:
    """What the routes of a model look like."""

    layers: tuple[int, ...]
    """[M]: the decoder layers that have experts, counted from 0."""
    experts: int
    """E."""
    per_token: int
    """K."""

    @classmethod
    def of(cls, decoder: Decoder) -> RouteShape | None:
        """None for a model without experts."""
        experts = decoder.experts
        if experts is None:
            return None
        layers = tuple(layer for layer in range(decoder.layers) if decoder.is_moe(layer))
        return cls(layers, experts.count, experts.per_token)

    @property
    def dtype(self) -> type[np.uint8] | type[np.int16]:
        """The smallest type that holds 0 … E and that both numpy and torch have."""
        return np.uint8 if self.experts <= np.iinfo(np.uint8).max else np.int16

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's routes."""
        return len(self.layers) * self.per_token * np.dtype(self.dtype).itemsize

    def none(self, tokens: int) -> np.ndarray:
        """[tokens, M, K] of tokens that have no route."""
        return np.zeros((tokens, len(self.layers), self.per_token), self.dtype)

    def check(self, routes: np.ndarray, tokens: int, what: str) -> None:
        """Refuses what this model's routers cannot have chosen for `tokens` tokens.

        Args:
            routes: Should be [tokens, M, K] of different experts of each layer.
            tokens: How many there have to be.
            what: Whose they are, for the message.

        Raises:
            WrongRoutes: Another shape, a number that is no expert, none at all, or one expert twice; the first place.
        """
        shape = (tokens, len(self.layers), self.per_token)
        if routes.shape != shape:
            raise WrongRoutes(
                f"{what}: routes are {list(routes.shape)}; {list(shape)} are needed (token, layer, expert)"
            )
        ordered = np.sort(routes, -1)
        outside = (ordered[..., 0] < 1) | (ordered[..., -1] > self.experts)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if (wrong := outside | twice).any():
            token, layer = np.argwhere(wrong)[0]
            found = (routes[token, layer].astype(int) - 1).tolist()
            raise WrongRoutes(
                f"{what}: token {token} in layer {self.layers[layer]} has experts {found} (-1: none); allowed are "
                f"{self.per_token} different ones of 0 to {self.experts - 1}"
            )
