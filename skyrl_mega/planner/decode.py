"""Bytes that an engine worker reads in one step: all weights that some token of the step meets, and the cache.

For the time that decoding will take (`planner.times`) and the share of the memory's rate that it reached
(`trainer.speed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from skyrl_mega.config.derived import engine_ranks, expert_parallel
from skyrl_mega.config.schema import Config
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.planner.engine_weights import cache_itemsize, engine_bytes, kv_bytes_per_token, linear_itemsize


@dataclass(frozen=True)
class Reads:
    """Of one engine worker. Bytes."""

    plain: int
    """Weights that every step reads. All of the embedding is among them, though a step reads a row for each token."""
    sparse: tuple[tuple[float, float], ...]
    """Weights of which a token reads a part, and that part (0 to 1): experts."""
    per_token: int
    """Cache of one token that is attended to."""

    def weights(self, tokens: float) -> float:
        """Read in a step of so many tokens, each of which chooses its experts by itself."""
        return self.plain + sum(size * (1 - (1 - part) ** tokens) for size, part in self.sparse)


def reads(config: Config, d: Decoder) -> Reads:
    """What a worker of an engine reads."""
    rollout = config.rollout
    data = engine_ranks(rollout) // rollout.tensor
    size = linear_itemsize(config)  # experts are linear layers
    sparse = tuple(
        (n * size, part) for n, part in _sparse(d, EngineCut(rollout.tensor, expert_parallel(rollout), data))
    )
    plain = engine_bytes(config, d) - sum(n for n, _ in sparse)
    return Reads(int(plain), sparse, kv_bytes_per_token(d, rollout.tensor, cache_itemsize(config)))


@lru_cache(maxsize=16)
def _sparse(d: Decoder, cut: EngineCut) -> tuple[tuple[float, float], ...]:
    """Elements of which a token reads a part, and that part."""
    found = [(count * n, part) for kind, count in d.counted() for n, part in (b.engine_sparse(cut) for b in kind)]
    return tuple((n, part) for n, part in found if n)
