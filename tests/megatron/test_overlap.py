"""Tests of overlapped communication: no loss, norm, log-prob or weight may change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from skyrl_mega.config.schema import BuildConfig, PolicyConfig
from skyrl_mega.megatron import heads, objectives
from skyrl_mega.megatron import model as policy_build
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.support.ranks import run_ranks

STEPS = 3  # megatron-core learns the dependencies of a bucket in the first step, and overlaps from the second on
NOISE = 5e-4  # a step moves an element by 1e-2; gradient noise changes that by a small part
BUCKET = 5000  # elements: several buckets, and layers that share a bucket with a neighbour

MODELS = {
    "moe": BuildConfig(layers=4),
    "tied dense": BuildConfig(architecture="qwen2", head_dim=16, layers=4, tied=True),
}
CASES: list[tuple[str, int, dict[str, int], dict[str, Any]]] = [
    ("moe", 2, {}, {"micro_tokens": 40, "recompute": "full"}),
    ("moe", 4, {"expert": 2}, {}),
    ("moe", 4, {"tensor": 2, "expert": 2}, {}),
    ("moe", 4, {"pipeline": 2, "context": 2}, {}),
    ("tied dense", 2, {}, {"micro_tokens": 1000}),
    ("tied dense", 4, {"pipeline": 2, "virtual_pipeline": 2}, {}),
]


def run(
    rank: int, address: str, path: Path, other: Path, parallel: ParallelDims, policy: PolicyConfig, batch: Sequences
) -> dict[str, Any]:
    """Returns a policy's results in the order of a run."""
    bucketed = partial(policy_build.DistributedDataParallelConfig, bucket_size=BUCKET)
    with mock.patch.object(policy_build, "DistributedDataParallelConfig", bucketed):
        opened = layouts.open_rank(rank, address, path, parallel, policy)
    _, micros = layouts.deal(batch, opened)
    head_weight = heads.head_weight

    def waited(chunk: Any) -> Any:
        weight = head_weight(chunk)
        group = chunk.param_to_bucket_group[weight]
        assert not policy.overlap or (group.param_gather_dispatched and group.param_gather_handle is None)
        return weight

    heads.head_weight = waited

    def steps(count: int) -> list[dict[str, float]]:
        return [opened.train(micros, objectives.supervised) for _ in range(count)]

    def logprobs(**options: bool) -> np.ndarray:
        return np.concatenate([values for values, _ in opened.logprobs(micros, **options) or [(np.zeros(0), None)]])

    def weights() -> dict[str, np.ndarray]:
        return {name: p.numpy().copy() for name, p in opened.weights().items()}

    opened.keep_reference(other)
    return {
        "before": logprobs(),
        "steps": steps(STEPS),
        "synced": weights(),  # the sync follows a step
        "after": logprobs(),
        "more": steps(1),
        "reference": logprobs(reference=True),  # the reference may follow a step too
        "own": logprobs(),
        "last": steps(1),
        "kept": weights(),
        "groups": [len(c.bucket_groups) for c in opened.chunks],
        "overlap": [c.ddp_config.overlap_param_gather for c in opened.chunks],
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        for seed in (1, 2):
            build(config, folder / f"{name}-{seed}", seed=seed)
    return {name: [folder / f"{name}-{seed}" for seed in (1, 2)] for name in MODELS}


@pytest.mark.parametrize(
    ("model", "ranks", "sizes", "changes"), CASES, ids=[f"{m} {s or r} {c or ''}" for m, r, s, c in CASES]
)
def test_nothing_depends_on_it(
    models: dict[str, list[Path]], model: str, ranks: int, sizes: dict[str, int], changes: dict[str, Any]
) -> None:
    actual, expected = (
        run_ranks(
            ranks,
            run,
            *models[model],
            layouts.layout(ranks, **sizes),
            layouts.policy_config(overlap=overlap, **changes),
            layouts.some_batch(100),
        )
        for overlap in (True, False)
    )
    assert max(max(one["groups"]) for one in actual) > 1
    for one, other in zip(actual, expected, strict=True):
        assert all(one.pop("overlap")) and not any(other.pop("overlap"))
        assert one.pop("groups") and other.pop("groups")
        for what in ("steps", "more", "last"):
            for a, b in zip(one[what], other[what], strict=True):
                assert a == pytest.approx(b, rel=1e-4), what
        for what in ("before", "after", "reference", "own"):
            np.testing.assert_allclose(one[what], other[what], rtol=1e-3, atol=1e-3, err_msg=what)
        for what in ("synced", "kept"):
            for name, weight in one[what].items():
                np.testing.assert_allclose(weight, other[what][name], rtol=0, atol=NOISE, err_msg=f"{what}: {name}")
