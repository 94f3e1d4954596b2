"""Bytes read by an engine worker per decoding step: all weights used by any token of the step, and the KV cache.

Used for the decoding time (`planner.times`) and the achieved share of memory bandwidth (`trainer.speed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from skyrl_mega.config.schema import Config
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.planner.engine_weights import (
    cache_itemsize,
    engine_bytes,
    kv_bytes_per_token,
    linear_itemsize,
    state_bytes,
    window_bytes,
)


@dataclass(frozen=True)
class Reads:
    """Bytes read from device memory by an engine worker while decoding."""

    plain: int
    """Bytes of weights read in every step. Includes the whole embedding, although a step reads only a row per token."""
    sparse: tuple[tuple[float, float], ...]
    """(Bytes, part) of weights read by each token only in part (0 to 1): experts."""
    per_token: int
    """Bytes of KV cache read per attended token."""
    per_sequence: int = 0
    """Bytes per sequence and step whatever its length: states of recurrent layers, read and written, and keys and
    values of sliding windows."""
    per_draft: int = 0
    """Bytes per draft token and step: a state of recurrent layers, written in addition."""

    def weights(self, tokens: float) -> float:
        """Returns the expected bytes of weights read in one step for `tokens` tokens with independent choices of
        experts."""
        return self.plain + sum(size * (1 - (1 - part) ** tokens) for size, part in self.sparse)


def reads(config: Config, decoder: Decoder) -> Reads:
    """Returns the bytes read by a worker of the configured engines while decoding. Weights of draft tokens are not
    included."""
    rollout = config.rollout
    size = linear_itemsize(config)  # experts consist of linear layers
    sparse = tuple((n * size, part) for n, part in _sparse(decoder, EngineCut.of(rollout)))
    plain = engine_bytes(config, decoder) - sum(n for n, _ in sparse)
    per_token = kv_bytes_per_token(decoder, rollout.tensor, cache_itemsize(config))
    state = state_bytes(config, decoder)
    return Reads(int(plain), sparse, per_token, 2 * state + window_bytes(config, decoder), per_draft=state)


@lru_cache(maxsize=16)
def _sparse(decoder: Decoder, cut: EngineCut) -> tuple[tuple[float, float], ...]:
    """Returns element counts of sparsely read weights, each with the part (0 to 1) that a token reads."""
    elements = [
        (count * n, part) for kind, count in decoder.layer_counts() for n, part in (b.engine_sparse(cut) for b in kind)
    ]
    return tuple((n, part) for n, part in elements if n)
