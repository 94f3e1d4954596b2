"""Losses against the papers' equations, answer by answer and token by token in float64.

The references do without packing, masks and weights: lists of log-probs and an advantage for each answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl_mega.algorithms.kl import kl
from skyrl_mega.algorithms.losses import LossInputs, find
from skyrl_mega.config.schema import AlgorithmConfig, KlConfig
from skyrl_mega.config.schema.losses import CispoConfig, GmpoConfig, SapoConfig
from tests.algorithms.answers import Answer, packed

CONFIGS = {
    "cispo": AlgorithmConfig(loss="cispo", cispo=CispoConfig(clip_low=0.6, clip_high=0.7)),
    "sapo": AlgorithmConfig(loss="sapo", sapo=SapoConfig(temperature_positive=1.3, temperature_negative=2.1)),
    "gmpo": AlgorithmConfig(loss="gmpo", gmpo=GmpoConfig(clip_low=0.2, clip_high=0.35)),
}


def cispo(answers: list[Answer]) -> Tensor:
    """Returns MiniMax-M1 (4): the mean over all tokens of sg(clip(r, 0.4, 1.7)) A log π, negated."""
    terms = [
        min(max(math.exp(now.item() - before), 0.4), 1.7) * advantage * now
        for tokens, old, advantage in answers
        for now, before in zip(tokens, old, strict=True)
    ]
    return -sum(terms, torch.zeros(())) / len(terms)


def sapo(answers: list[Answer]) -> Tensor:
    """Returns SAPO (5, 6): mean over answers of the mean over tokens of 4/τ · 1/(1 + e^(-τ(r - 1))) · A, negated."""
    means = []
    for tokens, old, advantage in answers:
        tau = 1.3 if advantage > 0 else 2.1
        gates = [
            4 / tau / (1 + (-tau * ((now - before).exp() - 1)).exp()) for now, before in zip(tokens, old, strict=True)
        ]
        means.append(sum(gates, torch.zeros(())) / len(gates) * advantage)
    return -sum(means, torch.zeros(())) / len(means)


def gmpo(answers: list[Answer]) -> Tensor:
    """Returns GMPO (4): mean over answers of (Π of |min(r A/|A|, clip(r) A/|A|)|)^(1/|y|) · A, negated."""
    means = []
    for tokens, old, advantage in answers:
        product = torch.ones((), dtype=torch.float64)
        for now, before in zip(tokens, old, strict=True):
            ratio = (now - before).exp()
            if advantage > 0:
                product = product * (ratio if ratio.item() <= math.exp(0.35) else math.exp(0.35) + 0 * ratio)
            else:
                product = product * (ratio if ratio.item() >= math.exp(-0.2) else math.exp(-0.2) + 0 * ratio)
        means.append(product ** (1 / len(tokens)) * advantage)
    return -sum(means, torch.zeros(())) / len(means)


REFERENCES: dict[str, tuple[Callable[[list[Answer]], Tensor], str]] = {
    "cispo": (cispo, "tokens"),
    "sapo": (sapo, "sequences"),
    "gmpo": (gmpo, "sequences"),
}


@pytest.mark.parametrize("name", REFERENCES)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 9999))
@settings(max_examples=60, deadline=None)
def test_value_and_gradient_are_the_papers(name: str, lengths: list[int], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    answers: list[Answer] = []
    for n in lengths:
        now = -torch.rand(n, generator=g, dtype=torch.float64)
        old = (now + torch.randn(n, generator=g, dtype=torch.float64) * 0.5).tolist()
        advantage = torch.randn((), generator=g, dtype=torch.float64).item()
        answers.append(([value.clone().requires_grad_() for value in now], old, advantage))
    reference, mean = REFERENCES[name]
    expected = reference(answers)
    slopes = torch.autograd.grad(expected, [t for tokens, _, _ in answers for t in tokens])

    prompts = torch.randint(1, 5, (len(lengths),), generator=g).tolist()
    logprobs, inputs = packed(answers, prompts, mean)
    loss, metrics = find(name)(inputs, CONFIGS[name])
    loss.backward()
    assert logprobs.grad is not None
    active = inputs.active_L
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(logprobs.grad[active], torch.stack(slopes), rtol=1e-9, atol=1e-12)
    assert not logprobs.grad[~active].any()
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("name", REFERENCES)
def test_on_policy_the_gradient_is_reinforces(name: str) -> None:
    """Compares each gradient at ratio 1 with -A · the gradient of log π, token by token."""
    for advantage in (2.0, -0.5):
        tokens = [torch.tensor(-0.3 * i, dtype=torch.float64, requires_grad=True) for i in range(1, 5)]
        answers: list[Answer] = [(tokens, [t.item() for t in tokens], advantage)]
        logprobs, inputs = packed(answers, [2], "tokens")
        loss, metrics = find(name)(inputs, AlgorithmConfig(loss=name))
        loss.backward()
        assert logprobs.grad is not None
        torch.testing.assert_close(
            logprobs.grad[inputs.active_L], torch.full((4,), -advantage / 4, dtype=torch.float64)
        )
        assert metrics["clip_fraction"] == 0 and metrics["kl_old"] == 0
        assert metrics["ratio"].item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_ratio_that_overflows_stays_finite(name: str) -> None:
    for old in (-1e4, 0.0):
        one = [torch.tensor(-5e3 if old == 0 else -0.5, dtype=torch.float64, requires_grad=True)]
        for advantage in (1.0, -1.0):
            logprobs, inputs = packed([(one, [old], advantage)], [1], "tokens")
            loss, _ = find(name)(inputs, AlgorithmConfig(loss=name))
            loss.backward()
            assert logprobs.grad is not None
            assert loss.isfinite() and logprobs.grad.nan_to_num(9.0)[1].isfinite()


def test_kl_estimates() -> None:
    """Compares abs and k3+ with the definitions; the gradient of k3+ equals the gradient of k2."""
    g = torch.Generator().manual_seed(0)
    reference = -torch.rand(50, generator=g, dtype=torch.float64)
    values = -torch.rand(50, generator=g, dtype=torch.float64)
    for name, value, slope in (
        ("abs", lambda d: abs(d), lambda d: -math.copysign(1, d)),
        ("k3+", lambda d: math.exp(d) - 1 - d, lambda d: -d),
    ):
        policy = values.clone().requires_grad_()
        estimate = kl(policy, reference, name)
        estimate.sum().backward()
        distances = (reference - values).tolist()
        assert policy.grad is not None
        torch.testing.assert_close(estimate, torch.tensor([value(d) for d in distances], dtype=torch.float64))
        torch.testing.assert_close(policy.grad, torch.tensor([slope(d) for d in distances], dtype=torch.float64))


def test_an_unbiased_kl_is_kl_and_has_its_gradient() -> None:
    """Compares with DeepSeek-V3.2 (7): the expectation over the old policy equals KL(policy ‖ reference), with equal
    gradient.
    """
    g = torch.Generator().manual_seed(3)
    logits, old_logits, reference = torch.randn(3, 40, generator=g, dtype=torch.float64)
    old = old_logits.log_softmax(-1)
    logits.requires_grad_()
    now = logits.log_softmax(-1)
    inputs = LossInputs(
        logprobs_L=now,
        old_L=old,
        advantages_L=torch.zeros(40, dtype=torch.float64),
        weights_L=old.exp(),
        reference_L=reference.log_softmax(-1),
    )
    loss, metrics = find("ppo")(inputs, AlgorithmConfig(kl=KlConfig(coefficient=0.5, unbiased=True)))
    (slope,) = torch.autograd.grad(loss, logits, retain_graph=True)
    exact = (now.exp() * (now - reference.log_softmax(-1))).sum()
    (expected,) = torch.autograd.grad(0.5 * exact, logits)
    assert metrics["kl"].item() == pytest.approx(exact.item(), rel=1e-9)
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-12)
