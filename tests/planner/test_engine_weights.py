"""FP8 weights of an engine worker, against the boxes of an FP8 wire, and the consequences for memory and time."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.decode import reads
from skyrl_mega.planner.engine_search import EngineChoice, _with_largest_fraction
from skyrl_mega.planner.engine_weights import engine_bytes, staged_bytes
from skyrl_mega.planner.memory import GIB, engine_memory
from skyrl_mega.planner.processes import PHASES
from skyrl_mega.planner.shared import shared_gpus
from skyrl_mega.weights.fp8.format import SUFFIX, quantised, with_scales
from tests.models.test_known import BIASES, PARAMETERS

HF = known("Qwen3-30B-A3B")
D = architecture(HF).describe(HF)
ONLINE = "rollout.options.quantization=fp8_per_block"
CHECKPOINT = (
    "rollout.options.hf_overrides={quantization_config: "
    "{quant_method: fp8, activation_scheme: dynamic, weight_block_size: [128, 128]}}"
)


def settings(*overrides: str) -> Config:
    common = ("cluster.device=cuda", "model.dtype=bfloat16", "rollout.tensor=4", "rollout.memory_fraction=0.9")
    return compose(None, [*common, *overrides])


@pytest.mark.parametrize("given", [ONLINE, CHECKPOINT])
def test_linear_layers_take_a_byte_and_their_scales(given: str) -> None:
    """Compares with the parameters of a worker on an FP8 wire, scales included."""
    layout = architecture(HF).engine_layout(HF, 2)
    shard = with_scales(layout, quantised(layout.tensors)).shards[1]
    numbers = {piece.param for piece in shard.pieces if piece.tensor.endswith("_proj.weight")}
    each = {n: 4 if SUFFIX in n else 1 if n in numbers else 2 for n in shard.params}
    expected = sum(prod(shape) * each[name] for name, shape in shard.params.items())
    assert engine_bytes(settings(given, "rollout.tensor=2"), D, 1) == expected


ROUTERS = {
    "GLM-4.5-Air": 45 * 128 * 4096,
    "GLM-4.7-Flash": 46 * 64 * 2048,
    "MiniMax-M2": 62 * 256 * 3072,
    "DeepSeek-V3": 0,
    "Qwen1.5-MoE-A2.7B": 0,
}
"""Elements of the routers that vLLM keeps in float32: layers with experts × experts × width; DeepSeek's compute in
float32 with weights in the model's type."""


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_and_correction_biases_in_float32_are_counted(name: str) -> None:
    hf = known(name)
    decoder, biases = architecture(hf).describe(hf), BIASES.get(name, 0)
    expected = 2 * (PARAMETERS[name] + biases) + 2 * (ROUTERS[name] + biases)
    assert engine_bytes(settings("rollout.tensor=1"), decoder) == expected


@pytest.mark.parametrize("given", [ONLINE, CHECKPOINT])
def test_the_room_is_the_caches(given: str) -> None:
    plain, fp8 = engine_memory(settings(), D), engine_memory(settings(given), D)
    assert 0.5 < fp8.weights / plain.weights < 0.55
    assert fp8.kv - plain.kv == plain.weights - fp8.weights
    assert fp8.per_token == plain.per_token


def test_a_sync_stages_a_layer_that_is_quantised_when_it_has_arrived() -> None:
    layer = 128 * 3 * 2048 * 768 // 4 + 2048 * 128 * (32 * 2 + 4 * 2) // 4
    assert staged_bytes(settings(ONLINE), D) == 2 * layer
    assert staged_bytes(settings(CHECKPOINT), D) == staged_bytes(settings(), D) == 0
    plain, staging = engine_memory(settings(), D), engine_memory(settings(ONLINE), D)
    assert staging.peak - plain.peak == 2 * layer
    assert {name: staging.phase(name).get("staged", 0) for name in PHASES} == {
        name: 2 * layer * (name == "sync") for name in PHASES
    }


@pytest.mark.parametrize("keep", ["null", "[]"])
def test_a_shared_gpu_has_the_staged_layer_beside_the_policy(keep: str) -> None:
    config = settings(
        ONLINE, "cluster.shared=true", f"residency.keep={keep}", "policy.ranks=8", "policy.layout.expert=8"
    )
    gpu = next(shared_gpus(config, D, ParallelDims(8, expert=8)))
    without = replace(gpu, engine=replace(gpu.engine, staged=0))
    assert {name: without.free(name) - gpu.free(name) for name in PHASES} == {
        name: staged_bytes(config, D) * (name == "sync") for name in PHASES
    }


def test_a_search_leaves_room_for_the_staged_layer() -> None:
    config, size = settings(ONLINE, "cluster.shared=true"), 80 * GIB
    worker = engine_memory(config, D)
    chosen = EngineChoice(config, ((0.5, worker.tokens, 1.0),), worker)
    most = size - worker.beside - worker.staged
    for keep, engine in ((None, size // 2), ([], worker.weights + worker.reserve)):
        assert _with_largest_fraction(chosen, keep, {"sync": most - engine, "generate": 0}, size) is not None
        assert _with_largest_fraction(chosen, keep, {"sync": most - engine + 1, "generate": 0}, size) is None


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_a_cache_of_bytes_holds_twice_the_tokens(kind: str) -> None:
    plain, fp8 = (engine_memory(settings(*more), D) for more in ((), (f"rollout.options.kv_cache_dtype={kind}",)))
    assert (fp8.weights, fp8.kv) == (plain.weights, plain.kv)
    assert 2 * fp8.per_token == plain.per_token and fp8.tokens == pytest.approx(2 * plain.tokens, abs=1)


def test_a_cache_may_be_narrower_than_the_model() -> None:
    def per_token(*more: str) -> int:
        return engine_memory(settings("model.dtype=float32", *more), D).per_token

    assert per_token() == per_token("rollout.options.kv_cache_dtype=auto")
    assert per_token() == 2 * per_token("rollout.options.kv_cache_dtype=bfloat16")


def test_decoding_reads_what_is_held() -> None:
    """Compares the bytes read with all weights: a step of this many tokens uses every expert."""
    for given in ((), (ONLINE,)):
        config = settings(*given)
        assert reads(config, D).weights(1e6) == pytest.approx(engine_bytes(config, D), rel=1e-9)
    cache = settings("rollout.options.kv_cache_dtype=fp8")
    assert 2 * reads(cache, D).per_token == reads(settings(), D).per_token


@pytest.mark.parametrize(("name", "layers"), [("DeepSeek-V3", 61), ("Kimi-K2-Instruct", 61), ("Moonlight-16B-A3B", 27)])
def test_latent_attention_caches_576_numbers_a_layer_on_every_worker(name: str, layers: int) -> None:
    hf = known(name)
    d = architecture(hf).describe(hf)
    for tensor in (1, 8, 16):
        assert engine_memory(settings(f"rollout.tensor={tensor}"), d).per_token == layers * 576 * 2
        assert reads(settings(f"rollout.tensor={tensor}"), d).per_token == layers * 576 * 2
