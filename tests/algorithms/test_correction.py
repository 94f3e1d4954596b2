"""The correction of the engine's mismatch against loops over tokens, and the metrics of each part."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.algorithms.losses import LossInputs, find
from skyrl_mega.config.schema import AlgorithmConfig, RejectionConfig
from skyrl_mega.megatron import objectives
from tests.algorithms.answers import Answer, packed, some_answers

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def with_engine(inputs: LossInputs, gaps: list[list[float]]) -> LossInputs:
    """Returns the inputs with engine log-probs below the old log-probs by these gaps."""
    engine = inputs.old_L.clone()
    engine[inputs.active_L] -= torch.tensor([d for gap in gaps for d in gap], dtype=torch.float64)
    return replace(inputs, rollout_L=engine)


def some_gaps(lengths: list[int], seed: int) -> list[list[float]]:
    g = torch.Generator().manual_seed(seed + 1)
    return [(torch.randn(n, generator=g, dtype=torch.float64) * 0.5).tolist() for n in lengths]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rejected", ["off", "token", "sequence", "geometric"])
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5), seed=st.integers(0, 9999))
@settings(max_examples=30, deadline=None)
def test_the_engines_mismatch_is_corrected_by_token_or_answer(
    level: str, rejected: str, lengths: list[int], seed: int
) -> None:
    """Compares REINFORCE at ratio 1, times min(ratio, 1.5), and 0 outside [0.6, 1.8]."""
    g = torch.Generator().manual_seed(seed)
    answers: list[Answer] = []
    gaps: list[list[float]] = []
    for n in lengths:
        now = -torch.rand(n, generator=g, dtype=torch.float64)
        gaps.append((torch.randn(n, generator=g, dtype=torch.float64) * 0.5).tolist())
        answers.append(([v.clone().requires_grad_() for v in now], now.tolist(), 2.0))
    expected, slopes, kept_share = 0.0, [], 0.0
    total = sum(lengths)
    for gap in gaps:
        ratios = {
            "token": [math.exp(d) for d in gap],
            "sequence": [math.exp(sum(gap))] * len(gap),
            "geometric": [math.exp(sum(gap) / len(gap))] * len(gap),
        }
        for t in range(len(gap)):
            weight = min(ratios[level][t], 1.5)
            out = rejected != "off" and not 0.6 <= ratios[rejected][t] <= 1.8
            weight = 0.0 if out else weight
            kept_share += out / total
            expected -= weight * 2.0 / total
            slopes.append(-weight * 2.0 / total)
    logprobs, inputs = packed(answers, [1] * len(lengths), "tokens")
    engine = inputs.old_L.clone()
    engine[inputs.active_L] -= torch.tensor([d for gap in gaps for d in gap], dtype=torch.float64)
    config = AlgorithmConfig(
        importance_cap=1.5, importance_level=level, rejection=RejectionConfig(level=rejected, low=0.6, high=1.8)
    )
    loss, metrics = find("ppo")(replace(inputs, rollout_L=engine), config)
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(
        logprobs.grad[inputs.active_L], torch.tensor(slopes, dtype=torch.float64), rtol=1e-9, atol=1e-12
    )
    if rejected != "off":
        assert metrics["rejected_fraction"].item() == pytest.approx(kept_share, abs=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
@given(lengths=LENGTHS, seed=st.integers(0, 9999))
@settings(max_examples=30, deadline=None)
def test_a_weight_outside_its_bounds_is_truncated_or_masked(
    level: str, outside: str, lengths: list[int], seed: int
) -> None:
    """Compares REINFORCE at ratio 1 with A = 2: TIS limits the weight to [0.7, 1.4], MIS sets weights outside to 0."""
    gaps, total = some_gaps(lengths, seed), sum(lengths)
    slopes, weights, clipped = [], [], 0
    for gap in gaps:
        for d in gap:
            ratio = math.exp(d if level == "token" else sum(gap))
            out = ratio < 0.7 or ratio > 1.4
            weight = (0.0 if outside == "mask" else 0.7 if ratio < 0.7 else 1.4) if out else ratio
            clipped += out
            weights.append(weight)
            slopes.append(-2.0 * weight / total)
    answers = [(tokens, [t.item() for t in tokens], 2.0) for tokens, _, _ in some_answers(lengths, seed)]
    logprobs, inputs = packed(answers, [1] * len(lengths), "tokens")
    config = AlgorithmConfig(
        importance_cap=1.4, importance_floor=0.7, importance_outside=outside, importance_level=level
    )
    loss, metrics = find("ppo")(with_engine(inputs, gaps), config)
    loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(
        logprobs.grad[inputs.active_L], torch.tensor(slopes, dtype=torch.float64), rtol=1e-9, atol=1e-12
    )
    assert metrics["importance_weight"].item() == pytest.approx(sum(weights) / total, rel=1e-9)
    assert metrics["importance_clipped_fraction"].item() == pytest.approx(clipped / total, abs=1e-12)


@given(lengths=LENGTHS, seed=st.integers(0, 9999))
@settings(max_examples=40, deadline=None)
def test_one_token_that_is_far_off_takes_its_answer_with_it(lengths: list[int], seed: int) -> None:
    gaps, total = some_gaps(lengths, seed), sum(lengths)
    answers = [(tokens, [t.item() for t in tokens], -1.0) for tokens, _, _ in some_answers(lengths, seed)]
    out = [any(not 0.5 <= math.exp(d) <= 2.5 for d in gap) for gap in gaps]
    slopes = [0.0 if far else 1 / total for far, gap in zip(out, gaps, strict=True) for _ in gap]
    logprobs, inputs = packed(answers, [1] * len(lengths), "tokens")
    config = AlgorithmConfig(rejection=RejectionConfig(outlier_low=0.5, outlier_high=2.5))
    loss, metrics = find("ppo")(with_engine(inputs, gaps), config)
    loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(
        logprobs.grad[inputs.active_L], torch.tensor(slopes, dtype=torch.float64), rtol=1e-9, atol=1e-12
    )
    share = sum(len(gap) for far, gap in zip(out, gaps, strict=True) if far) / total
    assert metrics["outlier_fraction"].item() == pytest.approx(share, abs=1e-12)


@given(lengths=LENGTHS, seed=st.integers(0, 9999))
@settings(max_examples=40, deadline=None)
def test_bad_answers_of_another_policy_are_left_out(lengths: list[int], seed: int) -> None:
    """Compares with DeepSeek-V3.2: M = 0 if A < 0 and the answer's mean of log(π_engine / π) is above δ = 0.1."""
    gaps, total = some_gaps(lengths, seed), sum(lengths)
    answers = some_answers(lengths, seed)
    slopes, left_out = [], 0
    for (tokens, old, advantage), gap in zip(answers, gaps, strict=True):
        away = sum(before - d - now.item() for now, before, d in zip(tokens, old, gap, strict=True)) / len(gap)
        drop = advantage < 0 and away > 0.1
        left_out += drop * len(gap)
        slopes += [
            0.0 if drop else -advantage * math.exp(now.item() - before) / total
            for now, before in zip(tokens, old, strict=True)
        ]
    logprobs, inputs = packed(answers, [2] * len(lengths), "tokens")
    config = AlgorithmConfig(loss="ppo", clip_low=1.0, clip_high=99.0, rejection=RejectionConfig(off_policy=0.1))
    loss, metrics = find("ppo")(with_engine(inputs, gaps), config)
    loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(
        logprobs.grad[inputs.active_L], torch.tensor(slopes, dtype=torch.float64), rtol=1e-9, atol=1e-12
    )
    assert metrics["off_policy_fraction"].item() == pytest.approx(left_out / total, abs=1e-12)


def test_what_is_rejected_keeps_the_kl_term() -> None:
    """Compares with half of the mean of k3 to the old policy and of the gradient, independent of the advantages."""
    answers = some_answers([3, 2], 1)
    logprobs, inputs = packed(answers, [1, 1], "tokens")
    inputs = replace(with_engine(inputs, [[9.0] * 3, [9.0] * 2]), reference_L=inputs.old_L)
    gaps = [before - now.item() for tokens, old, _ in answers for now, before in zip(tokens, old, strict=True)]
    config = AlgorithmConfig(rejection=RejectionConfig(outlier_high=2.0))
    config.kl.coefficient = 0.5
    loss, metrics = find("ppo")(inputs, config)
    loss.backward()
    assert logprobs.grad is not None
    assert metrics["outlier_fraction"] == 1
    assert loss.item() == pytest.approx(0.5 * sum(math.exp(d) - 1 - d for d in gaps) / 5, rel=1e-9)
    slopes = torch.tensor([0.5 * (1 - math.exp(d)) / 5 for d in gaps], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad[inputs.active_L], slopes, rtol=1e-9, atol=1e-12)


def test_ratios_to_the_engine_leave_the_mismatch_the_policys() -> None:
    """Uses the engine's log-probs as old log-probs (`old_logprobs=engine`); the measured mismatch stays unchanged."""
    answers = some_answers([3, 4], 7)
    _, inputs = packed(answers, [1, 1], "tokens")
    gaps = some_gaps([3, 4], 7)
    inputs = with_engine(inputs, gaps)
    assert inputs.rollout_L is not None
    _, metrics = objectives.objective("ppo", AlgorithmConfig(old_logprobs="engine"))(inputs)
    _, default_metrics = objectives.objective("ppo", AlgorithmConfig())(inputs)
    expected = [
        (now.item(), engine)
        for now, engine in zip(
            (t for tokens, _, _ in answers for t in tokens), inputs.rollout_L[inputs.active_L].tolist(), strict=True
        )
    ]
    assert metrics["ratio"].item() == pytest.approx(sum(math.exp(a - b) for a, b in expected) / 7, rel=1e-9)
    apart = sum(abs(d) for gap in gaps for d in gap)
    assert (metrics["mismatch_abs"].item(), default_metrics["mismatch_abs"].item()) == (
        pytest.approx(apart),
        pytest.approx(apart),
    )
