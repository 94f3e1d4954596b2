"""The loss against a scalar reference with derivatives by hand, and against every way of cutting the batch."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.algorithms.losses import policy_loss, token_weights
from skyrl_mega.config.schema import AlgorithmConfig, KlConfig

DAPO = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=10.0, importance_cap=2.0)
PLAIN = AlgorithmConfig()
WITH_KL = {e: AlgorithmConfig(dual_clip=3.0, kl=KlConfig(coefficient=0.1, estimator=e)) for e in ("k1", "k2", "k3")}
CASES = {"plain": PLAIN, "dapo": DAPO, **WITH_KL}


def by_hand(
    logprob: float, old: float, advantage: float, rollout: float, reference: float, c: AlgorithmConfig
) -> tuple[float, float]:
    """One token's loss and its derivative with respect to logprob, by cases."""
    ratio = math.exp(logprob - old)
    low, high = 1 - c.clip_low, 1 + c.clip_high
    if advantage >= 0:
        loss, slope = (-ratio * advantage, -ratio * advantage) if ratio <= high else (-high * advantage, 0.0)
    else:
        loss, slope = (-ratio * advantage, -ratio * advantage) if ratio >= low else (-low * advantage, 0.0)
        if c.dual_clip is not None and loss > -c.dual_clip * advantage:
            loss, slope = -c.dual_clip * advantage, 0.0
    if c.importance_cap is not None:
        rho = min(math.exp(old - rollout), c.importance_cap)
        loss, slope = rho * loss, rho * slope
    d = reference - logprob
    value, derivative = {"k1": (-d, 1.0), "k2": (d * d / 2, -d), "k3": (math.exp(d) - 1 - d, 1 - math.exp(d))}[
        c.kl.estimator
    ]
    return loss + c.kl.coefficient * value, slope + c.kl.coefficient * derivative


def batch(tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens, wide enough that every branch of the loss is taken."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(tokens, generator=g, dtype=torch.float64)

    logprobs = -normal(1.0).abs() - 0.01
    return {
        "logprobs": logprobs,
        "old": logprobs + normal(0.8),
        "advantages": normal(1.0),
        "rollout": logprobs + normal(0.8),
        "reference": logprobs + normal(0.5),
        "mask": (torch.rand(tokens, generator=g) < 0.7).double(),
    }


def run(b: dict[str, torch.Tensor], weights: torch.Tensor, c: AlgorithmConfig, part: slice = slice(None)):
    logprobs = b["logprobs"][part].clone().requires_grad_()
    loss, metrics = policy_loss(
        logprobs,
        old_logprobs_T=b["old"][part],
        advantages_T=b["advantages"][part],
        weights_T=weights[part],
        algorithm=c,
        rollout_logprobs_T=b["rollout"][part],
        reference_logprobs_T=b["reference"][part] if c.kl.coefficient else None,
        entropy_T=b["logprobs"][part].abs(),
    )
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_scalar_reference(case: str) -> None:
    c, tokens = CASES[case], 400
    b = batch(tokens, seed=1)
    weights = token_weights(b["mask"], torch.tensor([150, 250]), "tokens").double()
    loss, gradient, _ = run(b, weights, c)
    columns = zip(*(b[k].tolist() for k in ("logprobs", "old", "advantages", "rollout", "reference")), strict=True)
    pairs = [by_hand(*row, c) for row in columns]
    value = sum(w * p[0] for w, p in zip(weights.tolist(), pairs, strict=True))
    slopes = torch.tensor([w * p[1] for w, p in zip(weights.tolist(), pairs, strict=True)], dtype=torch.float64)
    assert loss.item() == pytest.approx(value, rel=1e-10)
    torch.testing.assert_close(gradient, slopes, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["tokens", "sequences"])
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8), seed=st.integers(0, 999), cuts=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(
    mode: str, lengths: list[int], seed: int, cuts: int
) -> None:
    """Cut anywhere, also inside a sequence as context parallelism does: sums are the same."""
    tokens = sum(lengths)
    b = batch(tokens, seed)
    weights = token_weights(b["mask"], torch.tensor(lengths), mode).double()
    whole_loss, whole_gradient, whole_metrics = run(b, weights, DAPO)
    edges = sorted({0, tokens, *(random.Random(seed).randrange(tokens + 1) for _ in range(cuts))})
    parts = [run(b, weights, DAPO, slice(i, j)) for i, j in itertools.pairwise(edges)]
    torch.testing.assert_close(sum(p[0] for p in parts), whole_loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), whole_gradient, rtol=1e-10, atol=1e-14)
    for name, value in whole_metrics.items():
        torch.testing.assert_close(sum(p[2][name] for p in parts), value, rtol=1e-9, atol=1e-12, msg=name)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_weights_equal_a_loop(lengths: list[int], seed: int) -> None:
    mask = (torch.rand(sum(lengths), generator=torch.Generator().manual_seed(seed)) < 0.4).long()
    pieces = mask.split(lengths)
    kept = [p for p in pieces if p.sum() > 0]
    total = int(mask.sum())
    by_tokens = [m / total if total else 0.0 for m in mask.tolist()]
    by_sequences = [m / (len(kept) * int(p.sum())) if p.sum() else 0.0 for p in pieces for m in p.tolist()]
    assert token_weights(mask, torch.tensor(lengths), "tokens").tolist() == pytest.approx(by_tokens)
    assert token_weights(mask, torch.tensor(lengths), "sequences").tolist() == pytest.approx(by_sequences)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_entries_may_hold_anything(rubbish: float) -> None:
    b = batch(50, seed=2)
    weights = token_weights(b["mask"], torch.tensor([50]), "tokens").double()
    loss, gradient, metrics = run(b, weights, DAPO)
    dirty = {k: torch.where(b["mask"] > 0, v, rubbish) for k, v in b.items()}
    dirty_loss, dirty_gradient, dirty_metrics = run(dirty, weights, DAPO)
    assert torch.equal(loss, dirty_loss)
    assert torch.equal(gradient, dirty_gradient)
    assert all(torch.equal(metrics[k], dirty_metrics[k]) for k in metrics)


def test_a_ratio_that_overflows_stays_finite() -> None:
    b = {k: torch.zeros(1, dtype=torch.float64) for k in ("logprobs", "reference", "mask")}
    b |= {"old": torch.full((1,), -1e4), "rollout": torch.full((1,), -1e5), "advantages": -torch.ones(1)}
    loss, gradient, _ = run(b, torch.ones(1), WITH_KL["k3"])
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


def test_metrics_are_the_means_of_the_batch() -> None:
    b = batch(300, seed=3)
    chosen = b["mask"].bool()
    weights = token_weights(b["mask"], torch.tensor([300]), "tokens").double()
    _, _, metrics = run(b, weights, DAPO)
    ratio = (b["logprobs"] - b["old"]).exp()[chosen]
    advantage = b["advantages"][chosen]
    clipped = ((ratio > 1.28) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
    assert metrics["ratio"].item() == pytest.approx(ratio.mean().item(), rel=1e-6)
    assert metrics["clip_fraction"].item() == pytest.approx(clipped.double().mean().item(), rel=1e-6)
    assert metrics["dual_clip_fraction"].item() == pytest.approx(
        ((ratio > 10) & (advantage < 0)).double().mean().item()
    )
    capped = (b["old"] - b["rollout"]).exp().clamp(max=2.0)[chosen]
    assert metrics["importance_weight"].item() == pytest.approx(capped.mean().item(), rel=1e-6)
    assert metrics["entropy"].item() == pytest.approx(b["logprobs"].abs()[chosen].mean().item(), rel=1e-6)
    assert not any(m.requires_grad for m in metrics.values())


def test_a_log_prob_that_the_settings_need_is_asked_for() -> None:
    one = torch.zeros(1)
    common = {"old_logprobs_T": one, "advantages_T": one, "weights_T": one}
    with pytest.raises(ValueError, match="importance_cap"):
        policy_loss(one, **common, algorithm=DAPO)
    with pytest.raises(ValueError, match=r"kl\.coefficient"):
        policy_loss(one, **common, algorithm=WITH_KL["k3"])
