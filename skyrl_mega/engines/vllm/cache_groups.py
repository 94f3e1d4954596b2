"""vLLM's groups of layers with caches of their own: full attention, sliding windows, states of recurrent layers.

All groups take blocks of equal size from one pool. A sequence needs blocks for each of its tokens in every group with
full attention (several if such layers outnumber the others), and in every other group a bounded number of blocks,
whatever its length.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor
from typing import Any


def full_attention(cache: Any) -> int | None:
    """Returns the number of the first group that caches every token of a sequence; None without such a group.

    Args:
        cache: vLLM's `KVCacheConfig`.
    """
    full = (number for number, group in enumerate(cache.kv_cache_groups) if _caches_all(group.kv_cache_spec))
    return next(full, None)


def room(cache: Any, vllm_config: Any) -> tuple[int, int]:
    """Returns the size of the pool, and an upper bound of what one decoding sequence takes in all groups without full
    attention, whatever its length. Both count tokens of a sequence, which takes space in every group with full
    attention. (0, 0) if no group has full attention; the second is 0 if all groups have it.

    Args:
        cache: vLLM's `KVCacheConfig`.
        vllm_config: vLLM's `VllmConfig`, with the length of the longest sequence.
    """
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    full = [spec for spec in specs if _caches_all(spec)]
    if not full:
        return 0, 0
    blocks = sum(_bounded_blocks(spec, vllm_config) for spec in specs if not _caches_all(spec))
    of_token = sum(Fraction(1, spec.block_size) for spec in full)
    return floor(cache.num_blocks / of_token), ceil(blocks / of_token)


def _bounded_blocks(spec: Any, vllm_config: Any) -> int:
    """Returns the blocks held for a decoding sequence in a group of sliding windows or states."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    if isinstance(spec, SlidingWindowSpec):
        return int(spec.max_admission_blocks_per_request(1, vllm_config.model_config.max_model_len))
    return int(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes))


def _caches_all(spec: Any) -> bool:
    """Returns True if a group's layers cache every token of a sequence."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    of_layers = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return all(isinstance(of_layer, FullAttentionSpec) for of_layer in of_layers)
