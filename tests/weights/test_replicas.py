"""Engines with data-parallel replicas in a real vLLM: weights, answers, pauses, sleep and faults of all replicas."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray as ray_module

from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.residency import ENGINE
from skyrl_mega.config.schema import Config, ModelConfig, RolloutConfig, WeightsConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.sync import WeightSync
from tests.support.engines import build_model, complete, difference_from_transformers, spec_of, start_engine
from tests.support.shards import cut, holders

TOLERANCE = 1e-4
REQUESTS = [Request(f"{i}/0", [5, 20 + i, 40 + 3 * i, 60, 7], 24, seed=i) for i in range(6)]
CASES = [
    pytest.param("qwen3_moe", 1, True, id="whole experts"),
    pytest.param("qwen3_moe", 1, False, id="sliced experts"),
    pytest.param("qwen3_moe", 2, True, id="two workers a replica"),
    pytest.param("deepseek_v3", 2, True, id="whole shared experts"),
    pytest.param("qwen3", 1, False, id="no experts"),
]


@dataclass
class Place:
    """An engine with two replicas, a policy as the source of weights, and two models."""

    models: list[Path]
    engines: ActorGroup
    fleet: Fleet
    sync: WeightSync

    def load(self, model: int, version: int) -> dict[str, float]:
        self.sync.policy.call_all("load", self.models[model], timeout=120)
        return self.sync.sync(version)

    def ask(self, requests: list[Request]) -> dict[str, Completion]:
        self.fleet.ask("forget", timeout=120)
        return complete(self.engines, requests)

    def call(self, method: str, *args: Any) -> Any:
        return ray_module.get(getattr(self.engines.actors[0], method).remote(*args), timeout=120)


@contextmanager
def place_of(folder: Path, kind: str, tensor: int, whole_experts: bool) -> Iterator[Place]:
    models = [build_model(folder / f"{kind}{seed}", kind, seed, expert_ffn=128) for seed in (0, 1)]
    hf = json.loads((models[0] / "config.json").read_text())
    options = {"data_parallel_size": 2, "enable_expert_parallel": whole_experts}
    rollout = RolloutConfig(kv_cache_gib=0.1, tensor=tensor, options=options)
    weights = WeightsConfig(bucket_mib=0.05, timeout_s=120, checksum_every=1)
    config = Config(model=ModelConfig(dtype="float32"), rollout=rollout, weights=weights)
    engines = start_engine("engine", spec_of(models[0], rollout, sleeps=ENGINE), folder)
    fleet = Fleet(engines, restarts=2, start_timeout_s=300)
    policy = holders(parallel := ParallelDims(ranks=2), hf, folder)
    try:
        yield Place(models, engines, fleet, WeightSync(policy, fleet, hf, cut(config, parallel), plans=folder / "p"))
    finally:
        fleet.close()
        policy.shutdown()
        engines.shutdown()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kind, tensor, whole_experts", CASES)
def test_all_replicas_take_weights_answer_pause_sleep_and_restart(
    tmp_path: Path, kind: str, tensor: int, whole_experts: bool
) -> None:
    with session(actors=8), place_of(tmp_path, kind, tensor, whole_experts) as place:
        receives_its_shard(place, tensor, whole_experts)
        answers(place)
        changes_weights_under_way(place)
        sleeps(place)
        assert place.sync.failures == 0, "no replica computed without weights, and no engine restarted"
        restarts(place)
        assert place.sync.failures == 0, "the restarted engine was connected at once"


def receives_its_shard(place: Place, tensor: int, whole_experts: bool) -> None:
    """Checks the bytes of every worker by the elements of its shard, and every parameter by a second transfer."""
    hf = place.sync.hf
    metrics = place.load(0, 1)
    experts = kind_has_experts(hf)
    shards = [
        architecture(hf).engine_shard(hf, tensor, worker if experts else worker % tensor, whole_experts, 1 + experts)
        for worker in range(2 * tensor)
    ]
    sizes = [4 * sum(piece.box.numel for piece in shard.pieces) for shard in shards]
    assert metrics["sync/bytes_in_max"] == metrics["sync/bytes_in_ideal"] == max(sizes)
    compared = place.sync.check()
    assert [(c.worker, c.bytes, c.different) for c in compared] == [(w, size, []) for w, size in enumerate(sizes)]


def kind_has_experts(hf: dict[str, Any]) -> bool:
    return "num_experts" in hf or "n_routed_experts" in hf


def answers(place: Place) -> None:
    """Checks log-probs by transformers, that all workers computed, and that the same call gives the same bits."""
    place.call("measured")
    completions = place.ask(REQUESTS)
    for request in REQUESTS:
        completion = completions[request.id]
        assert completion.versions == ((1, 0),)
        assert difference_from_transformers(place.models[0], request, completion) < TOLERANCE
    steps = [sum(n * times for n, times in steps.items()) for _, steps in place.call("measured")]
    # Half of the requests each: a prompt of 5 tokens and the answer without the last token.
    halves = [sum(4 + len(completions[r.id].tokens) for r in REQUESTS[half::2]) for half in (0, 1)]
    workers = len(steps) // 2
    assert steps == [halves[0]] * workers + [halves[1]] * workers
    again = place.ask(REQUESTS)
    assert {n: (list(c.tokens), list(c.logprobs)) for n, c in again.items()} == {
        n: (list(c.tokens), list(c.logprobs)) for n, c in completions.items()
    }


def changes_weights_under_way(place: Place) -> None:
    """Syncs in the middle of requests: tokens of both versions, and the tokens before the sync are the old model's."""
    requests = [Request(f"long {i}/0", [5, 20, 40, 60, 7], 120, seed=i) for i in range(48)]
    place.sync.policy.call_all("load", place.models[1], timeout=120)
    place.call("measured")
    with ThreadPoolExecutor(1) as background:
        asking = background.submit(complete, place.engines, requests)
        while not all(steps for _, steps in place.call("measured")):
            time.sleep(0.02)
        place.sync.sync(2)
        completions = asking.result(timeout=300)
    assert {version for c in completions.values() for version, _ in c.versions} == {1, 2}
    after = place.ask(REQUESTS)
    assert all(difference_from_transformers(place.models[1], r, after[r.id]) < TOLERANCE for r in REQUESTS)


def sleeps(place: Place) -> None:
    before = place.ask(REQUESTS)
    place.fleet.sleep(ENGINE)
    place.fleet.wake(ENGINE)
    assert place.fleet.serving == []
    place.sync.sync(3)
    after = place.ask(REQUESTS)
    assert {n: list(c.logprobs) for n, c in after.items()} == {n: list(c.logprobs) for n, c in before.items()}


def restarts(place: Place) -> None:
    """Kills the process of the last replica: the engine fails as a whole, restarts, and serves the same weights."""
    before = place.ask(REQUESTS)
    actor = psutil.Process(place.engines.where[0].pid)
    replicas = [p for p in actor.children(recursive=True) if "EngineCore_DP1" in p.name() + " ".join(p.cmdline())]
    assert replicas
    os.kill(replicas[0].pid, signal.SIGKILL)
    with pytest.raises(ray_module.exceptions.RayTaskError, match="EngineDied"):
        complete(place.engines, [Request(f"lost {i}/0", [5, 6, 7], 100, seed=i) for i in range(4)])
    place.fleet.retire(0, "a replica was killed")
    place.sync.sync(4)
    assert place.engines.where[0].pid != actor.pid
    after = place.ask(REQUESTS)
    assert {n: list(c.tokens) for n, c in after.items()} == {n: list(c.tokens) for n, c in before.items()}
