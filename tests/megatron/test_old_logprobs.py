"""Test of a step with a single mini-batch: the old log-probs come from the step's forward pass, without an extra
pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.algorithms.mismatch import ERROR, mismatch
from skyrl_mega.config.schema import AlgorithmConfig, BuildConfig, KlConfig, PolicyConfig
from skyrl_mega.megatron import objectives
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.support.ranks import run_ranks

ALGORITHM = AlgorithmConfig(importance_cap=2.0, kl=KlConfig(coefficient=0.1))


def step_of(seed: int = 3) -> Sequences:
    """Returns a step's batch: prompts, tokens not sampled by an engine, and the engine's log-probs."""
    rng = np.random.default_rng(seed)
    batch = layouts.some_batch(100)
    tokens = len(batch.tokens)
    weights = torch.from_numpy((rng.random(tokens) < 0.7).astype(np.float32))
    weights[batch.starts] = 0
    rollout = torch.from_numpy((-4.6 + 0.3 * rng.standard_normal(tokens)).astype(np.float32))
    drawn = torch.from_numpy(rng.random(tokens) < 0.9)
    batch["weights"] = weights / weights.sum()
    batch["advantages"] = torch.from_numpy(rng.standard_normal(tokens).astype(np.float32))
    batch["rollout_logprobs"] = torch.where(drawn & (weights != 0), rollout, torch.nan)
    batch["drawn"] = drawn
    batch["reference_logprobs"] = rollout + 0.1
    return batch


def train(
    rank: int, address: str, path: Path, parallel: ParallelDims, policy: PolicyConfig, apart: bool
) -> tuple[list[Any], dict[str, float]]:
    """Returns log-probs before an optimizer step and the step's metrics. The step gets old log-probs as a column, or
    computes them."""
    opened = layouts.open_rank(rank, address, path, parallel, policy)
    rows, micros = layouts.deal(step_of(), opened)
    answers = opened.logprobs(micros, squares=apart) or []
    pairs = [of_micro[:2] for of_micro in answers]
    if apart:
        for micro, (values, entropy, squares) in zip(micros, answers, strict=bool(answers)):
            micro["old_logprobs"] = values
            counts = micro["weights"] != 0
            least = torch.maximum((2 * values).exp(), (-entropy).exp())  # Σ π² ≥ π²; by Jensen ≥ exp(-H)
            assert ((squares >= least * (1 - 1e-5)) & (squares <= 1))[counts].all() and not squares[~counts].any()
    objective = objectives.objective("ppo", ALGORITHM)
    measured, metrics = opened.measure(micros, objective), opened.train(micros, objective)
    assert measured.keys() == metrics.keys() - {"grad_norm", "lr"}
    assert all(metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7) for name, value in measured.items())
    at = parallel.coordinates(rank)
    return [] if at.tp or at.cp else list(zip(rows, [values for values, _ in pairs], strict=bool(pairs))), metrics


@pytest.mark.parametrize(("ranks", "sizes"), [(1, {}), (2, {}), (2, {"context": 2}), (2, {"pipeline": 2})], ids=str)
def test_the_step_is_the_same_and_measures_the_mismatch(tmp_path: Path, ranks: int, sizes: dict[str, int]) -> None:
    build(BuildConfig(), tmp_path / "m", seed=4)
    parallel, policy = layouts.layout(ranks, **sizes), layouts.policy_config()
    with_pass, without = (run_ranks(ranks, train, tmp_path / "m", parallel, policy, apart) for apart in (True, False))
    first, second = (max((metrics for _, metrics in answers), key=len) for answers in (with_pass, without))
    assert first.keys() == second.keys()
    for name in first:
        assert second[name] == pytest.approx(first[name], rel=1e-5, abs=1e-7), name

    batch = step_of()
    policys = np.full(len(batch.tokens), np.nan)
    for pairs, _ in without:
        for rows, values in pairs:
            policys[batch.index(rows).numpy()] = values
    counts = (batch["weights"] != 0).numpy() & batch["drawn"].numpy()
    difference = policys[counts] - batch["rollout_logprobs"].numpy()[counts]
    measured = mismatch([second])
    assert measured["mismatch/logprob_abs_mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-4)
    assert measured["mismatch/logprob_abs_max"] == pytest.approx(np.abs(difference).max(), rel=1e-4)
    assert measured["mismatch/kl"] == pytest.approx((np.exp(difference) - 1 - difference).mean(), rel=1e-4)
    assert measured["mismatch/kl_k1"] == pytest.approx(-difference.mean(), rel=1e-4, abs=1e-6)
    assert measured["mismatch/far_fraction"] == pytest.approx((np.abs(difference) > np.log(2)).mean(), rel=1e-6)
    largest = np.quantile(np.abs(difference), 0.99, method="inverted_cdf")
    assert measured["mismatch/logprob_abs_p99"] == pytest.approx(largest, rel=ERROR + 1e-4)
