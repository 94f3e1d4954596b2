"""Weights in a real vLLM: after every sync, log-probs equal transformers' for the same checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import Config, ModelConfig, RolloutConfig, WeightsConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.sync import WeightSync
from tests.support.engines import (
    LOADING,
    build_model,
    complete,
    difference_from_transformers,
    serving,
    spec_of,
    start_engine,
)
from tests.support.fp8_files import dequantised, prediction_layer, rewrite
from tests.support.shards import REQUESTS, cut, holders

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with session(actors=8):
        yield


def check(engines: ActorGroup, path: Path, rank: int = 0, version: int | None = None) -> None:
    completions = complete(engines, REQUESTS, rank=rank)
    for request in REQUESTS:
        completion = completions[request.id]
        assert len(completion.tokens) == len(completion.logprobs) > 4
        assert difference_from_transformers(path, request, completion) < TOLERANCE
        assert version is None or completion.versions == ((version, 0),)


def interrupt(engines: ActorGroup, sync: WeightSync, models: list[Path], version: int) -> None:
    """Syncs during running requests: requests resume and record the weight version of each token."""
    requests = {f"long {i}": Request(f"long {i}", [5, 20, 40, 60, 7], 120, seed=i) for i in range(64)}
    sync.policy.call_all("load", models[1], timeout=120)
    with ThreadPoolExecutor(1) as background:
        asking = background.submit(complete, engines, list(requests.values()))
        time.sleep(0.2)
        sync.sync(9)
        completions = asking.result().values()
    assert {of for c in completions for of, _ in c.versions} == {version, 9}
    # The completion with the most tokens of the new weights shows the difference best.
    completion = max((c for c in completions if len(c.versions) == 2), key=lambda c: len(c.tokens) - c.versions[1][1])
    request = requests[completion.id]
    (before, first), (after, changed) = completion.versions
    assert (before, first, after) == (version, 0, 9)
    assert 0 < changed < len(completion.tokens)
    old = replace(completion, tokens=completion.tokens[:changed], logprobs=completion.logprobs[:changed])
    assert difference_from_transformers(models[0], request, old) < TOLERANCE
    assert difference_from_transformers(models[0], request, completion) > 0.1
    routes_are_those_that_were_drawn_with(models[0], request, completion, changed)
    check(engines, models[1], version=9)


def routes_are_those_that_were_drawn_with(path: Path, request: Request, completion: Completion, changed: int) -> None:
    """Checks the routes: every token read has a route, and routes before the new weights equal transformers'.

    Later tokens are read with keys and values of both versions, so no single model reproduces these routes.
    """
    assert completion.routes is not None
    tokens = [*request.tokens, *completion.tokens]
    assert len(completion.routes) == len(tokens) - 1 and (completion.routes > 0).all()
    with LOADING:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    of_old = len(request.tokens) + changed - 1  # the token before was read to sample the first token after
    chosen = [
        layer.topk(completion.routes.shape[-1]).indices + 1 for layer in logits if isinstance(layer, torch.Tensor)
    ]
    wanted = torch.stack(chosen, 1)[:of_old].sort(-1).values
    actual = torch.from_numpy(completion.routes.astype("int64"))[:of_old].sort(-1).values
    assert (actual == wanted).float().mean() > 0.999, "one choice between two that are equally good may differ"


def compare(sync: WeightSync) -> None:
    """Checks the engines after a sync (no difference) and after changes of the policy; checks change nothing."""
    for _ in range(2):
        assert [(c.engine, c.worker, c.different) for c in sync.check()] == [(0, 0, []), (0, 1, [])]
    sync.policy.call_all("change", "final_layernorm", timeout=120)
    sync.policy.call_all("change", "decoder.layers.0.self_attention.linear_proj", timeout=120)
    sync.policy.call_all("change", "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2", timeout=120)
    for worker in (*sync.check(), *sync.check()):
        # The last worker holds the last columns of both projections; layers 0 and 2 are the first of their stages.
        names = ("self_attn.o_proj.weight", "mlp.experts.routed_experts.w2_weight") if worker.worker else ()
        assert {*worker.different} == {"model.norm.weight", *(f"model.layers.{i}.{n}" for i in (0, 2) for n in names)}
    sync.sync(10)
    assert not any(c.different for c in sync.check())


CUTS = [
    ParallelDims(ranks=4, pipeline=2, expert=2),
    ParallelDims(ranks=4, tensor=2, expert=2, expert_tensor=2),
    ParallelDims(ranks=4, pipeline=2, virtual_pipeline=2, expert=2),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tensor, cuts", [(2, CUTS[:2]), *(pytest.param(n, CUTS, marks=pytest.mark.nightly) for n in (1, 2))]
)
def test_every_sync_brings_the_policys_weights(
    ray: None, tmp_path: Path, tensor: int, cuts: list[ParallelDims]
) -> None:
    """Syncs twice with different weights from each cut of the policy to an engine of one or two workers.

    Every parameter equals the policy's bit by bit, as the kernels read it. Log-probs equal transformers'.
    """
    models = [build_model(tmp_path / f"moe{seed}", "qwen3_moe", seed, layers=4) for seed in (0, 1)]
    hf = json.loads((models[0] / "config.json").read_text())
    rollout = RolloutConfig(tensor=tensor, kv_cache_gib=0.1)
    weights = WeightsConfig(bucket_mib=0.05, timeout_s=120, checksum_every=2)
    config = Config(model=ModelConfig(dtype="float32"), rollout=rollout, weights=weights)
    spec = replace(spec_of(models[0], rollout), routes=True, updated_under_way=True)
    engines = start_engine("engine", spec, tmp_path)
    fleet = serving(engines)
    version = 0
    try:
        for parallel in cuts:
            policy = holders(parallel, hf, tmp_path)
            try:
                sync = WeightSync(policy, fleet, hf, cut(config, parallel), plans=tmp_path / "plans")
                for path in (models[1], models[0]):
                    version += 1
                    policy.call_all("load", path, timeout=120)
                    metrics = sync.sync(version)
                    check(engines, path, version=version)
                    assert [c.different for c in sync.check()] == [[]] * tensor
                if tensor == 2 and parallel is cuts[0]:
                    interrupt(engines, sync, models, version)
                    compare(sync)
                    version = 10
            finally:
                policy.shutdown()
        # Each worker received its own shard once.
        shard = architecture(hf).engine_shard(hf, tensor, 0)
        shard_bytes = 4 * sum(piece.box.numel for piece in shard.pieces)
        assert metrics["sync/bytes_in_max"] == metrics["sync/bytes_in_ideal"] == shard_bytes
        assert all(metrics[f"time/sync/{part}"] > 0 for part in ("pause", "pack", "wire", "load"))
    finally:
        engines.shutdown()


@pytest.mark.slow
def test_every_architecture_takes_new_weights_twice(ray: None, tmp_path: Path) -> None:
    """Loads new weights from files into every architecture, tied embeddings and biases included.

    The path of files into an engine equals the path of a sync without the wire.
    """
    rollout = RolloutConfig(kv_cache_gib=0.1)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("qwen3", {"tied": True}),
        ("qwen2", {"tied": True, "hidden": 128}),
        ("llama", {}),
    ]

    def one(kind: tuple[str, dict[str, Any]]) -> None:
        name, sizes = kind
        models = [build_model(tmp_path / f"{name}{seed}", name, seed, **sizes) for seed in (0, 1)]
        engines = start_engine(name, spec_of(models[0], rollout), tmp_path)
        try:
            for path in (models[0], models[1], models[0]):
                engines.call_one(0, "workers", "load_files", str(path), timeout=120)
                engines.call_one(0, "forget", timeout=120)
                check(engines, path)
        finally:
            engines.shutdown()

    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(one, kinds))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_directory_in_block_fp8_makes_an_engine_without_quantisation(ray: None, tmp_path: Path, family: str) -> None:
    """Starts an engine on a block-FP8 directory: log-probs are those of the dequantised weights in float32."""
    build_model(tmp_path / "plain", family, 0)
    extra = prediction_layer(tmp_path / "plain") if family == "deepseek_v3" else {}
    tensors = rewrite(tmp_path / "plain", tmp_path / "fp8", extra=extra)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in extra}
    save_file(dequantised(tensors, torch.float32), tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    spec = spec_of(tmp_path / "fp8", RolloutConfig(kv_cache_gib=0.1), weights="auto", dequantised=True)
    engines = start_engine("fp8-files", spec, tmp_path)
    try:
        check(engines, tmp_path / "plain")
    finally:
        engines.shutdown()
