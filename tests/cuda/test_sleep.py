"""Tests of sleep mode in a worker on CUDA: calls to vLLM's allocator, and the arguments for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.device_allocator
from torch import Tensor
from torch.nn import Linear, Module
from vllm.device_allocator.cumem import DEFERRABLE_TAGS

from skyrl_mega.config.residency import ENGINE
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.engines.presence import CACHE, WEIGHTS
from skyrl_mega.engines.vllm import transfer
from skyrl_mega.engines.vllm.spec import EngineSpec, arguments
from skyrl_mega.engines.vllm.transfer import ShardTransferEngine, WorkerExtension
from tests.weights.grids import MODELS


class Allocator:
    """Replacement of vLLM's allocator: discards by tag, wakes the given tags and every tag never deferred
    (`DEFERRABLE_TAGS`), and records the calls."""

    def __init__(self, tensors: dict[str, list[Tensor]]) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.tensors = tensors
        self.asleep: set[str] = set()
        self.pointer_to_data = {
            t.data_ptr(): SimpleNamespace(handle=(0, t.untyped_storage().nbytes(), t.data_ptr(), 0), tag=tag)
            for tag, tagged in tensors.items()
            for t in tagged
        }

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("discard", tags))
        for tag in set(tags) - self.asleep:
            self.asleep.add(tag)
            for tensor in self.tensors[tag]:
                tensor.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tuple(tags)))
        self.asleep &= set(DEFERRABLE_TAGS) - set(tags)


class Rotary(Module):
    """Module with a table outside every update, and a kernel that keeps another table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(4, 4)
        self.register_buffer("table", torch.arange(8.0))
        self.kernel = {"order": (torch.arange(6.0),)}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a worker on CUDA with a simulated allocator."""
    model, cache = Rotary(), torch.ones(32)
    weights = [*[p.data for p in model.parameters()], model.table, model.kernel["order"][0]]
    allocator = Allocator({"weights": weights, "kv_cache": [cache], "workspace": [torch.ones(16)]})
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: allocator.calls.append(("empty_cache", ())))
    monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", lambda: allocator)
    worker_extension: Any = WorkerExtension()
    engine = SimpleNamespace(device=torch.device("cuda"), model=model, parameters=SimpleNamespace(undefined=False))
    worker_extension.weight_transfer_engine = engine
    worker_extension.synchronize_device = lambda: allocator.calls.append(("synchronize", ()))
    worker_extension.model_runner, worker_extension.allocator = SimpleNamespace(kv_caches=[cache.view(4, 8)]), allocator
    return worker_extension


def test_a_worker_drops_by_tags_and_gets_back_what_no_update_brings(worker: Any) -> None:
    model = worker.weight_transfer_engine.model
    worker.drop([CACHE])
    assert not worker.weight_transfer_engine.parameters.undefined
    worker.drop([CACHE, WEIGHTS])
    assert worker.weight_transfer_engine.parameters.undefined
    cleared = ("empty_cache", ())
    cache = ("discard", ("kv_cache", "workspace"))
    assert worker.allocator.calls == [cache, cleared, ("discard", ("weights",)), cleared]
    assert model.table.isnan().all()
    assert worker.allocator.asleep == {"weights", "kv_cache", "workspace"}
    worker.bring_back([WEIGHTS])
    assert worker.allocator.asleep == {"kv_cache", "workspace"}, "scratch memory returns with the cache"
    assert torch.equal(model.table, torch.arange(8.0))
    assert torch.equal(model.kernel["order"][0], torch.arange(6.0))
    assert not any(p.any() for p in model.parameters())
    assert worker.model_runner.kv_caches[0].isnan().all(), "the cache still sleeps"
    worker.bring_back([WEIGHTS, CACHE])
    waited = ("synchronize", ())
    awake = ("wake_up", ("kv_cache", "workspace"))
    assert worker.allocator.calls[4:] == [("wake_up", ("weights",)), cache, waited, awake, waited]
    assert worker.allocator.asleep == set()
    assert not worker.model_runner.kv_caches[0].any(), "an empty cache"
    assert worker.parts.saved == []


def test_constants_are_saved_as_they_are_when_weights_are_dropped(worker: Any) -> None:
    model = worker.weight_transfer_engine.model
    for value in (1.0, 2.0):
        model.table.fill_(value)
        worker.drop([WEIGHTS])
        worker.bring_back([WEIGHTS])
        assert model.table.tolist() == [value] * 8


def test_memory_of_the_device_is_not_trimmed_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[str] = []
    monkeypatch.setattr(transfer, "trim", lambda: trimmed.append("trim"))
    for device in ("cuda", "cpu"):
        parameters = SimpleNamespace(undefined=True, close=lambda: None)
        engine: Any = SimpleNamespace(parameters=parameters, device=torch.device(device), report={"load_s": 0.0})
        ShardTransferEngine.finish_weight_update(engine)
        assert trimmed == ([] if device == "cuda" else ["trim"])


def test_an_engine_has_sleep_mode_only_where_a_part_of_it_sleeps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3"]))
    path = str(tmp_path)
    for device, sleeps, wanted in (("cuda", (), False), ("cuda", ENGINE, True), ("cuda", (CACHE,), True)):
        spec = EngineSpec(path, "bfloat16", device, RolloutConfig(), 64, sleeps=sleeps)
        assert arguments(spec).get("enable_sleep_mode", False) is wanted
    assert "enable_sleep_mode" not in arguments(EngineSpec(path, "float32", "cpu", RolloutConfig(), 64, sleeps=ENGINE))
