"""States of recurrent layers and sliding windows in an engine: memory, concurrency and decoding of published models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import BuildConfig, Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.planner import fit
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.decode import reads
from skyrl_mega.planner.fit import parallel_of
from skyrl_mega.planner.memory import engine_memory
from skyrl_mega.planner.processes import EngineMemory
from skyrl_mega.planner.times import decoding, mean_concurrency

STATES: Mapping[str, tuple[int, int, int]] = {
    "Qwen3-Next-80B-A3B-Instruct": (36, 12, 32),
    "Qwen3.5-35B-A3B": (30, 10, 32),
    "Qwen3.5-397B-A17B": (45, 15, 64),
}
"""Model → layers with states, layers with full attention, value heads of a state; 16 key heads, all 128 wide."""


def settings(*overrides: str) -> Config:
    common = ("cluster.device=cuda", "model.dtype=bfloat16", "rollout.tensor=2", "rollout.memory_fraction=0.9")
    return compose(None, [*common, *overrides])


def model(name: str) -> Decoder:
    hf: dict[str, Any] = known(name)
    return architecture(hf).describe(hf)


def state_of(name: str, tensor: int, drafts: int = 0) -> int:
    """Returns the bytes of a sequence's states: a matrix per value head in float32, and three tokens of the convolution
    over queries, keys and values in bfloat16, with `drafts` more for draft tokens."""
    layers, _, heads = STATES[name]
    return layers * (heads * 128 * 128 * 4 + (3 + drafts) * (2 * 16 + heads) * 128 * 2) // tensor


@pytest.mark.parametrize("name", STATES)
def test_a_sequence_takes_two_states_with_cached_prefixes_and_one_without(name: str) -> None:
    decoder = model(name)
    memory = engine_memory(settings(), decoder)
    assert memory.per_sequence == 2 * state_of(name, 2)
    assert memory.per_token == STATES[name][1] * 2 * 256 * 2, "a key and a value of one of two heads, in two bytes"
    for without in ("rollout.options.enable_prefix_caching=false", "cluster.device=cpu"):
        assert engine_memory(settings(without), decoder).per_sequence == state_of(name, 2)


def test_states_of_convolutions_have_the_models_type() -> None:
    name = "Qwen3.5-35B-A3B"
    convolution = 30 * 3 * (2 * 16 + 32) * 128 // 2  # layers, tokens, channels of a worker
    float32, bfloat16 = (engine_memory(settings(f"model.dtype={t}"), model(name)) for t in ("float32", "bfloat16"))
    assert float32.per_sequence - bfloat16.per_sequence == 2 * convolution * (4 - 2)


@pytest.mark.parametrize("name", STATES)
def test_a_decoding_step_reads_and_writes_every_state(name: str) -> None:
    decoder, config = model(name), settings()
    assert reads(config, decoder).per_sequence == 2 * state_of(name, 2)
    decode = decoding(config, decoder, mean=1000)
    bandwidth = config.cluster.rates.memory_gb_s * 1e9 * config.cluster.rates.memory_share
    experts = reads(config, decoder).weights(200) - reads(config, decoder).weights(100)
    of_cache = 100 * (2 * state_of(name, 2) + 1000 * STATES[name][1] * 1024)
    assert decode(200) - decode(100) == pytest.approx((experts + of_cache) / bandwidth, rel=1e-6)


@pytest.mark.parametrize("name", STATES)
def test_a_sequence_takes_a_further_state_for_each_draft_token(name: str) -> None:
    decoder, drafts = model(name), ("rollout.drafts.method=ngram", "rollout.drafts.max_tokens=4")
    state = state_of(name, 2, drafts=4)
    assert engine_memory(settings(*drafts), decoder).per_sequence == (2 + 4) * state
    without = ("rollout.options.enable_prefix_caching=false", *drafts)
    assert engine_memory(settings(*without), decoder).per_sequence == (1 + 4) * state


@pytest.mark.parametrize("name", STATES)
def test_a_step_with_draft_tokens_writes_a_state_for_each(name: str) -> None:
    decoder, plain = model(name), settings()
    drafted = settings(
        "rollout.drafts.method=ngram",
        *("rollout.drafts.max_tokens=4", "rollout.drafts.acceptance=0", "rollout.drafts.adaptive=false"),
    )
    bandwidth = plain.cluster.rates.memory_gb_s * 1e9 * plain.cluster.rates.memory_share
    of_weights = reads(plain, decoder).weights(5 * 100) - reads(plain, decoder).weights(100)
    of_states = 100 * (6 * state_of(name, 2, drafts=4) - 2 * state_of(name, 2))
    seconds = decoding(drafted, decoder, mean=1000)(100) - decoding(plain, decoder, mean=1000)(100)
    assert seconds == pytest.approx((of_weights + of_states) / bandwidth, rel=1e-6)


def test_states_bound_the_number_of_short_sequences() -> None:
    """Compares with the number that fits by bytes; by tokens alone three times as many would fit."""
    name = "Qwen3-Next-80B-A3B-Instruct"
    config = settings("rollout.tensor=4", "rollout.concurrency=4096", "rollout.engines=1", "data.prompts_per_step=4096")
    decoder = model(name)
    memory = engine_memory(config, decoder)
    sizes = batch(config, parallel_of(config)[0])
    running = mean_concurrency(config, memory, sizes)
    per_sequence = 2 * state_of(name, 4) + sizes.mean * 12 * 1024
    assert running == int(memory.kv / per_sequence) < memory.kv / (sizes.mean * 12 * 1024) / 3
    longest = memory.tokens // memory.longest
    assert longest == memory.kv // (2 * state_of(name, 4) + memory.longest * 12 * 1024)


LONG = ("rollout.max_length=16384", "rollout.max_response_tokens=16000", "rollout.sampling.max_tokens=16000")
"""Sequences longer than a step of vLLM."""


def windowed(*overrides: str) -> tuple[Config, EngineMemory]:
    """Returns settings for a CPU, and the memory of an engine of a small model with a windowed and a full layer."""
    config = settings("cluster.device=cpu", "model.dtype=float32", "rollout.tensor=1", *LONG, *overrides)
    hf = hf_config(BuildConfig(architecture="gpt_oss", max_length=16384))
    return config, engine_memory(config, architecture(hf).describe(hf))


def test_vllm_starts_with_space_for_a_longest_prompt_in_every_layer() -> None:
    """Compares with vLLM's own layers, which keep a step's tokens beside a window; up to two blocks more or less, one
    of them vLLM's block of zeros."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    for step in (16384, 2048):
        _, memory = windowed(f"rollout.options.max_num_batched_tokens={step}")
        heads: Any = {"block_size": 128, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
        model = SimpleNamespace(max_model_len=16384)
        vllm: Any = SimpleNamespace(parallel_config=parallel, model_config=model, max_in_flight_tokens=step)
        layers = (FullAttentionSpec(**heads), SlidingWindowSpec(**heads, sliding_window=128))
        needed = sum(layer.max_memory_usage_bytes(vllm) for layer in layers)
        assert memory.smallest_kv == pytest.approx(needed, abs=2 * layers[0].page_size_bytes)


def test_a_cache_with_which_vllm_would_not_start_is_refused() -> None:
    """Allows 1.3 sequences beside their windows, which are smaller than a prompt."""
    config, memory = windowed("rollout.kv_cache_gib=0.01")
    assert memory.tokens > 16384 and not memory.starts()
    hf = hf_config(BuildConfig(architecture="gpt_oss", max_length=16384))
    problem = fit.problem(config, architecture(hf).describe(hf))
    assert str(problem).startswith(
        "rollout.kv_cache_gib = 0.01: this leaves a KV cache of 10 MiB, and vLLM starts with at least 17 for a "
        "sequence of 16,384 tokens, whose prompt is larger than its sliding windows"
    )
    assert windowed("rollout.kv_cache_gib=0.016")[1].starts()
    config.rollout.engines = 0  # servers outside of the run have caches of their own
    assert fit.problem(config, architecture(hf).describe(hf)) is None


def test_the_smallest_cache_has_whole_blocks_and_one_more() -> None:
    """vLLM on a CPU refuses 10,485 tokens for sequences of 10,400: 82 blocks of 128, and a block of zeros."""
    memory = replace(windowed()[1], longest=10400, per_token=1024, per_sequence=0, per_prompt=0)
    assert memory.smallest_kv == 83 * 128 * 1024
    assert replace(memory, cpu_kv_cache=83 * 128 * 1024).starts()
    assert not replace(memory, cpu_kv_cache=10_485 * 1024).starts()
