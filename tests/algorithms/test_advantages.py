"""Advantages against plain Python loops."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.algorithms.advantages import advantages, grpo, reinforce, rloo, varied
from skyrl_mega.algorithms.filters import informative_groups
from skyrl_mega.config.schema import AlgorithmConfig

REWARDS = st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0])
SAMPLES = st.lists(st.tuples(REWARDS, st.integers(-3, 5)), min_size=1, max_size=40)


def by_loop(samples: list[tuple[float, int]], kind: str) -> list[float]:
    out = []
    for i, (reward, group) in enumerate(samples):
        own = [r for r, g in samples if g == group]
        others = [r for j, (r, g) in enumerate(samples) if g == group and j != i]
        if len(set(own)) == 1:
            out.append(0.0)
        elif kind == "rloo":
            out.append(reward - statistics.fmean(others))
        else:
            scale = statistics.stdev(own) + 1e-6 if kind == "grpo" else 1.0
            out.append((reward - statistics.fmean(own)) / scale)
    return out


@pytest.mark.parametrize("kind", ["grpo", "centred", "rloo"])
@given(samples=SAMPLES)
@settings(max_examples=60, deadline=None)
def test_groups_in_any_order_equal_a_loop(kind: str, samples: list[tuple[float, int]]) -> None:
    rewards = torch.tensor([r for r, _ in samples], dtype=torch.float64)
    groups = torch.tensor([g for _, g in samples])
    config = AlgorithmConfig(advantage="rloo" if kind == "rloo" else "grpo", normalize=kind == "grpo")
    expected = torch.tensor(by_loop(samples, kind), dtype=torch.float64)
    torch.testing.assert_close(advantages(rewards, groups, config), expected, rtol=1e-9, atol=1e-9)


@given(samples=SAMPLES)
@settings(max_examples=60, deadline=None)
def test_varied_is_a_group_with_two_different_rewards(samples: list[tuple[float, int]]) -> None:
    got = varied(torch.tensor([r for r, _ in samples]), torch.tensor([g for _, g in samples]))
    assert got.tolist() == [len({r for r, h in samples if h == g}) > 1 for _, g in samples]


@pytest.mark.parametrize("size", [7, 10, 31])
def test_equal_rewards_give_exactly_zero(size: int) -> None:
    # Ten times 0.1 do not sum to 1 in floating point: without care the residue would be divided by a tiny deviation.
    rewards, groups = torch.full((size,), 0.1, dtype=torch.float64), torch.zeros(size, dtype=torch.long)
    assert grpo(rewards, groups).eq(0).all()
    assert rloo(rewards, groups).eq(0).all()


def test_a_group_of_one_says_nothing() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([7, 8, 8])
    assert grpo(rewards, groups)[0] == 0
    assert rloo(rewards, groups)[0] == 0
    assert rloo(rewards, groups)[1:].tolist() == [-1.0, 1.0]


def test_reinforce_is_the_reward() -> None:
    rewards = torch.tensor([1.0, -2.0])
    assert torch.equal(reinforce(rewards), rewards)


def test_the_dtype_is_the_rewards() -> None:
    for dtype in (torch.float32, torch.float64):
        assert grpo(torch.tensor([0.0, 1.0], dtype=dtype), torch.zeros(2, dtype=torch.long)).dtype == dtype


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[N\]"):
        grpo(torch.zeros(3), torch.zeros(2))


def test_no_trajectories_no_advantages() -> None:
    none = torch.zeros(0)
    for kind in ("grpo", "rloo", "reinforce"):
        assert advantages(none, none.long(), AlgorithmConfig(advantage=kind)).shape == (0,)


def test_informative_groups() -> None:
    assert informative_groups(torch.tensor([[0.0, 0.0], [0.0, 1.0]])).tolist() == [False, True]
