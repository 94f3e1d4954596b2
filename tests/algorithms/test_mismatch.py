"""The engine's mismatch against numpy, on ragged micro-batches with NaN for uncounted and unsampled tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from skyrl_mega.algorithms.losses import LossInputs
from skyrl_mega.algorithms.mismatch import EDGES, ERROR, WITHIN, mismatch, mismatch_sums


def summed(found: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Returns the totals of micro-batches as sent to the driver by an optimizer step."""
    totals: dict[str, float] = {}
    for sums in found:
        for name, tensor in sums.items():
            values = {f"{name}.{i}": v for i, v in enumerate(tensor.tolist())} if tensor.ndim else {name: float(tensor)}
            for key, value in values.items():
                before = totals.get(key, 0.0)
                totals[key] = max(before, value) if key.endswith("_max") else before + value
    return totals


def of_micro_batch(engine: np.ndarray, policy: np.ndarray, weights: np.ndarray, drawn: np.ndarray) -> LossInputs:
    given = np.where((weights != 0) & drawn, engine, math.nan)
    return LossInputs(
        logprobs_L=torch.from_numpy(policy),
        old_L=torch.from_numpy(policy),
        advantages_L=torch.zeros(len(policy)),
        weights_L=torch.from_numpy(weights),
        rollout_L=torch.from_numpy(given),
        drawn_L=torch.from_numpy(drawn),
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_figure_equals_numpys(seed: int) -> None:
    """Compares steps of several mini-batches with distances over up to ten orders of magnitude, zero included."""
    rng = np.random.default_rng(seed)
    scale, width = 10.0 ** rng.uniform(-7, 0), rng.uniform(0.1, 4)
    steps, distances = [], []
    for _ in range(rng.integers(1, 4)):
        micro_batches = []
        for tokens in rng.integers(0, 400, rng.integers(1, 5)):
            policy = -rng.random(tokens)
            apart = scale * rng.lognormal(0, width, tokens) * rng.choice([-1, 1], tokens) * (rng.random(tokens) < 0.9)
            engine, weights, drawn = policy + apart, (rng.random(tokens) < 0.5) * 0.1, rng.random(tokens) < 0.9
            micro_batches.append(mismatch_sums(of_micro_batch(engine, policy, weights, drawn)))
            distances.append((engine - policy)[(weights != 0) & drawn])
        steps.append(summed(micro_batches))
    got, d = mismatch(steps), np.concatenate(distances)
    assert got["mismatch/logprob_abs_mean"] == pytest.approx(np.abs(d).mean())
    assert got["mismatch/logprob_abs_max"] == pytest.approx(np.abs(d).max())
    assert got["mismatch/kl_k1"] == pytest.approx(d.mean())
    assert got["mismatch/far_fraction"] == pytest.approx((np.abs(d) > math.log(2)).mean())
    if np.abs(d).max() < 20:  # beyond, k3 replaces the distance by its bound
        assert got["mismatch/kl"] == pytest.approx((np.expm1(-d) + d).mean(), rel=1e-6)
    exact = np.quantile(np.abs(d), 0.99, method="inverted_cdf")
    if exact <= EDGES[0]:
        assert got["mismatch/logprob_abs_p99"] == 0
    elif exact > EDGES[-1]:
        assert got["mismatch/logprob_abs_p99"] == got["mismatch/logprob_abs_max"]
    else:
        assert got["mismatch/logprob_abs_p99"] == pytest.approx(exact, rel=ERROR + 1e-9)
    assert ERROR < 0.05


def test_ties_at_an_edge_and_single_tokens() -> None:
    for distances in ([0.0], [1e-8], [1.0], [1.0] * 99 + [3.0], [1.0] * 98 + [3.0] * 2, [200.0]):
        d = np.array(distances)
        sums = mismatch_sums(of_micro_batch(d - 1, np.full(len(d), -1.0), np.ones(len(d)), np.ones(len(d), bool)))
        exact = np.quantile(d, 0.99, method="inverted_cdf")
        got = mismatch([summed([sums])])["mismatch/logprob_abs_p99"]
        assert got == pytest.approx(exact, rel=ERROR + 1e-9, abs=1e-8)


def test_without_tokens_and_without_log_probs() -> None:
    none = torch.zeros(3)
    sums = mismatch_sums(LossInputs(logprobs_L=none, old_L=none, advantages_L=none, weights_L=none, rollout_L=none))
    assert sums[WITHIN].shape == (len(EDGES),)
    assert set(mismatch([summed([sums])]).values()) == {0.0}
    assert mismatch_sums(LossInputs(logprobs_L=none, old_L=none, advantages_L=none, weights_L=none)) == {}
