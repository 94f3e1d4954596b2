"""DPPO and DRO against the formulae, token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl_mega.algorithms.losses import find
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.config.schema.losses import DppoConfig, DroConfig
from tests.algorithms.answers import Answer, packed, some_answers

CONFIG = AlgorithmConfig(
    dppo=DppoConfig(tv_low=0.1, tv_high=0.15, kl_low=0.02, kl_high=0.03), dro=DroConfig(strength=0.7)
)


def distance(name: str, now: float, before: float) -> float:
    """Returns the binary total variation, or the KL of old from current policy, of this token against all others."""
    p, q = math.exp(before), math.exp(now)
    if name == "dppo_tv":
        return abs(p - q)
    rest = (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0
    return p * math.log(p / q) + rest


def by_hand(name: str, now: Tensor, before: float, advantage: float) -> tuple[Tensor, bool]:
    """Returns a token's loss, and True if the token is left out."""
    if name == "dro":
        return -advantage * now + 0.7 / 2 * (now - before) ** 2, False
    low, high = (0.1, 0.15) if name == "dppo_tv" else (0.02, 0.03)
    ratio, far = (now - before).exp(), distance(name, now.item(), before)
    if advantage > 0 and ratio.item() > 1 and far > high:
        return 0 * ratio, True
    if advantage < 0 and ratio.item() < 1 and far > low:
        return 0 * ratio, True
    return -ratio * advantage, False


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "dro"])
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 9999))
@settings(max_examples=60, deadline=None)
def test_value_and_gradient_are_the_papers(name: str, lengths: list[int], seed: int) -> None:
    answers: list[Answer] = some_answers(lengths, seed)
    results = [
        by_hand(name, now, before, advantage)
        for tokens, old, advantage in answers
        for now, before in zip(tokens, old, strict=True)
    ]
    expected = sum((loss for loss, _ in results), torch.zeros(())) / len(results)
    slopes = torch.autograd.grad(expected, [t for tokens, _, _ in answers for t in tokens])
    logprobs, inputs = packed(answers, [2] * len(lengths), "tokens")
    loss, metrics = find(name)(inputs, CONFIG)
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(logprobs.grad[inputs.active_L], torch.stack(slopes), rtol=1e-9, atol=1e-12)
    assert metrics["clip_fraction"].item() == pytest.approx(sum(out for _, out in results) / len(results), abs=1e-12)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_rare_token_may_rise_further_than_its_ratio_lets_it(name: str) -> None:
    """Compares PPO and DPPO: a probability of 1e-4 grows tenfold, clipped by PPO only.

    A frequent token with a fall from 0.99 to 0.75 is clipped by DPPO only.
    """
    rare: Answer = ([torch.tensor(math.log(1e-3), dtype=torch.float64)], [math.log(1e-4)], 1.0)
    frequent: Answer = ([torch.tensor(math.log(0.75), dtype=torch.float64)], [math.log(0.99)], -1.0)
    for answer, by_dppo, by_ppo in ((rare, False, True), (frequent, True, False)):
        _, inputs = packed([answer], [1], "tokens")
        config = AlgorithmConfig(clip_low=0.3, clip_high=0.3)
        assert bool(find(name)(inputs, config)[1]["clip_fraction"]) is by_dppo
        assert bool(find("ppo")(inputs, config)[1]["clip_fraction"]) is by_ppo


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "dro"])
def test_certain_and_impossible_tokens_stay_finite(name: str) -> None:
    for now, before in ((0.0, -1e4), (-5e3, 0.0), (0.0, 0.0), (-1e-9, -1e-9)):
        for advantage in (1.0, -1.0):
            one = [torch.tensor(now, dtype=torch.float64)]
            logprobs, inputs = packed([(one, [before], advantage)], [1], "tokens")
            loss, metrics = find(name)(inputs, AlgorithmConfig(loss=name))
            loss.backward()
            assert logprobs.grad is not None
            assert loss.isfinite() and logprobs.grad[inputs.active_L].isfinite().all()
            assert all(value.isfinite() for value in metrics.values())
