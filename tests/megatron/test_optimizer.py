"""Tests of the optimizer: every key of `policy.optimizer` has an effect, and a step equals AdamW."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.config.schema import BuildConfig, OptimizerConfig
from skyrl_mega.megatron import objectives
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.support.ranks import run_ranks

BASE = OptimizerConfig(lr=1e-2, schedule="cosine", decay_steps=6, warmup_steps=2, weight_decay=0.1, clip_grad=0.5)
CHANGED: dict[str, Any] = dict(
    lr=2e-2,
    min_lr=5e-3,
    schedule="linear",
    warmup_steps=0,
    decay_steps=9,
    beta1=0.5,
    beta2=0.9,
    eps=1e-3,
    weight_decay=0.5,
    clip_grad=0.01,
    options={"decoupled_weight_decay": False},
    warmup_from_zero=True,
    moments="bfloat16",
)
SAME = {"streamed"}
"""Keys without effect on any bit (`test_streamed_optimizer.py`)."""


def train(
    rank: int, address: str, path: Path, parallel: ParallelDims, batch: Sequences, optimizer: OptimizerConfig
) -> Any:
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(optimizer=optimizer))
    _, micros = layouts.deal(batch, opened)
    lrs = [opened.train(micros, objectives.supervised)["lr"] for _ in range(4)]
    return lrs, {name: t.numpy().copy() for name, t in opened.weights().items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("optimizer") / "model"
    build(BuildConfig(), path, seed=1)
    return path


@pytest.fixture(scope="module")
def base(model: Path) -> Any:
    return run_ranks(1, train, model, ParallelDims(), layouts.some_batch(100), BASE)[0]


def test_every_key_is_tried() -> None:
    assert {*CHANGED, *SAME} == {f.name for f in fields(OptimizerConfig)}


@pytest.mark.parametrize("key", CHANGED)
def test_key_changes_the_weights(model: Path, base: Any, key: str) -> None:
    changed = replace(BASE, **{key: CHANGED[key]})
    _, weights = run_ranks(1, train, model, ParallelDims(), layouts.some_batch(100), changed)[0]
    assert any(not np.array_equal(weights[name], base[1][name]) for name in weights), f"{key} is dropped"


def test_learning_rates_follow_the_schedule(base: Any) -> None:
    """Checks warm-up lr·t/2, then cosine from step 2 to step 6: lr·(1 + cos(π·(t-2)/4))/2."""
    expected = [5e-3, 1e-2, 1e-2 * (1 + np.cos(np.pi / 4)) / 2, 1e-2 * (1 + np.cos(np.pi / 2)) / 2]
    np.testing.assert_allclose(base[0], expected, rtol=1e-6)


def test_a_warmup_from_zero_is_one_step_late(model: Path, base: Any) -> None:
    """Checks the delay of a step, as with torch's schedulers: torch steps the scheduler after the optimizer."""
    late = replace(BASE, warmup_from_zero=True)
    lrs, _ = run_ranks(1, train, model, ParallelDims(), layouts.some_batch(100), late)[0]
    np.testing.assert_allclose(lrs, [0.0, *base[0][:3]], rtol=1e-6)


def one_step(
    rank: int, address: str, path: Path, parallel: ParallelDims, batch: Sequences, optimizer: OptimizerConfig
) -> Any:
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(optimizer=optimizer))
    start = {name: t.clone() for name, t in opened.weights().items()}
    _, micros = layouts.deal(batch, opened)
    opened.train(micros, objectives.supervised)
    end = {name: t.clone() for name, t in opened.weights().items()}
    gradients = {name: p.main_grad.clone() for name, p in opened.params.items()}
    return [{k: v.numpy() for k, v in part.items()} for part in (start, gradients, end)]


def test_one_step_is_adamw_without_decay_of_norms(model: Path) -> None:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.3, clip_grad=0.0, beta1=0.8, beta2=0.9)
    start, gradients, end = run_ranks(1, one_step, model, ParallelDims(), layouts.some_batch(100), config)[0]
    for name, before in start.items():
        p = torch.nn.Parameter(torch.from_numpy(before).clone())
        p.grad = torch.from_numpy(gradients[name])
        decay = 0.0 if p.dim() == 1 else 0.3
        torch.optim.AdamW([p], lr=1e-2, betas=(0.8, 0.9), eps=1e-8, weight_decay=decay).step()
        np.testing.assert_allclose(end[name], p.detach().numpy(), rtol=1e-5, atol=1e-7, err_msg=name)


def spoil(
    rank: int, address: str, path: Path, parallel: ParallelDims, batch: Sequences, optimizer: OptimizerConfig
) -> Any:
    """Takes two good steps and a step with a NaN weight; returns the error and the weights before and after."""
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(optimizer=optimizer))
    _, micros = layouts.deal(batch, opened)
    for _ in range(2):
        opened.train(micros, objectives.supervised)
    before = {name: t.numpy().copy() for name, t in opened.weights().items()}
    micros[0]["weights"] = torch.full_like(micros[0]["weights"], torch.nan)
    try:
        opened.train(micros, objectives.supervised)
    except FloatingPointError as error:
        return str(error), before, {name: t.numpy().copy() for name, t in opened.weights().items()}
    return None


@pytest.mark.parametrize("clip_grad", [0.5, 0.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_is_not_finite_ends_the_step_before_the_weights_move(
    model: Path, clip_grad: float, ranks: int
) -> None:
    settings, parallel = replace(BASE, clip_grad=clip_grad), layouts.layout(ranks)
    for error, before, after in run_ranks(ranks, spoil, model, parallel, layouts.some_batch(100), settings):
        assert error.startswith("policy: gradient norm is nan; loss sums of this step: ")
        for name in before:
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)


def vanish(
    rank: int, address: str, path: Path, parallel: ParallelDims, batch: Sequences, optimizer: OptimizerConfig
) -> Any:
    """Takes a good step, a step with all weights 0, and a good step again."""
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(optimizer=optimizer))
    _, micros = layouts.deal(batch, opened)
    opened.train(micros, objectives.supervised)
    before = {name: t.numpy().copy() for name, t in opened.weights().items()}
    kept = [micro["weights"] for micro in micros]
    for micro in micros:
        micro["weights"] = torch.zeros_like(micro["weights"])
    metrics = opened.train(micros, objectives.supervised)
    after = {name: t.numpy().copy() for name, t in opened.weights().items()}
    for micro, weights in zip(micros, kept, strict=True):
        micro["weights"] = weights
    return metrics, before, after, opened.train(micros, objectives.supervised)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_of_zero_moves_no_weight(model: Path, ranks: int) -> None:
    for metrics, before, after, last in run_ranks(
        ranks, vanish, model, layouts.layout(ranks), layouts.some_batch(100), BASE
    ):
        assert metrics["grad_norm"] == 0 < last["grad_norm"]
        for name in before:
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)
