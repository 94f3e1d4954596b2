"""The loss against a scalar reference with derivatives by hand, and against every way of cutting the batch."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.algorithms.losses import LossInputs
from skyrl_mega.algorithms.losses.ppo import ppo
from skyrl_mega.algorithms.token_weights import averages, token_weights
from skyrl_mega.config.schema import AlgorithmConfig, KlConfig

DAPO = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=10.0, importance_cap=2.0)
PLAIN = AlgorithmConfig()
WITH_KL = {e: AlgorithmConfig(dual_clip=3.0, kl=KlConfig(coefficient=0.1, estimator=e)) for e in ("k1", "k2", "k3")}
CASES = {"plain": PLAIN, "dapo": DAPO, **WITH_KL}


def by_hand(
    logprob: float, old: float, advantage: float, rollout: float, reference: float, c: AlgorithmConfig
) -> tuple[float, float]:
    """Returns one token's loss and its derivative with respect to logprob, by cases."""
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
    """Returns random tokens, spread widely enough to reach every branch of the loss."""
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


def run(
    b: dict[str, torch.Tensor],
    weights: torch.Tensor,
    c: AlgorithmConfig,
    part: slice = slice(None),
    kl_weights: torch.Tensor | None = None,
):
    logprobs = b["logprobs"][part].clone().requires_grad_()
    inputs = LossInputs(
        logprobs_L=logprobs,
        old_L=b["old"][part],
        advantages_L=b["advantages"][part],
        weights_L=weights[part],
        rollout_L=b["rollout"][part],
        reference_L=b["reference"][part] if c.kl.coefficient else None,
        entropy_L=b["logprobs"][part].abs(),
        kl_weights_L=None if kl_weights is None else kl_weights[part],
    )
    loss, metrics = ppo(inputs, c)
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
    """Compares sums over random cuts, cuts inside a sequence (as in context parallelism) included."""
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


def published(b: dict[str, torch.Tensor], lengths: list[int], samples: int, c: AlgorithmConfig) -> tuple[float, float]:
    """Returns the loss and the KL term's mean as computed by a run with a token mean per micro-batch, a KL mean over
    its sequences, and a final division by the number of micro-batches.
    """
    ends = list(itertools.accumulate(lengths))
    sequences = [range(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    without = dataclasses.replace(c, kl=KlConfig(coefficient=0.0))
    alone = dataclasses.replace(c, kl=KlConfig(coefficient=1.0, estimator=c.kl.estimator))
    losses, kls = [], []
    for first in range(0, len(sequences), samples):
        micro = sequences[first : first + samples]
        values, kl_means = [], []
        for sequence in micro:
            kept = [t for t in sequence if b["mask"][t]]
            rows = [[float(b[k][t]) for k in ("logprobs", "old", "advantages", "rollout", "reference")] for t in kept]
            policy = [by_hand(*row, without)[0] for row in rows]
            kl_of = [by_hand(*row, alone)[0] - loss for row, loss in zip(rows, policy, strict=True)]
            values += policy
            kl_means.append(sum(kl_of) / max(len(kl_of), 1))
        losses.append(sum(values) / max(len(values), 1))
        kls.append(sum(kl_means) / len(kl_means))
    return sum(losses) / len(losses), sum(kls) / len(kls)


@given(
    groups=st.integers(1, 4),
    samples=st.integers(1, 4),
    seed=st.integers(0, 999),
    empty=st.lists(st.integers(0, 3), max_size=2),
    cuts=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_a_mean_over_micro_batches_is_that_of_the_run_which_had_them(
    groups: int, samples: int, seed: int, empty: list[int], cuts: int
) -> None:
    """Compares with `published` under any cut, micro-batches without a counted token included."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 9) for _ in range(groups * samples)]
    tokens, ends = sum(lengths), list(itertools.accumulate(lengths))
    b = batch(tokens, seed)
    for group in empty:
        first, last = group * samples, min((group + 1) * samples, len(lengths))
        if first < last:
            b["mask"][ends[first] - lengths[first] : ends[last - 1]] = 0
    c = dataclasses.replace(DAPO, loss_mean="micro_batches", loss_mean_samples=samples, kl=KlConfig(coefficient=0.1))
    weights = token_weights(b["mask"], torch.tensor(lengths), "micro_batches", samples).double()
    edges = sorted({0, tokens, *(rng.randrange(tokens + 1) for _ in range(cuts))})
    loss, kl_mean = published(b, lengths, samples, c)
    # Every sequence counts in SkyRL's mean of the KL term, sequences without a token included.
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    count = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, sequence, b["mask"]).clamp(min=1)
    every = b["mask"] / (len(lengths) * count[sequence])
    parts = [run(b, weights, c, slice(i, j), every) for i, j in itertools.pairwise(edges)]
    assert sum(float(p[0]) for p in parts) == pytest.approx(loss + 0.1 * kl_mean, rel=1e-6, abs=1e-9)
    assert sum(float(p[2]["kl"]) for p in parts) == pytest.approx(kl_mean, rel=1e-6, abs=1e-9)
    if all(piece.any() for piece in b["mask"].split(lengths)):
        sequence_weights = token_weights(b["mask"], torch.tensor(lengths), "sequences").double()
        torch.testing.assert_close(sequence_weights, every, rtol=1e-6, atol=1e-9)


def test_groups_of_one_sample_and_of_all_are_the_other_means() -> None:
    mask = torch.tensor([1.0, 0, 1, 1, 1, 0, 1])
    lengths = torch.tensor([2, 3, 2])
    for samples, mode in ((1, "sequences"), (3, "tokens"), (99, "tokens")):
        weights = token_weights(mask, lengths, "micro_batches", samples)
        torch.testing.assert_close(weights, token_weights(mask, lengths, mode))
    # Two groups, the last of one sequence.
    weights = token_weights(mask, lengths, "micro_batches", 2).tolist()
    assert weights == pytest.approx([1 / 8, 0, 1 / 8, 1 / 8, 1 / 8, 0, 1 / 2])


def test_an_empty_group_lowers_the_loss_and_not_the_means() -> None:
    c = dataclasses.replace(DAPO, loss_mean="micro_batches", loss_mean_samples=1)
    mask = torch.tensor([1.0, 1, 0, 0])
    weights = token_weights(mask, torch.tensor([2, 2]), "micro_batches", 1)
    assert weights.tolist() == [0.25, 0.25, 0, 0]
    metrics = {"loss": 0.3, "ratio": 0.5, "kl": 0.1, "lr": 1e-6}
    assert averages(metrics, c, 0.5) == {"loss": 0.3, "ratio": 1.0, "kl": 0.2, "lr": 1e-6}
    by_sequences = dataclasses.replace(c, kl=KlConfig(coefficient=0.1, mean="sequences"))
    assert averages(metrics, by_sequences, 0.5)["kl"] == 0.1
    assert averages(metrics, DAPO, 0.5) == metrics
    constant = AlgorithmConfig(loss_mean="constant", loss_mean_length=9)
    assert averages(metrics, constant, 0.5) == {"loss": 0.3, "ratio": 1.0, "kl": 0.2, "lr": 1e-6}


@given(
    groups=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5),
    seed=st.integers(0, 999),
    length=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_weights_by_prompt_and_by_a_constant_equal_a_loop(groups: list[list[int]], seed: int, length: int) -> None:
    lengths = [n for group in groups for n in group]
    mask = (torch.rand(sum(lengths), generator=torch.Generator().manual_seed(seed)) < 0.3).long()
    pieces = iter(mask.split(lengths))
    by_group = [[next(pieces).tolist() for _ in group] for group in groups]
    tokens = [sum(map(sum, group)) for group in by_group]
    taught, kept = sum(map(bool, tokens)), sum(any(piece) for group in by_group for piece in group)
    by_prompt = [
        m / (taught * count) if count else 0.0
        for group, count in zip(by_group, tokens, strict=True)
        for piece in group
        for m in piece
    ]
    by_constant = [m / (kept * length) if kept else 0.0 for group in by_group for piece in group for m in piece]
    sizes = torch.tensor(list(map(len, groups)))
    at = torch.tensor(lengths)
    assert token_weights(mask, at, "prompts", groups_G=sizes).tolist() == pytest.approx(by_prompt)
    assert token_weights(mask, at, "constant", length=length).tolist() == pytest.approx(by_constant)


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


def test_how_far_the_step_has_moved_is_measured_without_bias() -> None:
    """Compares with the exact expectation over all tokens of the sampling distribution."""
    generator = torch.Generator().manual_seed(1)
    old, new = torch.randn(2, 50, generator=generator, dtype=torch.float64).mul(1.5).log_softmax(-1)
    inputs = LossInputs(logprobs_L=new, old_L=old, advantages_L=torch.zeros(50), weights_L=old.exp())
    _, metrics = ppo(inputs, AlgorithmConfig())
    assert metrics["kl_old"].item() == pytest.approx((old.exp() * (old - new)).sum().item(), rel=1e-9)


def test_a_log_prob_that_the_settings_need_is_asked_for() -> None:
    one = torch.zeros(1)
    inputs = LossInputs(logprobs_L=one, old_L=one, advantages_L=one, weights_L=one)
    with pytest.raises(ValueError, match="importance_cap"):
        ppo(inputs, DAPO)
    with pytest.raises(ValueError, match=r"kl\.coefficient"):
        ppo(inputs, WITH_KL["k3"])
