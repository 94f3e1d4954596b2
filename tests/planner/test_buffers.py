"""Bytes of parameters, gradients and optimizer state against megatron-core's own tensors, rank by rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from skyrl_mega.config.schema import BuildConfig, MoeConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron import model as policy_build
from skyrl_mega.megatron import moments
from skyrl_mega.megatron.worker import ModelWorker
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import buffers
from skyrl_mega.planner.buffers import MOMENTS
from skyrl_mega.planner.memory import model_state
from skyrl_mega.planner.parameters import stage
from tests.megatron import layouts
from tests.support.ranks import run_ranks

MODELS = {
    "moe": BuildConfig(layers=4, hidden=48, head_dim=12, expert_ffn=40),
    "tied moe": BuildConfig(layers=4, tied=True),
    "dense": BuildConfig(architecture="qwen3", layers=4, hidden=56, ffn=72),
    "tied dense with bias": BuildConfig(architecture="qwen2", layers=4, head_dim=16, tied=True),
    "shared": BuildConfig(architecture="glm4_moe", layers=4),
    "latent": BuildConfig(architecture="deepseek_v3", layers=4),
}

CASES: list[tuple[str, int, dict[str, int], torch.dtype, bool]] = [
    ("moe", 1, {}, torch.bfloat16, False),
    ("moe", 3, {}, torch.bfloat16, False),
    ("moe", 2, {"tensor": 2}, torch.bfloat16, False),
    ("moe", 2, {"pipeline": 2}, torch.float32, False),
    ("moe", 2, {"pipeline": 2, "virtual_pipeline": 2}, torch.bfloat16, False),
    ("moe", 2, {"expert": 2}, torch.bfloat16, True),
    ("moe", 4, {"expert": 4}, torch.float32, False),
    ("moe", 4, {"tensor": 2, "expert": 2, "expert_tensor": 2}, torch.bfloat16, False),
    ("moe", 2, {"context": 2}, torch.bfloat16, False),
    ("moe", 4, {"tensor": 2, "pipeline": 2, "expert": 2}, torch.bfloat16, False),
    (
        "tied moe",
        4,
        {"pipeline": 2, "expert": 2, "first_stage_layers": 1, "last_stage_layers": 3},
        torch.bfloat16,
        False,
    ),
    ("shared", 4, {"tensor": 2, "expert": 2}, torch.bfloat16, True),
    ("latent", 2, {"tensor": 2}, torch.bfloat16, False),
    ("dense", 2, {"tensor": 2}, torch.bfloat16, False),
    ("dense", 4, {"pipeline": 2, "virtual_pipeline": 2}, torch.float32, False),
    ("tied dense with bias", 4, {"tensor": 2, "pipeline": 2}, torch.bfloat16, False),
    ("tied dense with bias", 3, {}, torch.float32, False),
]


def allocated(
    rank: int, address: str, path: Path, parallel: ParallelDims, policy: PolicyConfig, dtype: torch.dtype
) -> tuple[int, int, int]:
    """Returns the storage bytes of parameters, gradients and optimizer state after an optimizer step."""
    return bytes_of(layouts.open_rank(rank, address, path, parallel, policy, dtype))


def bytes_of(opened: ModelWorker) -> tuple[int, int, int]:
    """Returns the storage bytes of an opened rank."""
    parameters = list(opened.params.values())
    gradients = [p.main_grad for p in parameters if p.requires_grad]  # type: ignore[attr-defined]
    for gradient in gradients:
        gradient.fill_(1e-3)  # a step needs gradients
    opened.optimizer.step()  # Adam allocates its moments in the first step
    state: list[torch.Tensor] = []
    for part in getattr(opened.optimizer, "chained_optimizers", [opened.optimizer]):
        for group in part.optimizer.param_groups:
            state += group["params"]
        for entry in part.optimizer.state.values():
            state += [value for name, value in entry.items() if name != "step"]
    kept = storages(parameters)
    optimizer_storages = {address: size for address, size in storages(state).items() if address not in kept}
    return sum(kept.values()), sum(storages(gradients).values()), sum(optimizer_storages.values())


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Returns the bytes of the storages behind the tensors by address, each storage once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        build(config, folder / name, seed=1)
    return {name: folder / name for name in MODELS}


def name_of(value: Any) -> str | None:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items()) or "alone"
    if isinstance(value, bool):
        return "frozen router" if value else ""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


@pytest.mark.parametrize(("model", "ranks", "sizes", "dtype", "freeze"), CASES, ids=name_of)
def test_bytes_are_megatrons_own(
    models: dict[str, Path], model: str, ranks: int, sizes: dict[str, int], dtype: torch.dtype, freeze: bool
) -> None:
    parallel = layouts.layout(ranks, **sizes)
    policy = layouts.policy_config(moe=MoeConfig(freeze_router=freeze))
    hf = hf_config(MODELS[model])
    d = architecture(hf).describe(hf)
    real = run_ranks(ranks, allocated, models[model], parallel, policy, dtype)
    for rank, actual in enumerate(real):
        at = parallel.coordinates(rank)
        counted = model_state(d, parallel, at, dtype.itemsize, freeze)
        assert (counted.weights, counted.gradients, counted.optimizer) == actual, f"rank {rank}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_bytes_of_smaller_moments(models: dict[str, Path], dtype: torch.dtype) -> None:
    """Compares smaller moments, and the largest trained part of a parameter: a step moves at least this part to the
    device.
    """
    parallel, hf = layouts.layout(2, expert=2), hf_config(MODELS["moe"])
    policy = layouts.policy_config(optimizer=OptimizerConfig(moments="bfloat16", beta2=0.95))
    d = architecture(hf).describe(hf)
    for rank, (*actual, largest) in enumerate(run_ranks(2, with_largest, models["moe"], parallel, policy, dtype)):
        at = parallel.coordinates(rank)
        counted = model_state(d, parallel, at, dtype.itemsize, moments=MOMENTS["bfloat16"])
        assert [counted.weights, counted.gradients, counted.optimizer, counted.largest] == [*actual, largest]


def with_largest(rank: int, address: str, path: Path, parallel: ParallelDims, policy: Any, dtype: torch.dtype) -> Any:
    opened = layouts.open_rank(rank, address, path, parallel, policy, dtype)
    masters = [m for part in moments.inner_optimizers(opened.optimizer) for _, m in moments.master_weights(part)]
    element = 4 + 4 * (dtype == torch.bfloat16)
    return *bytes_of(opened), max(m.numel() for m in masters) * element


def bucketed(rank: int, address: str, *args: Any) -> tuple[int, int, int]:
    """Runs `allocated` with buckets of a thousand elements."""
    small = partial(policy_build.DistributedDataParallelConfig, bucket_size=1000)
    with mock.patch.object(policy_build, "DistributedDataParallelConfig", small):
        return allocated(rank, address, *args)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("moe", {"expert": 2}), ("tied dense with bias", {"pipeline": 2, "virtual_pipeline": 2}), ("dense", {})],
    ids=name_of,
)
def test_bytes_of_the_buckets_that_overlap(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, model: str, sizes: dict[str, int]
) -> None:
    monkeypatch.setattr(buffers, "BUCKET", (1000, 0))
    ranks, hf = 3 if not sizes else 4, hf_config(MODELS[model])
    parallel, policy = layouts.layout(ranks, **sizes), layouts.policy_config(overlap=True)
    d = architecture(hf).describe(hf)
    others = 0
    for rank, actual in enumerate(run_ranks(ranks, bucketed, models[model], parallel, policy, torch.bfloat16)):
        at = parallel.coordinates(rank)
        stages = buffers.stage_buffers(stage(d, parallel, at.pp), parallel, at.pp, False, overlap=True)
        counted = buffers.rank_state(stages, parallel, at, 2, MOMENTS["float32"])
        assert (counted.weights, counted.gradients, counted.optimizer) == actual, f"rank {rank}"
        others += counted != model_state(d, parallel, at, 2)
    assert others
