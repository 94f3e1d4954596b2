"""Engines with online quantisation: after every sync an engine computes with the policy's quantised weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import Config, ModelConfig, RolloutConfig, WeightsConfig
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import environment
from skyrl_mega.kernels.block_fp8 import block_amax_reference, dequantise_reference, quantise_reference, scales
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.fp8.format import quantised
from skyrl_mega.weights.sync import WeightSync
from tests.support.engines import build_model, complete, difference_from_transformers, serving, spec_of
from tests.support.fp8_engines import plugin
from tests.support.shards import REQUESTS, cut, holders

pytestmark = pytest.mark.slow

SIZES = {"hidden": 256, "heads": 4, "kv_heads": 2, "layers": 2}


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with session(actors=6):
        yield


def rounded(path: Path) -> Path:
    """Writes a copy of the model for transformers, with linear weights rounded to block-scaled FP8."""
    folder = path.parent / f"{path.name}-rounded"
    shutil.copytree(path, folder)
    weights = load_file(path / "model.safetensors")
    for name in quantised(weights):
        by_block = scales(block_amax_reference(weights[name]))
        numbers = quantise_reference(weights[name], by_block)
        weights[name] = dequantise_reference(numbers, by_block, dtype=torch.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def differences(engines: ActorGroup, path: Path) -> float:
    completions = complete(engines, REQUESTS)
    return max(difference_from_transformers(path, r, completions[r.id]) for r in REQUESTS)


MOE, DENSE = {"head_dim": 128, "experts": 4, "expert_ffn": 128}, {"head_dim": 64, "ffn": 256}
ONLINE = {"quantization": "fp8_per_block"}
CHECKPOINT = {
    "hf_overrides": {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))],
        }
    }
}


@pytest.mark.parametrize(
    "kind, sizes, wire, options",
    [
        ("qwen3_moe", MOE, "auto", ONLINE),
        pytest.param("qwen2", DENSE, "auto", ONLINE, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", MOE, "fp8", ONLINE, marks=pytest.mark.nightly),
        ("qwen3_moe", MOE, "fp8", CHECKPOINT),
    ],
    ids=["plain wire, MoE", "plain wire, dense", "FP8 wire", "FP8 wire, FP8 parameters"],
)
def test_an_engine_computes_with_the_policys_weights_in_fp8(
    ray: None, tmp_path: Path, kind: str, sizes: dict[str, int], wire: str, options: dict[str, Any]
) -> None:
    """Syncs to an FP8 engine and compares with transformers. Weights of a plain wire are rounded by the engine.

    Weights of an FP8 wire are rounded already, and a second rounding is exact. An FP8 checkpoint's parameters take
    numbers and scales as received.
    """
    models = [build_model(tmp_path / f"model{seed}", kind, seed, **SIZES, **sizes) for seed in (0, 1)]
    expected = [rounded(path) for path in models]
    hf = json.loads((models[0] / "config.json").read_text())
    rollout = RolloutConfig(kv_cache_gib=0.1, options=options)
    weights = WeightsConfig(wire=wire, bucket_mib=0.25, timeout_s=120)
    config = Config(model=ModelConfig(dtype="float32"), rollout=rollout, weights=weights)
    spec = spec_of(models[0], rollout)
    engines = ActorGroup.spawn(
        "engine",
        VllmEngine,
        [{"spec": spec}],
        timeout=120,
        env=environment(spec) | plugin(tmp_path / "plugin"),
        logs=tmp_path,
    )
    parallel = ParallelDims(ranks=2, expert=2 if kind == "qwen3_moe" else 1)
    policy = holders(parallel, hf, tmp_path)
    try:
        engines.call_all("start", timeout=600)
        sync = WeightSync(policy, serving(engines), hf, cut(config, parallel), plans=tmp_path / "plans")
        for version, model in enumerate((1, 0, 1), 1):
            policy.call_all("load", models[model], timeout=120)
            sync.sync(version)
            assert differences(engines, expected[model]) < 1e-4
            assert differences(engines, models[model]) > 1e-3
            assert [c.different for c in sync.check()] == [[]]
        policy.call_all("change", "self_attention.linear_qkv.weight", timeout=120)
        (check,) = sync.check()  # the check itself changes no parameter
        assert check.different and all("qkv_proj" in name for name in check.different)
        assert differences(engines, expected[1]) < 1e-4
    finally:
        policy.shutdown()
        engines.shutdown()
