"""The optimal token baseline against plain Python loops over ragged groups, token by token."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
import torch

from skyrl_mega.algorithms.advantages import AdvantageInputs, TokenInputs, advantages
from skyrl_mega.config.schema import AlgorithmConfig

NAME = "optimal_token_baseline"


class Played(NamedTuple):
    """A trajectory: the group, True if the distributions are known, and each token's reward, probability and Σ π²."""

    group: int
    known: bool
    tokens: list[tuple[float, float, float]]


def distribution(rng: random.Random) -> tuple[float, float]:
    """Returns the probability of a sampled token and the sum of all squared probabilities; sometimes both are 1."""
    if rng.random() < 0.15:
        return 1.0, 1.0
    weights = [math.exp(rng.gauss(0, 2)) for _ in range(rng.randint(2, 6))]
    probs = [weight / sum(weights) for weight in weights]
    return rng.choices(probs, probs)[0], sum(p * p for p in probs)


def some(rng: random.Random) -> list[Played]:
    """Returns up to four groups of up to five trajectories of 0 to 7 tokens, with rewards at some tokens."""
    trajectories = []
    for group in range(rng.randint(1, 4)):
        for _ in range(rng.randint(1, 5)):
            length = rng.randint(0, 7)
            last = [0.0] * (length - 1) + [rng.choice([0.0, 1.0])]
            rewards = last if rng.random() < 0.5 else [rng.choice([0.0, 0.0, 0.5, -1.0]) for _ in range(length)]
            known = rng.random() < 0.8
            tokens = [(r, *(distribution(rng) if known else (1.0, 0.0))) for r in rewards[:length]]
            trajectories.append(Played(group, known, tokens))
    rng.shuffle(trajectories)
    return trajectories


def inputs_of(played: list[Played]) -> AdvantageInputs:
    rows = [(i, t.known, *token) for i, t in enumerate(played) for token in t.tokens]
    of, known, rewards, probs, squares = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return AdvantageInputs(
        torch.tensor([sum(r for r, _, _ in t.tokens) for t in played], dtype=torch.float64),
        torch.tensor([t.group for t in played]),
        token_inputs=TokenInputs(
            trajectory_T=torch.tensor(of, dtype=torch.int64),
            turn_T=torch.zeros(len(of), dtype=torch.int64),
            rewards_T=torch.tensor(rewards, dtype=torch.float64),
            known_T=torch.tensor(known, dtype=torch.bool),
            old_T=torch.tensor(probs, dtype=torch.float64).log(),
            squares_T=torch.tensor(squares, dtype=torch.float64),
        ),
    )


def by_loop(played: list[Played]) -> list[float]:
    """Returns A_t = G_t - Σ G_t W_t / Σ W_t over the trajectories of the group with a t-th token."""
    advantages_of_tokens = []
    for one in played:
        for t in range(len(one.tokens)):
            pairs = [
                (later(other, t), moved(other, t))
                for other in played
                if other.group == one.group and other.known and len(other.tokens) > t
            ]
            total = math.fsum(w for _, w in pairs)
            if not one.known or total == 0 or len({g for g, _ in pairs}) == 1:
                advantages_of_tokens.append(0.0)
            else:
                advantages_of_tokens.append(later(one, t) - math.fsum(g * w for g, w in pairs) / total)
    return advantages_of_tokens


def later(one: Played, t: int) -> float:
    """Returns G_t."""
    return sum(reward for reward, _, _ in one.tokens[t:])


def moved(one: Played, t: int) -> float:
    """Returns W_t."""
    return math.fsum(1 - 2 * p + squares for _, p, squares in one.tokens[: t + 1])


def test_it_equals_loops() -> None:
    rng, signals = random.Random(3), 0
    for _ in range(200):
        played = some(rng)
        estimate = advantages(inputs_of(played), AlgorithmConfig(advantage=NAME))
        expected = torch.tensor(by_loop(played), dtype=torch.float64)
        torch.testing.assert_close(estimate, expected, rtol=1e-9, atol=1e-9)
        signals += int(estimate.count_nonzero())
    assert signals > 500


def test_a_weight_is_the_squared_gradient_of_the_log_probs_by_the_logits() -> None:
    """Compares with W_t by autograd: the squared norm of the gradient of the first t log-probs by all logits."""
    g = torch.Generator().manual_seed(1)
    for lengths in ((1, 1), (4, 4, 2), (1, 5, 3, 3)):
        rewards = torch.randn(len(lengths), generator=g, dtype=torch.float64).tolist()
        played: list[Played] = []
        weights: list[list[float]] = []
        for n, reward in zip(lengths, rewards, strict=True):
            logits = 2 * torch.randn(n, 6, generator=g, dtype=torch.float64)
            logits.requires_grad_()
            logprobs, chosen = logits.log_softmax(-1), torch.randint(6, (n, 1), generator=g)
            so_far = logprobs.gather(1, chosen)[:, 0].cumsum(0)
            slopes = [torch.autograd.grad(total, logits, retain_graph=True)[0] for total in so_far]
            weights.append([float(slope.square().sum()) for slope in slopes])
            drawn, probs = logprobs.exp().gather(1, chosen)[:, 0].tolist(), logprobs.exp().tolist()
            squares = [math.fsum(p * p for p in row) for row in probs]
            tokens = zip([0.0] * (n - 1) + [reward], drawn, squares, strict=True)
            played.append(Played(0, True, list(tokens)))
        expected = []
        for n, reward in zip(lengths, rewards, strict=True):
            for t in range(n):  # the only reward is at the last token: G_t equals this reward at each token
                pairs = [(r, w[t]) for r, w in zip(rewards, weights, strict=True) if len(w) > t]
                baseline = math.fsum(r * w for r, w in pairs) / math.fsum(w for _, w in pairs)
                expected.append(reward - baseline if len(pairs) > 1 else 0.0)
        estimate = advantages(inputs_of(played), AlgorithmConfig(advantage=NAME))
        torch.testing.assert_close(estimate, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
        assert estimate.count_nonzero() >= 2


@pytest.mark.parametrize("size", [7, 10, 31])
def test_equal_rewards_give_exactly_zero(size: int) -> None:
    """Uses ten rewards of 0.1, with a mean different from 0.1 in floating point."""
    rng = random.Random(size)
    played = [Played(0, True, [(0.0, *distribution(rng))] * i + [(0.1, *distribution(rng))]) for i in range(size)]
    assert not advantages(inputs_of(played), AlgorithmConfig(advantage=NAME)).any()


def test_nothing_is_said_where_no_other_is_as_long() -> None:
    """Compares tokens without a baseline: longest trajectory, group of one trajectory, unknown distributions."""
    token = (0.5, 0.4)
    long, short = [(0.0, *token), (0.0, *token), (1.0, *token)], [(0.0, *token)]
    played = [Played(0, True, long), Played(0, True, short), Played(0, False, long), Played(1, True, long)]
    estimate = advantages(inputs_of(played), AlgorithmConfig(advantage=NAME))
    assert estimate.tolist() == pytest.approx([0.5, 0, 0, -0.5, 0, 0, 0, 0, 0, 0], abs=1e-12)


def test_a_token_that_was_certain_has_no_weight_in_float32() -> None:
    """Uses a token with 1 - 2 π + Σ π² slightly below 0: the weight is 0."""
    played = [Played(0, True, [(1.0, 1.0, 1.0 - 6e-8)]), Played(0, True, [(0.0, 0.5, 0.5)])]
    assert advantages(inputs_of(played), AlgorithmConfig(advantage=NAME)).tolist() == [1.0, 0.0]


def test_no_tokens_no_advantages() -> None:
    nothing = [Played(0, True, []), Played(0, True, [])]
    assert advantages(inputs_of(nothing), AlgorithmConfig(advantage=NAME)).shape == (0,)
