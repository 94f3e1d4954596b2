"""Weights by files in a real vLLM: full images and changes, bit for bit, while the engine answers requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import Config, ModelConfig, RolloutConfig, WeightsConfig
from skyrl_mega.config.schema.weights import FilesConfig
from skyrl_mega.engines.base import Request
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import EngineSpec, environment
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.members import FILES
from skyrl_mega.weights.sync import WeightSync
from tests.support.engines import build_model, complete, difference_from_transformers, spec_of
from tests.support.shards import REQUESTS, cut, holders

TOLERANCE = 1e-4
PARALLEL = ParallelDims(ranks=4, pipeline=2, expert=2)


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with session(actors=8):
        yield


def fleet_of(spec: EngineSpec, logs: Path) -> Fleet:
    """Starts an engine and returns the fleet, with the engine's facts."""
    group = ActorGroup.spawn("engine", VllmEngine, [{"spec": spec}], timeout=300, env=environment(spec), logs=logs)
    facts = group.call_all("start", timeout=600)
    return Fleet(group, restarts=1, start_timeout_s=600, facts=facts)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("tensor", [1, 2])
def test_an_engine_follows_the_policy_by_files(ray: None, tmp_path: Path, tensor: int) -> None:
    """Syncs in full and as changes, also during requests, after a lost file and after the end of the engine."""
    models = [build_model(tmp_path / f"moe{seed}", "qwen3_moe", seed, layers=4) for seed in (0, 1)]
    hf = json.loads((models[0] / "config.json").read_text())
    rollout = RolloutConfig(tensor=tensor, kv_cache_gib=0.1)
    weights = WeightsConfig(
        transport=FILES, timeout_s=120, files=FilesConfig(full_every=3, keep=1, cache=str(tmp_path / "cache"))
    )
    config = Config(model=ModelConfig(dtype="float32"), rollout=rollout, weights=weights)
    fleet = fleet_of(replace(spec_of(models[0], rollout), transport=FILES, updated_under_way=True), tmp_path)
    policy = holders(PARALLEL, hf, tmp_path)
    messages: list[str] = []
    try:
        sync = WeightSync(policy, fleet, hf, cut(config, PARALLEL), plans=tmp_path / "plans", say=messages.append)

        def check(path: Path, version: int) -> None:
            completions = complete(fleet.group, REQUESTS)
            for request in REQUESTS:
                assert difference_from_transformers(path, request, completions[request.id]) < TOLERANCE
                assert completions[request.id].versions == ((version, 0),)
            assert [c.different for c in sync.check()] == [[]] * tensor

        policy.call_all("load", models[0], timeout=120)
        metrics = sync.sync(1)
        assert metrics["sync/files/full"] == 1
        check(models[0], 1)
        policy.call_all("change", "final_layernorm", timeout=120)
        metrics = sync.sync(2)
        assert metrics["sync/files/full"] == 0 and 0 < metrics["sync/files/changed"] < 1e-4
        assert metrics["sync/bytes_in_max"] < 1000 and [c.different for c in sync.check()] == [[]] * tensor
        # Requests go on during the download.
        policy.call_all("load", models[1], timeout=120)
        long = [Request(f"long {i}", [5, 20, 40, 60, 7], 120, seed=i) for i in range(64)]
        with ThreadPoolExecutor(1) as background:
            asking = background.submit(complete, fleet.group, long)
            sync.sync(3)
            assert {v for c in asking.result().values() for v, _ in c.versions} <= {2, 3}
        check(models[1], 3)
        # A lost cache and a lost base: the engine gets a full image.
        fleet.group.end(0)
        fleet.retire(0, "ended by the test")
        shutil.rmtree(tmp_path / "cache")
        assert sync.files is not None
        shutil.rmtree(next(Path(sync.files.store.address).glob("*/*3")), ignore_errors=True)
        policy.call_all("load", models[0], timeout=120)
        metrics = sync.sync(4)
        check(models[0], 4)
        assert metrics["sync/engines"] == 1
    finally:
        policy.shutdown()
        fleet.group.shutdown()
