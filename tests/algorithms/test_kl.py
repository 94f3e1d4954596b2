"""KL estimators against the exact KL of a categorical distribution."""

from __future__ import annotations

import pytest
import torch

from skyrl_mega.algorithms.kl import kl

VOCABULARY = 7


def expected_estimate_and_gradient(estimator: str, logits: torch.Tensor, reference: torch.Tensor):
    """Returns exact expectations over the vocabulary: Σ p(x) k(x) and Σ p(x) ∇k(x), sampling distribution fixed."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    estimate = (logprobs.detach().exp() * kl(logprobs, reference, estimator)).sum()
    estimate.backward()
    return estimate.item(), logits.grad


def exact(logits: torch.Tensor, reference: torch.Tensor, reverse: bool):
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    first, second = (reference, logprobs) if reverse else (logprobs, reference)
    value = (first.exp() * (first - second)).sum()
    value.backward()
    return value.item(), logits.grad


@pytest.fixture
def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCABULARY, generator=g, dtype=torch.float64)
    return logits, torch.randn(VOCABULARY, generator=g, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str, distributions: tuple[torch.Tensor, torch.Tensor]) -> None:
    value, _ = expected_estimate_and_gradient(estimator, *distributions)
    assert value == pytest.approx(exact(*distributions, reverse=False)[0], rel=1e-12)


def test_gradients_are_those_that_the_docstring_claims(distributions: tuple[torch.Tensor, torch.Tensor]) -> None:
    gradient = {k: expected_estimate_and_gradient(k, *distributions)[1] for k in ("k1", "k2", "k3")}
    torch.testing.assert_close(gradient["k1"], torch.zeros(VOCABULARY, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient["k2"], exact(*distributions, reverse=False)[1])
    torch.testing.assert_close(gradient["k3"], exact(*distributions, reverse=True)[1])


def test_k3_is_exact_near_zero() -> None:
    # exp(d) - 1 - d loses every digit here; expm1 keeps them: d²/2.
    assert kl(torch.tensor([0.0]), torch.tensor([1e-4]), "k3").item() == pytest.approx(5e-9, rel=1e-2)


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl(torch.zeros(1), torch.zeros(1), "k4")
