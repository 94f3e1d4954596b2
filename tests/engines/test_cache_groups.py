"""Tests of models with several groups of layers in vLLM's cache: states and windows beside full attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from skyrl_mega.engines.vllm.cache_groups import full_attention, room
from skyrl_mega.engines.vllm.routes import RouteRecorder
from skyrl_mega.models.routes import RouteShape, WrongRoutes

BLOCK = 64
HEADS: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=100)


def state(mode: str) -> MambaSpec:
    """Returns a state as large as a block of full attention."""
    shape = (FULL.page_size_bytes // 4,)
    return MambaSpec(shapes=(shape,), dtypes=(torch.float32,), block_size=BLOCK, mamba_cache_mode=mode)


def cache_of(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs], num_blocks=10)


def config(mode: str = "none") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1000),
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
    )


@pytest.mark.parametrize(("mode", "states"), [("none", 1), ("align", 2)])
def test_a_sequence_takes_its_states_besides_its_tokens(mode: str, states: int) -> None:
    """Counts the states of three groups; with cached prefixes vLLM keeps two per sequence."""
    cache = cache_of(*[state(mode)] * 3, FULL)
    assert full_attention(cache) == 3
    assert room(cache, config(mode)) == (10 * BLOCK, 3 * states * BLOCK)


def test_a_model_with_full_attention_only_takes_nothing_besides_tokens() -> None:
    assert room(cache_of(FULL), config()) == (10 * BLOCK, 0)


def test_windows_count_and_full_attention_is_found_behind_them() -> None:
    cache = cache_of(WINDOW, FULL)
    assert full_attention(cache) == 1
    assert room(cache, config()) == (10 * BLOCK, 3 * BLOCK), "100 tokens, from anywhere in a block of 64"


def test_a_token_takes_space_in_every_group_with_full_attention() -> None:
    """Compares with 30 layers of full attention and 10 with states, which vLLM puts into four groups of 10."""
    cache = cache_of(FULL, FULL, FULL, state("none"))
    assert room(cache, config()) == (10 * BLOCK // 3, -(-BLOCK // 3))
    large = FullAttentionSpec(**(HEADS | {"block_size": 2 * BLOCK, "num_kv_heads": 1}))
    assert room(cache_of(FULL, large), config()) == (10 * BLOCK * 2 // 3, 0), "blocks of equal bytes: a draft model"


def test_routes_of_a_model_without_full_attention_are_refused() -> None:
    runner = SimpleNamespace(kv_cache_config=cache_of(state("none"), WINDOW))
    with pytest.raises(WrongRoutes, match=r"without a layer of full attention; give policy\.moe\.replay=off"):
        RouteRecorder(runner, RouteShape((0,), 4, 2))
