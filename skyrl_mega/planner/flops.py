"""Floating point operations of a model, for estimates of step time (`planner.times`) and measured utilisation
(`trainer.speed`).

Counts the matrix products of the model's mathematics: linear layers, routers, the experts chosen for each token,
attention to preceding tokens, and the output projection of tokens whose log-probs are needed. Does not count norms,
rotations, soft-maxes and activations (a few in a thousand), work discarded by a causal mask, padding, and recomputation
(`policy.recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from skyrl_mega.models.decoder import Decoder

BACKWARD = 3
"""Cost of an optimizer step, in forward passes: the backward pass takes two products per product of the forward
pass."""


@dataclass(frozen=True)
class Flops:
    """Floating point operations per token in a forward pass."""

    layers: float
    """Operations in the layers: two per matrix element that the token meets."""
    head: float
    """Operations in the output projection: two per matrix element."""
    attention: float
    """Operations per attended token; grows with the length of the sequence."""
    decoding: float
    """Operations per attended token while an engine decodes."""

    @property
    def matrices(self) -> float:
        """Operations per token in layers and head, without attention: `layers` + `head`."""
        return self.layers + self.head

    def forward(self, load: PassWork) -> float:
        """Returns the operations of a forward pass over all tokens of `load`."""
        return self.layers * load.tokens + self.attention * load.pairs + self.head * load.logprob_tokens


@dataclass(frozen=True)
class PassWork:
    """Amount of work of a pass, in tokens and pairs of tokens. Amounts of several passes can be added."""

    tokens: float = 0.0
    """Number of tokens passing through the layers."""
    pairs: float = 0.0
    """Number of pairs of a token and an attended token, itself included."""
    logprob_tokens: float = 0.0
    """Number of tokens whose log-probs are needed."""

    @classmethod
    def of(cls, lengths: Sequence[float], logprob_tokens: float) -> Self:
        """Returns the work of a pass over sequences with the given lengths in tokens, of which `logprob_tokens` tokens
        in total need log-probs."""
        return cls(sum(lengths), sum(map(causal_pairs, lengths)), logprob_tokens)

    def __add__(self, other: PassWork) -> PassWork:
        return PassWork(
            self.tokens + other.tokens, self.pairs + other.pairs, self.logprob_tokens + other.logprob_tokens
        )

    def __mul__(self, times: float) -> PassWork:
        return PassWork(self.tokens * times, self.pairs * times, self.logprob_tokens * times)


def causal_pairs(length: float) -> float:
    """Returns n (n + 1) / 2, the number of pairs of a token and an attended token in a sequence of n tokens: each token
    attends to itself and all preceding tokens."""
    return length * (length + 1) / 2


@lru_cache(maxsize=16)
def flops(decoder: Decoder) -> Flops:
    """Returns the operations per token of a forward pass, counted from the model's shapes."""
    layers = attention = decoding = 0.0
    for kind, count in decoder.layer_counts():
        for block in kind:
            work = block.flops()
            layers += count * work.matrices
            attention += count * work.attention
            decoding += count * (work.attention if work.decoding is None else work.decoding)
    return Flops(layers, decoder.head.flops().matrices, attention, decoding)
