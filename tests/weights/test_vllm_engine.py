"""Weights in a real vLLM: after every sync its log-probs are those of transformers for the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.local import session
from skyrl_mega.config.schema import Config, ModelConfig, RolloutConfig, WeightsConfig
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.registry import architecture
from skyrl_mega.rollout.engine import Request
from skyrl_mega.weights import files
from skyrl_mega.weights.sync import WeightSync, connect_source
from tests.support.engines import build_model, complete, difference_from_transformers, spec_of, start_engine

TOLERANCE = 1e-4
REQUESTS = [Request(str(i), [5, 20 + i, 40 + 3 * i, 60, 7], 24, seed=i) for i in range(3)]


class ShardHolder:
    """What a policy rank has of a checkpoint, and the two methods that a sync asks of it; no Megatron is needed for
    that."""

    def __init__(self, rank: int, parallel: Parallel, hf: dict[str, Any]) -> None:
        self.rank = rank
        self.shard = architecture(hf).megatron_shard(hf, parallel, rank, "local")
        self.params = {name: torch.full(shape, torch.nan) for name, shape in self.shard.params.items()}

    def load(self, path: Path) -> None:
        files.load(path, self.shard, self.params)

    def connect_weights(self, info: dict[str, Any]) -> None:
        self.source = connect_source(info, self.rank, torch.device("cpu"))

    def send_weights(self, version: int) -> dict[str, float]:
        return {"bytes": float(self.source.send(self.params))}


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
        assert version is None or completion.version == version


@pytest.mark.slow
def test_every_sync_brings_the_policys_weights(ray: None, tmp_path: Path) -> None:
    """Two pipeline stages with experts on separate ranks, to an engine with two tensor-parallel workers; three
    syncs."""
    models = [build_model(tmp_path / f"moe{seed}", "qwen3_moe", seed) for seed in (0, 1)]
    hf = json.loads((models[0] / "config.json").read_text())
    parallel = Parallel(ranks=4, pipeline=2, expert=2)
    rollout = RolloutConfig(tensor=2, kv_cache_gib=0.1)
    with ThreadPoolExecutor(1) as background:
        starting = background.submit(start_engine, "engine", spec_of(models[0], rollout), tmp_path)
        policy = ActorGroup.spawn(
            "policy",
            ShardHolder,
            [{"rank": r, "parallel": parallel, "hf": hf} for r in range(4)],
            timeout=120,
            env={"OMP_NUM_THREADS": "1"},
            logs=tmp_path,
        )
        engines = starting.result()
    try:
        config = Config(
            model=ModelConfig(dtype="float32"), rollout=rollout, weights=WeightsConfig(bucket_mib=0.05, timeout_s=30)
        )
        sync = WeightSync(policy, engines, hf, parallel, config, device="cpu")
        sync.connect(60)
        for version, path in enumerate([models[0], models[1], models[0]], start=1):
            policy.call_all("load", path, timeout=30)
            metrics = sync.sync(version)
            check(engines, path, version=version)
        # Each worker has received its own shard, once.
        shard = architecture(hf).engine_shard(hf, 2, 0)
        own = 4 * sum(piece.box.numel for piece in shard.pieces)
        assert metrics["sync/bytes_in_max"] == metrics["sync/bytes_in_ideal"] == own
        assert all(metrics[f"time/sync/{part}"] > 0 for part in ("pause", "wire", "load"))
    finally:
        policy.shutdown()
        engines.shutdown()


@pytest.mark.slow
def test_every_architecture_takes_new_weights_twice(ray: None, tmp_path: Path) -> None:
    """Tied embeddings and biases among them. The files' path into an engine is the sync's without the wire."""
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
                engines.call_one(0, "workers", "load_files", str(path), timeout=30)
                engines.call_one(0, "forget", timeout=30)
                check(engines, path)
        finally:
            engines.shutdown()

    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(one, kinds))
