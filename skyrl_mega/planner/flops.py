"""Floating point operations of a model, for estimates of step time (`planner.times`) and measured utilisation
(`trainer.speed`).

Counts the matrix products of the model's mathematics: linear layers, routers, the experts chosen for each token,
attention to preceding tokens, and the output projection of tokens whose log-probs are needed. Does not count norms,
rotations, soft-maxes and activations (a few in a thousand), work discarded by a causal mask, padding, and recomputation
(`policy.recompute`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self

from skyrl_mega.models.decoder import Decoder

BACKWARD = 3
"""Cost of an optimizer step, in forward passes: the backward pass takes two products per product of the forward
pass."""
SMALL = 8
"""The budget of tokens divided by this number: a smaller micro-batch takes about as long as one of this size."""


@dataclass(frozen=True)
class Flops:
    """Floating point operations per token in a forward pass."""

    layers: float
    """Operations in the layers: two per matrix element that the token meets."""
    head: float
    """Operations in the output projection: two per matrix element."""
    attention: float
    """Operations per attended token; grows with the length of the sequence. Without layers with sliding windows."""
    decoding: float
    """Operations per attended token while an engine decodes, likewise."""
    windows: tuple[tuple[int, float], ...] = ()
    """Operations per attended token of the layers with each size of a sliding window, as (size, operations)."""

    @property
    def matrices(self) -> float:
        """Operations per token in layers and head, without attention: `layers` + `head`."""
        return self.layers + self.head

    def forward(self, load: PassWork) -> float:
        """Returns the operations of a forward pass over all tokens of `load`."""
        attention = sum(count * self.attending(length) for length, count in load.sequences.items())
        return self.layers * load.tokens + attention + self.head * load.logprob_tokens

    def attending(self, length: float) -> float:
        """Returns the operations of attention in a forward pass over a sequence of `length` tokens."""
        windows = sum(each * causal_pairs(length, window) for window, each in self.windows)
        return self.attention * causal_pairs(length) + windows

    def decoding_at(self, length: float) -> float:
        """Returns the operations of attention for decoding a token after `length` tokens."""
        return self.decoding * length + sum(each * min(window, length) for window, each in self.windows)


@dataclass(frozen=True)
class PassWork:
    """Amount of work of a pass. Amounts of several passes can be added."""

    sequences: Mapping[float, float] = field(default_factory=dict)
    """Length in tokens → number of sequences of this length; a fraction for a part of the passes."""
    logprob_tokens: float = 0.0
    """Number of tokens whose log-probs are needed."""

    @classmethod
    def of(cls, lengths: Iterable[float], logprob_tokens: float) -> Self:
        """Returns the work of a pass over sequences with the given lengths in tokens, of which `logprob_tokens` tokens
        in total need log-probs."""
        return cls(Counter(lengths), logprob_tokens)

    @property
    def tokens(self) -> float:
        """Number of tokens passing through the layers."""
        return sum(length * count for length, count in self.sequences.items())

    def __add__(self, other: PassWork) -> PassWork:
        lengths = self.sequences.keys() | other.sequences.keys()
        both = {n: self.sequences.get(n, 0) + other.sequences.get(n, 0) for n in lengths}
        return PassWork(both, self.logprob_tokens + other.logprob_tokens)

    def __mul__(self, times: float) -> PassWork:
        return PassWork({n: count * times for n, count in self.sequences.items()}, self.logprob_tokens * times)


def causal_pairs(length: float, window: float | None = None) -> float:
    """Returns the number of pairs of a token and an attended token in a sequence of `length` tokens: each token attends
    to itself and all preceding tokens, or to the last `window` tokens among these."""
    if window is None or window >= length:
        return length * (length + 1) / 2
    return causal_pairs(window) + (length - window) * window


@lru_cache(maxsize=16)
def flops(decoder: Decoder) -> Flops:
    """Returns the operations per token of a forward pass, counted from the model's shapes."""
    layers = attention = decoding = 0.0
    windows: Counter[int] = Counter()
    for kind, count in decoder.layer_counts():
        for block in kind:
            work = block.flops()
            layers += count * work.matrices
            if work.window is not None:
                windows[work.window] += int(count * work.attention)
                continue
            attention += count * work.attention
            decoding += count * (work.attention if work.decoding is None else work.decoding)
    return Flops(layers, decoder.head.flops().matrices, attention, decoding, tuple(windows.items()))
