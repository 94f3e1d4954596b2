"""Tests of every loss and every mean in every layout and split: loss, gradient norm and weights must equal a single
process's."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.algorithms.losses import LOSSES, Figures
from skyrl_mega.algorithms.token_weights import MEANS as MEANS_OF_TOKENS
from skyrl_mega.algorithms.token_weights import token_weights
from skyrl_mega.batch.mini_batch_stats import mean_importance_weight, token_selections
from skyrl_mega.config.schema import (
    AlgorithmConfig,
    BuildConfig,
    KlConfig,
    MoeConfig,
    OptimizerConfig,
    PolicyConfig,
    RejectionConfig,
)
from skyrl_mega.config.schema.entropy import EntropyConfig
from skyrl_mega.config.schema.losses import CispoConfig, ClipCovConfig, DppoConfig, GmpoConfig, GspoConfig, KlCovConfig
from skyrl_mega.megatron import objectives
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.balance import balance
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.support.ranks import run_ranks

NAMES = ("loss", "grad_norm", "expert_balance", *sorted(MEANS_OF_TOKENS - {"dual_clip_fraction"}))
MEANS = ("tokens", "sequences", "prompts", "constant", "micro_batches")
COMBINATIONS = list(product(LOSSES, MEANS))
BUDGETS = (40, 90, 400)
"""Tokens of a micro-batch. The combinations of a layout use these in turn, with a different start for each layout."""
SMOOTH = OptimizerConfig(lr=1e-2, eps=1e-2)
"""Settings with a large epsilon. Otherwise Adam's first step is nearly the sign of the gradient, and rounding decides
the sign of small gradients."""
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "DP2": (2, {}),
    "TP2 ETP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "PP2 VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "CP2": (2, {"context": 2}),
    "EP2": (2, {"expert": 2}),
    "TP2 EP2": (2, {"tensor": 2, "expert": 2}),
    "TP2 CP2": (4, {"tensor": 2, "context": 2}),
}


CORRECTED: dict[str, dict[str, Any]] = {
    "ppo": dict(importance_cap=2.0, importance_floor=0.8),
    "gspo": dict(importance_cap=2.0, rejection=RejectionConfig("sequence", 0.7, 1.4)),
    "cispo": dict(importance_cap=2.0, rejection=RejectionConfig("token", 0.7, 1.4)),
    "sapo": dict(importance_cap=2.0, rejection=RejectionConfig("geometric", 0.9, 1.1)),
    "gmpo": dict(importance_cap=2.0, importance_level="sequence"),
    "dppo_tv": dict(old_logprobs="engine", rejection=RejectionConfig(off_policy=0.05)),
    "dppo_kl": dict(rejection=RejectionConfig(outlier_low=0.6, outlier_high=1.9)),
    "clip_cov": dict(importance_cap=2.0, importance_normalize=True),
    "kl_cov": dict(importance_cap=1.5, importance_level="sequence", importance_normalize=True),
    "dro": dict(importance_cap=1.2, importance_level="sequence", importance_outside="mask"),
}
"""Corrections of the engine's mismatch, each combined with a loss."""


def algorithm(loss: str) -> AlgorithmConfig:
    """Returns an algorithm with every term, so narrow that each term clips some tokens."""
    return AlgorithmConfig(
        loss=loss,
        clip_low=0.1,
        clip_high=0.12,
        gspo=GspoConfig(clip_low=0.05, clip_high=0.08),
        gmpo=GmpoConfig(clip_low=0.1, clip_high=0.12),
        cispo=CispoConfig(clip_low=0.1, clip_high=0.12),
        dppo=DppoConfig(tv_low=5e-4, tv_high=5e-4, kl_low=5e-5, kl_high=5e-5),
        kl=KlConfig(coefficient=0.1, unbiased=loss == "cispo"),
        clip_cov=ClipCovConfig(share=0.1, low=0.001, high=1.0),
        kl_cov=KlCovConfig(share=0.1),
        entropy=EntropyConfig(coefficient=0.02, top_share=0.4 if loss in ("ppo", "gspo") else 1.0),
        **CORRECTED[loss],
    )


def turns(mean: str) -> Sequences:
    """Returns trajectories of several answers, with NaN in the observations between."""
    rng = np.random.default_rng(3)
    batch = layouts.some_batch(100)
    tokens = len(batch.tokens)
    observed = np.repeat(rng.random(tokens // 4 + 1) < 0.3, 4)[:tokens]
    mask = np.where(observed, 0, 1).astype(np.float32)
    mask[batch.starts.numpy()] = 0
    old = (-4.6 + 0.1 * rng.standard_normal(tokens)).astype(np.float32)
    columns = {
        "advantages": batch.per_token(torch.from_numpy(rng.standard_normal(len(batch)).astype(np.float32))).numpy(),
        "old_logprobs": old,
        "old_entropy": rng.random(tokens).astype(np.float32),
        "rollout_logprobs": old + 0.3 * rng.standard_normal(tokens).astype(np.float32),
        "reference_logprobs": old + 0.3 * rng.standard_normal(tokens).astype(np.float32),
    }
    of_groups = torch.tensor([4, 4, len(batch) - 8])
    batch["weights"] = token_weights(torch.from_numpy(mask), batch.lengths, mean, 3, groups_G=of_groups, length=20)
    for name, values in columns.items():
        batch[name] = torch.from_numpy(np.where(mask == 0, np.nan, values).astype(np.float32))
    return batch


def train(
    rank: int,
    address: str,
    path: Path,
    parallel: ParallelDims,
    policy: PolicyConfig,
    budgets: tuple[int, ...],
    combinations: list[tuple[str, str]],
) -> dict[str, list[dict[str, float]]]:
    """Takes a step with each loss and mean from the same weights, and returns its metrics and those of the next
    step."""
    opened = layouts.open_rank(rank, address, path, parallel, policy)
    data = parallel.coordinates(torch.distributed.get_rank()).dp
    metrics = {}
    for number, (loss, mean) in enumerate(combinations):
        opened.load(path)
        opened.reset_optimizer(policy.optimizer)
        batch, settings = turns(mean), algorithm(loss)
        for name, parts in token_selections([batch], settings, [7]).items():
            batch[name] = parts[0]
        tokens = budgets[number % len(budgets)] * parallel.context
        multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
        rows = balance(batch.lengths.tolist(), parallel.data, tokens, multiple=multiple)
        micros = [batch.take(micro) for micro in rows[data]]
        figures = Figures(importance_mean=mean_importance_weight(batch, settings))
        objective = objectives.objective(loss, settings, figures)
        metrics[f"{loss} {mean}"] = [opened.train(micros, objective), opened.measure(micros, objective)]
    return metrics


def in_turn(layout: int) -> list[tuple[str, str]]:
    """Returns the combinations of a layout: a mean for each loss, rotated to include all pairs of loss, mean and
    layout."""
    return [(loss, MEANS[(number + layout) % len(MEANS)]) for number, loss in enumerate(LOSSES)]


def steps(
    path: Path,
    ranks: int,
    sizes: dict[str, int],
    budgets: tuple[int, ...],
    combinations: list[tuple[str, str]] = COMBINATIONS,
) -> dict[str, list[dict[str, float]]]:
    policy = layouts.policy_config(moe=MoeConfig(aux_loss=0.05), optimizer=SMOOTH)
    answers = run_ranks(ranks, train, path, layouts.layout(ranks, **sizes), policy, budgets, combinations)
    return max(answers, key=lambda answer: len(next(iter(answer.values()))[0]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("losses") / "model"
    build(BuildConfig(layers=4), path, seed=1)
    return path


@pytest.fixture(scope="module")
def single(model: Path) -> dict[str, list[dict[str, float]]]:
    """Returns the results of a single process with a single micro-batch."""
    return steps(model, 1, {}, (10_000,))


def compare(actual: dict[str, list[dict[str, float]]], expected: dict[str, list[dict[str, float]]]) -> None:
    assert actual.keys() <= expected.keys() and len(expected) == len(COMBINATIONS)
    for combination, both in actual.items():
        for step, (a, b) in enumerate(zip(both, expected[combination], strict=True)):
            assert a.keys() == b.keys()
            for name in b.keys() & NAMES:
                assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), f"{combination}, step {step}, {name}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_and_every_mean_train_the_same_in_every_layout(
    model: Path, single: dict[str, list[dict[str, float]]], layout: str
) -> None:
    number = list(LAYOUTS).index(layout)
    first = number % len(BUDGETS)
    actual = steps(model, *LAYOUTS[layout], BUDGETS[first:] + BUDGETS[:first], in_turn(number))
    assert len(actual) == len(LOSSES)
    compare(actual, single)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_loss_with_every_mean_trains_the_same_in_every_layout(
    model: Path, single: dict[str, list[dict[str, float]]], layout: str
) -> None:
    actual = steps(model, *LAYOUTS[layout], BUDGETS)
    assert len(actual) == len(COMBINATIONS)
    compare(actual, single)


def test_any_two_of_loss_mean_and_layout_meet() -> None:
    met = {(loss, mean, number) for number in range(len(LAYOUTS)) for loss, mean in in_turn(number)}
    assert {(loss, mean) for loss, mean, _ in met} == set(COMBINATIONS)
    assert {(loss, number) for loss, _, number in met} == set(product(LOSSES, range(len(LAYOUTS))))
    assert {(mean, number) for _, mean, number in met} == set(product(MEANS, range(len(LAYOUTS))))


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_loss_with_every_mean_trains_the_same_in_every_cut(
    model: Path, single: dict[str, list[dict[str, float]]], budget: int
) -> None:
    actual = steps(model, 1, {}, (budget,))
    assert len(actual) == len(COMBINATIONS)
    compare(actual, single)


def test_the_combinations_differ(single: dict[str, list[dict[str, float]]]) -> None:
    """Checks the combinations: no two agree, all clip something, and the first step changes the second loss."""
    first = {name: round(both[0]["grad_norm"], 5) for name, both in single.items()}
    assert len(set(first.values())) == len(first), first
    for name, both in single.items():
        assert both[0]["clip_fraction"] > 0.001 or name.startswith(("sapo", "dro", "kl_cov")), name
        bitten = {k: v for k, v in both[0].items() if k.endswith("_fraction") and k != "clip_fraction"}
        assert bitten and all(0.001 < value < 0.999 for value in bitten.values()), (name, bitten)
        assert both[0]["loss"] != pytest.approx(both[1]["loss"], rel=1e-4), name
