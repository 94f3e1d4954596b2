"""GSPO against equation 5 of the paper (arXiv:2507.18071), computed sequence by sequence in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl_mega.algorithms.losses import LossInputs, find
from skyrl_mega.algorithms.token_weights import token_weights
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.config.schema.losses import GspoConfig

CONFIG = AlgorithmConfig(loss="gspo", gspo=GspoConfig(clip_low=0.05, clip_high=0.1))


def by_hand(now: list[Tensor], old: list[Tensor], advantages: list[float]) -> tuple[Tensor, float]:
    """Returns -1/G Σ_i min(s_i A_i, clip(s_i) A_i), and the share of answers with a clipped term."""
    terms: list[Tensor] = []
    clipped = 0
    for now_Y, old_Y, advantage in zip(now, old, advantages, strict=True):
        s = (now_Y.sum() - old_Y.sum()).div(len(now_Y)).exp()
        low, high = CONFIG.gspo.clip_low, CONFIG.gspo.clip_high
        value = s.item()
        bounded = min(max(value, 1 - low), 1 + high)
        cut = bounded * advantage < value * advantage
        terms.append(0 * s + bounded * advantage if cut else s * advantage)
        clipped += cut
    return -sum(terms, torch.zeros(())) / len(terms), clipped / len(terms)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_loss_gradient_and_clip_fraction_are_the_papers(lengths: list[int], seed: int) -> None:
    """Compares answers after prompts of random lengths with NaN entries."""
    g = torch.Generator().manual_seed(seed)
    now = [(-torch.rand(n, generator=g, dtype=torch.float64)).requires_grad_() for n in lengths]
    old = [(row + torch.randn(len(row), generator=g, dtype=torch.float64) * 0.2).detach() for row in now]
    advantages = torch.randn(len(lengths), generator=g, dtype=torch.float64).tolist()
    expected, share = by_hand(now, old, advantages)
    slopes = torch.autograd.grad(expected, now)

    prompts = torch.randint(1, 5, (len(lengths),), generator=g).tolist()
    whole = [p + n for p, n in zip(prompts, lengths, strict=True)]
    mask = torch.cat([torch.tensor([0.0] * p + [1.0] * n) for p, n in zip(prompts, lengths, strict=True)])

    def row(values: list[Tensor]) -> Tensor:
        gap = torch.tensor(torch.nan, dtype=torch.float64)
        return torch.cat([part for p, v in zip(prompts, values, strict=True) for part in (gap.repeat(p), v)])

    logprobs = row([v.detach() for v in now]).requires_grad_()
    inputs = LossInputs(
        logprobs_L=logprobs,
        old_L=row(old),
        advantages_L=row([torch.full((n,), a).double() for n, a in zip(lengths, advantages, strict=True)]),
        weights_L=token_weights(mask, torch.tensor(whole), "sequences").double(),
        sequence_L=torch.repeat_interleave(torch.tensor(whole)) * mask.long(),
        sequences=len(lengths),
    )
    loss, metrics = find("gspo")(inputs, CONFIG)
    loss.backward()
    # The weights are float32.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad[mask.bool()], torch.cat(slopes), rtol=1e-5, atol=1e-8)
    assert not logprobs.grad[~mask.bool()].any()
    assert metrics["clip_fraction"].item() == pytest.approx(share, abs=1e-6)


def test_a_sequence_without_a_token_of_this_rank_does_no_harm() -> None:
    """Computes the loss of a context rank without any token of a short answer."""
    one = torch.zeros(1, dtype=torch.float64)
    inputs = LossInputs(
        logprobs_L=one,
        old_L=one,
        advantages_L=one + 1,
        weights_L=one + 0.5,
        sequence_L=torch.tensor([2]),
        sequences=4,
    )
    loss, metrics = find("gspo")(inputs, CONFIG)
    assert loss.item() == -0.5
    assert metrics["ratio"].item() == 0.5
