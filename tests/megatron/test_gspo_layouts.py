"""A loss over whole answers gives the single process's loss and gradient norm in every layout and cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.config.schema import AlgorithmConfig, BuildConfig, GspoConfig, KlConfig, PolicyConfig
from skyrl_mega.megatron import objectives
from skyrl_mega.megatron.sequences import Sequences
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from tests.megatron import layouts
from tests.support.ranks import run_ranks

ALGORITHM = AlgorithmConfig(
    loss="gspo", gspo=GspoConfig(clip_low=0.05, clip_high=0.08), importance_cap=2.0, kl=KlConfig(coefficient=0.1)
)
NAMES = ("loss", "grad_norm", "ratio", "clip_fraction", "kl", "importance_weight")
CUTS: list[tuple[str, int, dict[str, int], dict[str, Any]]] = [
    ("micro 40", 1, {}, {"micro_tokens": 40}),
    ("CP2", 2, {"context": 2}, {}),
    ("PP2", 2, {"pipeline": 2}, {}),
    ("EP2", 2, {"expert": 2}, {}),
    ("TP2 CP2", 4, {"tensor": 2, "context": 2}, {}),
]


def turns() -> Sequences:
    """Trajectories of several answers, with observations between them that hold NaN."""
    rng = np.random.default_rng(3)
    batch = layouts.some_batch(100)
    tokens = len(batch.tokens)
    observed = np.repeat(rng.random(tokens // 4 + 1) < 0.3, 4)[:tokens]
    weights = np.where(observed, 0, 1).astype(np.float32)
    weights[batch.starts.numpy()] = 0
    old = (-4.6 + 0.1 * rng.standard_normal(tokens)).astype(np.float32)
    columns = {
        "advantages": batch.per_token(torch.from_numpy(rng.standard_normal(len(batch)).astype(np.float32))).numpy(),
        "old_logprobs": old,
        "rollout_logprobs": old + 0.3 * rng.standard_normal(tokens).astype(np.float32),
        "reference_logprobs": old + 0.3 * rng.standard_normal(tokens).astype(np.float32),
    }
    batch["weights"] = torch.from_numpy(weights / weights.sum())
    for name, values in columns.items():
        batch[name] = torch.from_numpy(np.where(weights == 0, np.nan, values).astype(np.float32))
    return batch


def train(
    rank: int, address: str, path: Path, parallel: ParallelDims, policy: PolicyConfig, batch: Sequences
) -> list[dict[str, float]]:
    opened = layouts.open_rank(rank, address, path, parallel, policy)
    _, micros = layouts.deal(batch, opened)
    return [opened.train(micros, objectives.objective("gspo", ALGORITHM)) for _ in range(2)]


def steps(path: Path, ranks: int, sizes: dict[str, int], changes: dict[str, Any]) -> list[dict[str, float]]:
    policy = layouts.policy_config(**changes)
    answers = run_ranks(ranks, train, path, layouts.layout(ranks, **sizes), policy, turns())
    return max(answers, key=lambda answer: len(answer[0]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gspo") / "model"
    build(BuildConfig(), path, seed=1)
    return path


@pytest.fixture(scope="module")
def single(model: Path) -> list[dict[str, float]]:
    return steps(model, 1, {}, {"micro_tokens": 10_000})


@pytest.mark.parametrize(("ranks", "sizes", "changes"), [c[1:] for c in CUTS], ids=[c[0] for c in CUTS])
def test_gspo_trains_the_same_in_every_layout(
    model: Path, single: list[dict[str, float]], ranks: int, sizes: dict[str, int], changes: dict[str, Any]
) -> None:
    for step, (a, b) in enumerate(zip(steps(model, ranks, sizes, changes), single, strict=True)):
        for name in NAMES:
            assert a[name] == pytest.approx(b[name], rel=1e-4), f"step {step}, {name}"
    assert 0.05 < single[0]["clip_fraction"] < 0.95
    assert single[0]["loss"] != pytest.approx(single[1]["loss"], rel=1e-3)
