"""Floating point operations of a model, for what a step will take (`planner.times`) and for what it made of its time
(`trainer.speed`).

Counted are the matrix products that the model's mathematics asks for: linear layers, routers, the experts that a token
is sent to, attention between a token and those before it, the output projection for the tokens that are asked for. Not
counted are norms, rotations, soft-maxes and activations (a few in a thousand), what a kernel computes of a causal mask
and throws away, padding, and whatever is computed a second time (`policy.recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from skyrl_mega.models.decoder import Decoder

BACKWARD = 3
"""Forward passes that an optimizer step is worth: going backward takes two products for each of the forward pass."""


@dataclass(frozen=True)
class Flops:
    """Floating point operations of one token in one forward pass."""

    layers: float
    """Two for every element of a layer's matrix that the token meets."""
    head: float
    """The same of the output projection."""
    attention: float
    """Of a token that has one token before it; grows with how many there are."""

    @property
    def matrices(self) -> float:
        """Of layers and head."""
        return self.layers + self.head

    def forward(self, load: Load) -> float:
        """Of the load in one forward pass."""
        return self.layers * load.tokens + self.attention * load.pairs + self.head * load.asked


@dataclass(frozen=True)
class Load:
    """What a pass computes on. Loads of several passes add up."""

    tokens: float = 0.0
    """That go through the layers."""
    pairs: float = 0.0
    """Of a token and one that it attends to, itself among them."""
    asked: float = 0.0
    """Tokens whose log-probs are asked for."""

    @classmethod
    def of(cls, lengths: Sequence[float], asked: float) -> Self:
        """Of sequences of these lengths."""
        return cls(sum(lengths), sum(map(causal_pairs, lengths)), asked)

    def __add__(self, other: Load) -> Load:
        return Load(self.tokens + other.tokens, self.pairs + other.pairs, self.asked + other.asked)

    def __mul__(self, times: float) -> Load:
        return Load(self.tokens * times, self.pairs * times, self.asked * times)


def causal_pairs(length: float) -> float:
    """Pairs in a sequence of which every token attends to itself and to those before it."""
    return length * (length + 1) / 2


@lru_cache(maxsize=16)
def flops(d: Decoder) -> Flops:
    """What the model's shapes make of it."""
    layers = attention = 0.0
    for kind, count in d.counted():
        for block in kind:
            work = block.flops()
            layers += count * work.matrices
            attention += count * work.attention
    return Flops(layers, d.head.flops().matrices, attention)
