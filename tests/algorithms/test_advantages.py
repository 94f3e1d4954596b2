"""Advantages against plain Python loops."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    TokenInputs,
    advantages,
    check,
    is_per_token,
    varied,
)
from skyrl_mega.batch.signal import rewards_differ
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig

REWARDS = st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0])
SAMPLES = st.lists(st.tuples(REWARDS, st.integers(-3, 5), st.integers(1, 9)), min_size=1, max_size=40)
"""Samples of (reward, group, tokens)."""


GREEDY = [0.1, None, 1.0, -1.0, 0.5, 0.0]
"""Reward of each group's greedy answer; None if its environment failed."""


def by_loop(samples: list[tuple[float, int, int]], kind: str) -> list[float]:
    """Returns each trajectory's advantage by the papers' definitions, from (reward, group, tokens)."""
    rewards = [r for r, _, _ in samples]
    out = []
    for i, (reward, group, _) in enumerate(samples):
        group_samples = [(r, n) for r, g, n in samples if g == group]
        earned = [r for r, _ in group_samples]
        others = [r for j, (r, g, _) in enumerate(samples) if g == group and j != i]
        mean = statistics.fmean(earned)
        if kind == "remax":
            greedy = GREEDY[group % len(GREEDY)]
            out.append(0.0 if greedy is None else reward - greedy)
        elif kind.startswith("reinforce"):
            out.append(reward - mean if kind == "reinforce++_baseline" and len(set(earned)) > 1 else
                       0.0 if kind == "reinforce++_baseline" else reward)  # fmt: skip
        elif len(set(earned)) == 1:
            out.append(0.0)
        elif kind == "rloo":
            out.append(reward - statistics.fmean(others))
        elif kind == "opo":
            out.append(reward - sum(r * n for r, n in group_samples) / sum(n for _, n in group_samples))
        elif kind == "pass_at_k":
            out.append(max(earned) - max(others))
        elif kind == "gpg":
            telling = [g for _, g, _ in samples if len({r for r, h, _ in samples if h == g}) > 1]
            out.append(len(samples) / len(telling) * (reward - mean))
        elif kind == "maxrl":
            out.append((reward - mean) / (mean + 1e-6))
        else:
            scale = 1.0 if kind == "centred" else statistics.stdev(earned) + 1e-6
            out.append((reward - mean) / scale)
    if kind.startswith("reinforce+"):
        if len(set(out)) == 1:
            return [0.0] * len(out)
        tokens = [value for value, (_, _, n) in zip(out, samples, strict=True) for _ in range(n)]
        mean, variance = statistics.fmean(tokens), statistics.variance(tokens) if len(tokens) > 1 else 0.0
        return [(value - mean) / math.sqrt(variance + 1e-8) for value in out]
    if kind == "gdpo" and any(out):
        return [value / (statistics.stdev(out) + 1e-6) for value in out]
    return rewards if kind == "reinforce" else out


KINDS = [name for name in ADVANTAGES if name not in ("gae", "optimal_token_baseline")]
"""Estimators based on rewards alone. `test_gae.py` and `test_token_baseline.py` test the other estimators."""


def inputs_of(samples: list[tuple[float, int, int]], dtype: torch.dtype = torch.float64) -> AdvantageInputs:
    """Returns inputs with an answer per trajectory and the reward at the last token."""
    rewards, groups, tokens = zip(*samples, strict=True) if samples else ((), (), ())
    by_token = [[0.0] * (n - 1) + [r] for r, _, n in samples]
    greedy = [GREEDY[g % len(GREEDY)] for g in groups]
    return AdvantageInputs(
        torch.tensor(rewards, dtype=dtype),
        torch.tensor(groups, dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int64),
        greedy_N=torch.tensor([math.nan if r is None else r for r in greedy], dtype=dtype),
        token_inputs=TokenInputs(
            trajectory_T=torch.tensor([i for i, of in enumerate(by_token) for _ in of], dtype=torch.int64),
            turn_T=torch.zeros(sum(map(len, by_token)), dtype=torch.int64),
            rewards_T=torch.tensor([r for of in by_token for r in of], dtype=dtype),
        ),
    )


def of_trajectories(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Returns an advantage per trajectory of a single answer, after checking for equal advantages of all tokens."""
    estimate = advantages(inputs, config)
    if not is_per_token(config):
        return estimate
    last = torch.ones(len(estimate), dtype=torch.bool)
    last[:-1] = inputs.token.trajectory_T.diff() != 0
    assert torch.equal(estimate, estimate[last][inputs.token.trajectory_T])
    return estimate[last]


@pytest.mark.parametrize("kind", [*KINDS, "centred"])
@given(samples=SAMPLES)
@settings(max_examples=60, deadline=None)
def test_groups_in_any_order_equal_a_loop(kind: str, samples: list[tuple[float, int, int]]) -> None:
    if kind == "maxrl":
        samples = [(abs(r), g, n) for r, g, n in samples]
    config = AlgorithmConfig(advantage="grpo" if kind == "centred" else kind, normalize=kind != "centred")
    expected = torch.tensor(by_loop(samples, kind), dtype=torch.float64)
    torch.testing.assert_close(of_trajectories(inputs_of(samples), config), expected, rtol=1e-9, atol=1e-9)


@given(samples=SAMPLES)
@settings(max_examples=60, deadline=None)
def test_varied_is_a_group_with_two_different_rewards(samples: list[tuple[float, int, int]]) -> None:
    got = varied(torch.tensor([r for r, _, _ in samples]), torch.tensor([g for _, g, _ in samples]))
    assert got.tolist() == [len({r for r, h, _ in samples if h == g}) > 1 for _, g, _ in samples]


@pytest.mark.parametrize("size", [7, 10, 31])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"reinforce"}))
def test_equal_rewards_give_exactly_zero(kind: str, size: int) -> None:
    # Ten times 0.1 is not exactly 1 in floating point: without care, the residue is divided by a tiny deviation.
    inputs = inputs_of([(0.1, 0, 3 + i) for i in range(size)])
    assert advantages(inputs, AlgorithmConfig(advantage=kind)).eq(0).all()


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo", "pass_at_k", "maxrl", "gpg", "gdpo"])
def test_a_group_of_one_says_nothing(kind: str) -> None:
    inputs = inputs_of([(1.0, 7, 2), (0.0, 8, 2), (1.0, 8, 2)])
    estimate = advantages(inputs, AlgorithmConfig(advantage=kind))
    assert estimate[0] == 0 and estimate[2] > 0


def test_rewards_that_maxrl_would_turn_around_are_refused() -> None:
    with pytest.raises(UserError, match=r"maxrl: a reward is -1; allowed are rewards of at least 0"):
        advantages(inputs_of([(1.0, 0, 1), (-1.0, 0, 1)]), AlgorithmConfig(advantage="maxrl"))


def test_only_a_single_best_one_gains() -> None:
    samples = [(0.2, 0, 1), (1.0, 0, 1), (0.7, 0, 1), (1.0, 1, 1), (1.0, 1, 1), (0.0, 1, 1)]
    estimate = advantages(inputs_of(samples), AlgorithmConfig(advantage="pass_at_k"))
    torch.testing.assert_close(estimate, torch.tensor([0, 0.3, 0, 0, 0, 0], dtype=torch.float64))


def test_reinforce_is_the_reward() -> None:
    rewards = torch.tensor([1.0, -2.0])
    assert torch.equal(
        advantages(AdvantageInputs(rewards, torch.zeros(2)), AlgorithmConfig(advantage="reinforce")), rewards
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_dtype_is_the_rewards(kind: str) -> None:
    for dtype in (torch.float32, torch.float64):
        inputs = inputs_of([(0.0, 0, 1), (1.0, 0, 2)], dtype)
        assert advantages(inputs, AlgorithmConfig(advantage=kind)).dtype == dtype


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[N\]"):
        AdvantageInputs(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="needs tokens_N"):
        advantages(AdvantageInputs(torch.zeros(2), torch.zeros(2)), AlgorithmConfig(advantage="opo"))
    with pytest.raises(ValueError, match=r"\[N\]"):
        AdvantageInputs(torch.zeros(2), torch.zeros(2), greedy_N=torch.zeros(3))
    with pytest.raises(ValueError, match="needs greedy_N"):
        advantages(AdvantageInputs(torch.zeros(2), torch.zeros(2)), AlgorithmConfig(advantage="remax"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_trajectories_no_advantages(kind: str) -> None:
    assert of_trajectories(inputs_of([]), AlgorithmConfig(advantage=kind)).shape == (0,)


def test_an_estimator_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def ranks(inputs, algorithm):\n    return inputs.rewards_N.argsort().argsort()\n"
        "def short(inputs, algorithm):\n    return inputs.rewards_N[:1]\n"
    )
    inputs = inputs_of([(0.5, 0, 1), (0.1, 0, 1), (0.9, 0, 1)])
    algorithm = AlgorithmConfig(advantage=f"{tmp_path / 'own.py'}:ranks")
    check(algorithm)
    assert advantages(inputs, algorithm).tolist() == [1.0, 0.0, 2.0]
    with pytest.raises(
        UserError, match=r"it gives \(1,\) for \(3,\) trajectories; return one number for each, or mark"
    ):
        advantages(inputs, AlgorithmConfig(advantage=f"{tmp_path / 'own.py'}:short"))
    with pytest.raises(
        UserError, match=r"algorithm.advantage = grop: did you mean grpo\? allowed is one of grpo, rloo"
    ):
        check(AlgorithmConfig(advantage="grop"))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_no_number_is_refused(wrong: float) -> None:
    rewards, groups = torch.tensor([0.0, wrong, 1.0]), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"reward 1 is (nan|-?inf); allowed is a finite number"):
        AdvantageInputs(rewards, groups)
    with pytest.raises(ValueError, match="allowed is a finite number"):
        rewards_differ([rewards.tolist()])
