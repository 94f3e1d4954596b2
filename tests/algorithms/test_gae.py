"""GAE against the paper's sum, token by token in plain Python, over ragged trajectories of several answers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from skyrl_mega.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    TokenInputs,
    advantages,
    check,
    estimate,
    per_token,
)
from skyrl_mega.algorithms.advantages.gae import gae
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.config.schema.critic import GaeConfig


def by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Returns equation 16 of arXiv:1506.02438 for a trajectory, A_t = Σ_l (γλ)^l δ_{t+l}, without recursion."""
    deltas = []
    for t in range(len(rewards)):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        deltas.append(rewards[t] + gamma * following - values[t])
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(deltas))) for t in range(len(deltas))]


def carried_over(rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float) -> list[float]:
    """Returns the advantages of a trajectory with observations between answers, by verl's convention.

    A masked token passes the following value and advantage on unchanged, and the token's own inputs are ignored.
    """
    advantage, following, carried = [0.0] * len(mask), 0.0, 0.0
    for t in range(len(mask) - 1, -1, -1):
        delta = rewards[t] + gamma * following - values[t]
        advantage[t] = delta + gamma * lam * carried
        following = mask[t] * values[t] + (1 - mask[t]) * following
        carried = mask[t] * advantage[t] + (1 - mask[t]) * carried
    return advantage


def inputs(lengths: list[int], rewards: np.ndarray, values: np.ndarray) -> AdvantageInputs:
    """Returns inputs of trajectories with these token counts; empty trajectories are absent from all token columns."""
    trajectory = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    token = TokenInputs(
        trajectory_T=trajectory,
        turn_T=torch.zeros_like(trajectory),
        rewards_T=torch.from_numpy(rewards),
        values_T=torch.from_numpy(values),
    )
    of = torch.arange(len(lengths))
    return AdvantageInputs(torch.zeros(len(lengths), dtype=torch.float64), of, token_inputs=token)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.9, 0.0)])
@pytest.mark.parametrize("seed", range(4))
def test_gae_is_the_sum_of_the_paper(gamma: float, lam: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(0, 30, 12)]
    rewards, values = rng.normal(size=sum(lengths)) * (rng.random(sum(lengths)) < 0.2), rng.normal(size=sum(lengths))
    algorithm = AlgorithmConfig(advantage="gae", gamma=gamma, gae=GaeConfig(lam=lam))
    estimate = gae(inputs(lengths, rewards, values), algorithm)
    expected, at = [], 0
    for n in lengths:
        expected += by_hand(rewards[at : at + n].tolist(), values[at : at + n].tolist(), gamma, lam)
        at += n
    np.testing.assert_allclose(estimate.numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_observations_take_no_time(seed: int) -> None:
    """Compares with verl's convention: the token before an observation uses the first token after it."""
    rng = np.random.default_rng(seed)
    gamma, lam = rng.uniform(0.8, 1, 2)
    algorithm = AlgorithmConfig(advantage="gae", gamma=float(gamma), gae=GaeConfig(lam=float(lam)))
    lengths, own_rewards, own_values, expected = [], [], [], []
    for _ in range(5):
        length = int(rng.integers(1, 30))
        mask = (rng.random(length) < rng.uniform(0.1, 0.9)).astype(int)
        values, rewards = rng.normal(size=length), rng.normal(size=length) * (rng.random(length) < 0.3)
        carried = carried_over(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam)
        at = np.flatnonzero(mask)
        lengths.append(len(at))
        own_rewards.append(rewards[at])
        own_values.append(values[at])
        expected.append(np.array(carried)[at])
    carried = gae(inputs(lengths, np.concatenate(own_rewards), np.concatenate(own_values)), algorithm)
    np.testing.assert_allclose(carried.numpy(), np.concatenate(expected), rtol=1e-9, atol=1e-9)


def test_with_lambda_1_returns_are_what_was_earned_from_the_token_on() -> None:
    rewards, values = np.array([0.0, 0.5, 0.0, 1.0]), np.array([3.0, -1.0, 2.0, 0.5])
    estimate = gae(inputs([4], rewards, values), AlgorithmConfig(advantage="gae", gae=GaeConfig(lam=1.0)))
    np.testing.assert_allclose(estimate.numpy() + values, [1.5, 1.5, 1.0, 1.0], rtol=1e-12)


def test_no_tokens_have_no_advantages() -> None:
    nothing = np.zeros(0)
    assert advantages(inputs([0, 0], nothing, nothing), AlgorithmConfig(advantage="gae")).shape == (0,)


@pytest.mark.parametrize("seed", range(3))
def test_whitening_is_over_the_tokens_that_have_a_value(seed: int) -> None:
    """Whitens values with filtered trajectories: tokens without a value count neither for the mean nor the deviation.

    The inputs of the returns stay unchanged.
    """
    rng = np.random.default_rng(seed)
    lengths = [3, 0, 9, 1, 7, 30]
    known = np.repeat([1, 1, 0, 1, 1, 0], lengths).astype(bool)
    values = np.where(known, rng.normal(2.0, 3.0, sum(lengths)), 0.0)
    given = inputs(lengths, rng.normal(size=sum(lengths)), values)
    given = replace(given, token_inputs=replace(given.token, known_T=torch.from_numpy(known)))
    algorithm = AlgorithmConfig(advantage="gae", whiten="batch", gamma=0.99, gae=GaeConfig(lam=0.9))
    plain, at = list[float](), 0
    for n in lengths:
        part = slice(at, at + n)
        plain += by_hand(given.token.rewards_T[part].tolist(), values[part].tolist(), algorithm.gamma, 0.9)
        at += n
    np.testing.assert_allclose(estimate(given, algorithm).numpy(), plain, rtol=1e-9, atol=1e-9)
    kept = [a for a, k in zip(plain, known, strict=True) if k]
    mean = sum(kept) / len(kept)
    variance = sum((a - mean) ** 2 for a in kept) / (len(kept) - 1)
    expected = [(a - mean) / math.sqrt(variance + 1e-8) if k else 0.0 for a, k in zip(plain, known, strict=True)]
    np.testing.assert_allclose(advantages(given, algorithm).numpy(), expected, rtol=1e-9, atol=1e-9)


def test_an_own_estimator_cannot_ask_for_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejects an own estimator with values: only gae adds a critic."""
    check(AlgorithmConfig(advantage="gae"))
    estimator = per_token("values")(lambda given, _: given.token.rewards_T)
    monkeypatch.setitem(ADVANTAGES, "own", estimator)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"algorithm\.advantage = own: it needs a critic's values"):
        check(AlgorithmConfig(advantage="own"))
