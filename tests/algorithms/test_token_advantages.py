"""Rewards of turns, several rewards, and whitening, against plain Python loops over ragged random trajectories."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

import pytest
import torch

from skyrl_mega.algorithms.advantages import AdvantageInputs, TokenInputs, advantages
from skyrl_mega.config.schema import AlgorithmConfig

REWARDS = (0.0, 0.1, 0.5, 1.0, -1.0)


class Played(NamedTuple):
    """A trajectory: the group, and tokens and reward of each answer; an empty answer has no tokens."""

    group: int
    answers: list[tuple[int, float]]

    @property
    def reward(self) -> float:
        return sum(reward for _, reward in self.answers)

    @property
    def tokens(self) -> list[tuple[int, float]]:
        """(answer, reward) of each token."""
        return [(a, r if k == n - 1 else 0.0) for a, (n, r) in enumerate(self.answers) for k in range(n)]


def some(rng: random.Random, equal: bool = False) -> list[Played]:
    """Returns up to four groups of up to four trajectories; with `equal`, all answers earn the same."""
    trajectories = []
    for group in range(rng.randint(1, 4)):
        same = rng.choice(REWARDS)
        for _ in range(rng.randint(1, 4)):
            spoken = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
            trajectories.append(
                Played(group, [(n, same if equal or group == 0 else rng.choice(REWARDS)) for n in spoken])
            )
    rng.shuffle(trajectories)
    return trajectories


def inputs_of(played: list[Played], named: dict[str, torch.Tensor] | None = None) -> AdvantageInputs:
    tokens = [(i, a, r) for i, t in enumerate(played) for a, r in t.tokens]
    of, turn, rewards = zip(*tokens, strict=True) if tokens else ((), (), ())
    return AdvantageInputs(
        torch.tensor([t.reward for t in played], dtype=torch.float64),
        torch.tensor([t.group for t in played]),
        torch.tensor([len(t.tokens) for t in played]),
        token_inputs=TokenInputs(
            trajectory_T=torch.tensor(of, dtype=torch.int64),
            turn_T=torch.tensor(turn, dtype=torch.int64),
            rewards_T=torch.tensor(rewards, dtype=torch.float64),
        ),
        named=named or {},
    )


def whitened(values: list[float], of: list[float] | None = None) -> list[float]:
    """Returns the values whitened by the mean and variance of `of`, by default the values themselves."""
    of = values if of is None else of
    if len(set(of)) < 2:
        return [0.0] * len(values)
    mean, variance = statistics.fmean(of), statistics.variance(of)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def compare(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def by_turn(played: list[Played], normalize: bool = True) -> list[float]:
    """Returns section 4.1.3 of GRPO's paper with answers as steps: each token's sum of advantages of its answer and all
    later answers, or 0 if all trajectories earned the same, turn by turn.
    """
    advantages_of_tokens = []
    for t in played:
        each = [[reward for _, reward in other.answers] for other in played if other.group == t.group]
        every = [reward for rewards in each for reward in rewards]
        scale = statistics.stdev(every) + 1e-6 if normalize and len(every) > 1 else 1.0
        absent = statistics.fmean(every) if every else 0.0
        differ = any(len(set(turn)) > 1 for turn in zip_longest(*each, fillvalue=absent))
        better = [(r - statistics.fmean(every)) / scale if differ else 0.0 for _, r in t.answers]
        advantages_of_tokens += [sum(better[answer:]) for answer, _ in t.tokens]
    return advantages_of_tokens


def leave_one_out(played: list[Played]) -> list[float]:
    """Returns RLOO: the reward minus the mean of the group's other rewards; 0 if all are equal."""
    advantages_of_trajectories = []
    for i, t in enumerate(played):
        others = [other.reward for j, other in enumerate(played) if other.group == t.group and j != i]
        advantages_of_trajectories.append(t.reward - statistics.fmean(others) if {*others} - {t.reward} else 0.0)
    return advantages_of_trajectories


ESTIMATED: dict[str, Callable[[list[Played]], list[float]]] = {
    "rloo": leave_one_out,
    "reinforce": lambda played: [t.reward for t in played],
    "grpo_turns": by_turn,
}
"""Estimators without whitening, in plain Python."""


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5, 0.0])
def test_reinforce_plus_plus_is_the_discounted_sum_of_what_follows_whitened(gamma: float) -> None:
    for seed in range(30):
        played = some(random.Random(seed))
        sums = []
        for t in played:
            later = 0.0
            backwards = []
            for _, reward in reversed(t.tokens):
                later = reward + gamma * later
                backwards.append(later)
            sums += backwards[::-1]
        estimate = advantages(inputs_of(played), AlgorithmConfig(advantage="reinforce++", gamma=gamma))
        compare(estimate, whitened(sums))


@pytest.mark.parametrize("normalize", [True, False])
def test_grpo_of_turns_adds_up_what_each_answer_from_here_on_is_better(normalize: bool) -> None:
    for seed in range(30):
        played = some(random.Random(seed))
        estimate = advantages(inputs_of(played), AlgorithmConfig(advantage="grpo_turns", normalize=normalize))
        compare(estimate, by_turn(played, normalize))


def test_equal_answers_give_exactly_zero() -> None:
    for seed in range(20):
        inputs = inputs_of([t for t in some(random.Random(seed), equal=True) if t.answers])
        assert not advantages(inputs, AlgorithmConfig(advantage="grpo_turns")).any()


def test_gdpo_normalises_each_reward_by_itself() -> None:
    weights = {"right": 1.0, "short": 0.25}
    for seed in range(40):
        rng = random.Random(seed)
        groups = [g for g in range(3) for _ in range(rng.randint(1, 5))]
        rewards = {name: [rng.choice(REWARDS) if g else 0.1 for g in groups] for name in weights}
        summed = []
        for i, group in enumerate(groups):
            total = 0.0
            for name, weight in weights.items():
                group_rewards = [r for r, g in zip(rewards[name], groups, strict=True) if g == group]
                if len(set(group_rewards)) > 1:
                    total += (
                        weight
                        * (rewards[name][i] - statistics.fmean(group_rewards))
                        / (statistics.stdev(group_rewards) + 1e-6)
                    )
            summed.append(total)
        scale = statistics.stdev(summed) + 1e-6 if any(summed) else 1.0
        mean = statistics.fmean(summed)
        inputs = AdvantageInputs(
            torch.zeros(len(groups), dtype=torch.float64),
            torch.tensor(groups),
            named={name: torch.tensor(values, dtype=torch.float64) for name, values in rewards.items()},
        )
        estimate = advantages(inputs, AlgorithmConfig(advantage="gdpo", reward_weights=weights))
        compare(estimate, [(value - mean) / scale for value in summed])
        assert not estimate[: groups.count(0)].any(), "a group without a signal"


@pytest.mark.parametrize("how", ["group", "batch"])
@pytest.mark.parametrize("advantage", ["rloo", "reinforce", "grpo_turns"])
def test_whitening_is_over_the_tokens_that_have_an_advantage(how: str, advantage: str) -> None:
    for seed in range(30):
        played = some(random.Random(seed))
        inputs = inputs_of(played)
        plain = ESTIMATED[advantage](played)
        by_token = [
            (t.group, plain[place] if advantage == "grpo_turns" else plain[i])
            for place, (i, t) in enumerate((i, t) for i, t in enumerate(played) for _ in t.tokens)
        ]
        every = by_token if advantage == "grpo_turns" else [(t.group, a) for t, a in zip(played, plain, strict=True)]
        expected = [
            whitened([value], [a for g, a in by_token if how == "batch" or g == group])[0] for group, value in every
        ]
        estimate = advantages(inputs, AlgorithmConfig(advantage=advantage, whiten=how))
        # An empty trajectory has no token, so its advantage is unused.
        spoke = [True] * len(every) if advantage == "grpo_turns" else [bool(t.tokens) for t in played]
        compare(estimate[spoke], [value for value, has_tokens in zip(expected, spoke, strict=True) if has_tokens])
        assert not estimate[[not has_tokens for has_tokens in spoke]].any()


def test_a_steps_deviation_divides_and_leaves_zero() -> None:
    for seed in range(30):
        played = some(random.Random(seed))
        rewards = [t.reward for t in played]
        estimate = advantages(inputs_of(played), AlgorithmConfig(normalize=False, whiten="batch_std"))
        expected = []
        for t in played:
            group_rewards = [other.reward for other in played if other.group == t.group]
            differ = len(set(group_rewards)) > 1
            expected.append(
                (t.reward - statistics.fmean(group_rewards)) / (statistics.stdev(rewards) + 1e-6) if differ else 0.0
            )
        compare(estimate, expected)
    same = AdvantageInputs(torch.full((7,), 0.1), torch.zeros(7))
    estimate = advantages(same, AlgorithmConfig(advantage="reinforce", whiten="batch_std"))
    assert estimate.tolist() == same.r.tolist(), "nothing is divided by rounding"
    assert not advantages(same, AlgorithmConfig(normalize=False, whiten="batch_std")).any()
