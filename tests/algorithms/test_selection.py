"""Selected tokens of a loss, against loops over a mini-batch, and the losses with a selection."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.algorithms import selection
from skyrl_mega.algorithms.losses import Figures, find
from skyrl_mega.batch.mini_batch_stats import mean_importance_weight, token_selections
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.config.schema.entropy import EntropyConfig
from skyrl_mega.config.schema.losses import ClipCovConfig, KlCovConfig
from skyrl_mega.trajectories.sequences import Sequences
from tests.algorithms.answers import packed, some_answers

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def mini_batch(lengths: list[int], seed: int) -> Sequences:
    """Returns a mini-batch with prompts of one token and NaN for every uncounted token."""
    g = torch.Generator().manual_seed(seed)
    mini = Sequences.of([range(n + 1) for n in lengths])
    counts = torch.rand(len(mini.tokens), generator=g) < 0.7
    counts[mini.starts] = False
    mini["weights"] = torch.where(counts, torch.rand(len(counts), generator=g), 0.0)
    for name in ("advantages", "old_logprobs", "old_entropy", "rollout_logprobs"):
        mini[name] = torch.where(counts, -torch.rand(len(counts), generator=g), torch.nan)
    return mini


def covariances(mini: Sequences) -> dict[int, float]:
    """Returns (A - mean A)(log π - mean log π) of each counted token."""
    rows = zip(mini["weights"].tolist(), mini["advantages"].tolist(), mini["old_logprobs"].tolist(), strict=True)
    kept = {t: (a, p) for t, (w, a, p) in enumerate(rows) if w}
    if not kept:
        return {}
    mean_a, mean_p = (sum(values) / len(kept) for values in zip(*kept.values(), strict=True))
    return {t: (a - mean_a) * (p - mean_p) for t, (a, p) in kept.items()}


@given(lengths=LENGTHS, seed=st.integers(0, 9999), share=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_the_tokens_of_highest_covariance_are_punished(lengths: list[int], seed: int, share: float) -> None:
    mini = mini_batch(lengths, seed)
    expected = covariances(mini)
    count = max(int(share * len(expected)), 1)
    highest = sorted(expected, key=lambda t: -expected[t])[:count] if expected else []
    config = AlgorithmConfig(loss="kl_cov", kl_cov=KlCovConfig(share=share))
    [selected] = token_selections([mini], config, [3])["high_covariance"]
    assert selected.nonzero()[:, 0].tolist() == sorted(highest)


@given(lengths=LENGTHS, seed=st.integers(0, 9999), share=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_tokens_between_the_bounds_are_drawn(lengths: list[int], seed: int, share: float) -> None:
    mini = mini_batch(lengths, seed)
    expected = covariances(mini)
    between = {t for t, value in expected.items() if 0.001 <= value <= 0.05}
    config = AlgorithmConfig(loss="clip_cov", clip_cov=ClipCovConfig(share=share, low=0.001, high=0.05))
    [selected] = token_selections([mini], config, [3])["high_covariance"]
    taken = set(selected.nonzero()[:, 0].tolist())
    assert taken <= between and len(taken) == min(max(int(share * len(expected)), 1), len(between))
    assert torch.equal(selected, token_selections([mini], config, [3])["high_covariance"][0])


def test_what_is_drawn_is_the_seeds_and_the_mini_batchs() -> None:
    mini = mini_batch([40] * 9, 1)
    config = AlgorithmConfig(loss="clip_cov", clip_cov=ClipCovConfig(share=0.05, low=1e-4, high=1.0))
    first, second = token_selections([mini, mini], config, [3])["high_covariance"]
    other = token_selections([mini], config, [4])["high_covariance"][0]
    assert first.sum() == second.sum() == other.sum() > 3
    assert not torch.equal(first, second) and not torch.equal(first, other)


@given(lengths=LENGTHS, seed=st.integers(0, 9999), share=st.floats(0.01, 0.99))
@settings(max_examples=60, deadline=None)
def test_the_tokens_of_highest_entropy_are_learned_from(lengths: list[int], seed: int, share: float) -> None:
    mini = mini_batch(lengths, seed)
    kept = {t: h for t, (w, h) in enumerate(zip(mini["weights"], mini["old_entropy"].tolist(), strict=True)) if w}
    highest = sorted(kept, key=lambda t: -kept[t])[: math.ceil(share * len(kept))]
    [selected] = token_selections([mini], AlgorithmConfig(entropy=EntropyConfig(top_share=share)), [3])["high_entropy"]
    assert selected.nonzero()[:, 0].tolist() == sorted(highest)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@given(lengths=LENGTHS, seed=st.integers(0, 9999))
@settings(max_examples=40, deadline=None)
def test_chosen_tokens_are_left_out_or_held_where_they_were(name: str, lengths: list[int], seed: int) -> None:
    """Compares Clip-Cov (PPO, 0 for chosen tokens) and KL-Cov (-r A, plus 0.7 · |log r| for chosen tokens)."""
    answers = some_answers(lengths, seed)
    g = torch.Generator().manual_seed(seed)
    picked = iter((torch.rand(sum(lengths), generator=g) < 0.4).tolist())
    terms, flags = [], []
    for tokens, old, advantage in answers:
        for now, before in zip(tokens, old, strict=True):
            ratio, pick = (now - before).exp(), next(picked)
            flags.append(pick)
            if name == "kl_cov":
                terms.append(-ratio * advantage + (0.7 * (now - before).abs() if pick else 0.0))
            elif pick or (advantage > 0 and ratio.item() > 1.2) or (advantage < 0 and ratio.item() < 0.8):
                terms.append(0 * now + (0.0 if pick else -advantage * (1.2 if advantage > 0 else 0.8)))
            else:
                terms.append(-ratio * advantage)
    expected = sum(terms, torch.zeros(())) / len(terms)
    slopes = torch.autograd.grad(expected, [t for tokens, _, _ in answers for t in tokens])
    logprobs, inputs = packed(answers, [2] * len(lengths), "tokens")
    column = torch.ones(len(inputs.old_L), dtype=torch.bool)  # true for uncounted tokens, too
    column[inputs.active_L] = torch.tensor(flags)
    config = AlgorithmConfig(loss=name, kl_cov=KlCovConfig(coefficient=0.7))
    loss, metrics = find(name)(replace(inputs, high_covariance_L=column), config)
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(logprobs.grad[inputs.active_L], torch.stack(slopes), rtol=1e-9, atol=1e-12)
    assert metrics["covariance_fraction"].item() == pytest.approx(sum(flags) / len(flags), abs=1e-12)
    with pytest.raises(ValueError, match="high_covariance"):
        find(name)(inputs, config)


def test_only_tokens_of_high_entropy_have_a_policy_loss() -> None:
    """Compares with PPO's term of the marked tokens, and k3 to the reference and the bonus of all tokens.

    All terms are divided by the number of all tokens.
    """
    answers = some_answers([3, 4], 2)
    logprobs, inputs = packed(answers, [1, 1], "tokens")
    marked = torch.tensor([False, True, False, True, False, False, True, True, False])
    g = torch.Generator().manual_seed(2)
    entropy, away = torch.rand(2, 9, generator=g, dtype=torch.float64)
    reference = inputs.logprobs_L.detach() - away
    terms = []
    places = iter(inputs.active_L.nonzero()[:, 0].tolist())
    for tokens, old, advantage in answers:
        for now, before in zip(tokens, old, strict=True):
            t = next(places)
            ratio = (now - before).exp()
            near = min(max(ratio.item(), 0.8), 1.2)
            policy = -torch.minimum(ratio * advantage, torch.tensor(near * advantage, dtype=torch.float64))
            further = reference[t] - now
            kl = further.exp() - 1 - further
            terms.append((policy if marked[t] else 0 * now) + 0.5 * kl - 0.3 * entropy[t])
    expected = torch.stack(terms).mean()
    slopes = torch.autograd.grad(expected, [t for tokens, _, _ in answers for t in tokens])
    given = replace(inputs, high_entropy_L=marked, entropy_L=entropy, reference_L=reference)
    config = AlgorithmConfig(entropy=EntropyConfig(coefficient=0.3))
    config.kl.coefficient = 0.5
    loss, metrics = find("ppo")(given, config)
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(logprobs.grad[inputs.active_L], torch.stack(slopes), rtol=1e-9, atol=1e-12)
    assert metrics["high_entropy_fraction"].item() == pytest.approx(4 / 7)


@pytest.mark.parametrize("level", ["token", "sequence"])
@given(lengths=LENGTHS, seed=st.integers(0, 9999))
@settings(max_examples=40, deadline=None)
def test_importance_weights_are_divided_by_their_mean(level: str, lengths: list[int], seed: int) -> None:
    """Compares with the weighted mean over the mini-batch under any cut; an answer is a run of counted tokens."""
    mini = mini_batch(lengths, seed)
    config = AlgorithmConfig(importance_cap=1.3, importance_level=level, importance_normalize=True)
    weights, gaps = mini["weights"].tolist(), (mini["old_logprobs"] - mini["rollout_logprobs"]).tolist()
    runs: list[list[int]] = []
    starts = set(mini.starts.tolist())
    for t, weight in enumerate(weights):
        if weight and runs and runs[-1][-1] == t - 1 and t not in starts:
            runs[-1].append(t)
        elif weight:
            runs.append([t])
    rho = {
        t: min(math.exp(gaps[t] if level == "token" else sum(gaps[i] for i in run)), 1.3) for run in runs for t in run
    }
    total = sum(weights[t] for t in rho)
    mean = sum(weights[t] * rho[t] for t in rho) / total if rho else 1.0
    assert mean_importance_weight(mini, config) == pytest.approx(mean, rel=1e-5)
    assert mean_importance_weight(mini, replace(config, importance_normalize=False)) == 1.0

    answers = [(tokens, [t.item() for t in tokens], 2.0) for tokens, _, _ in some_answers(lengths, seed)]
    _, inputs = packed(answers, [1] * len(lengths), "tokens")
    inputs = replace(inputs, rollout_L=inputs.old_L - 0.1)
    plain, halved = (
        find("ppo")(replace(inputs, figures=Figures(importance_mean=by)), config)[0].item() for by in (1.0, 2.0)
    )
    assert halved == pytest.approx(plain / 2, rel=1e-9)


def test_a_token_that_no_engine_drew_has_the_importance_weight_1() -> None:
    """Checks the end of a message, a token without an engine log-prob (`rollout.conversation: one_message`)."""
    mini = Sequences.of([[5, 6, 7, 8]])
    mini["weights"] = torch.tensor([0.0, 0.25, 0.25, 0.5])
    mini["old_logprobs"] = torch.tensor([torch.nan, -1.0, -1.0, -3.0])
    mini["rollout_logprobs"] = torch.tensor([torch.nan, -1.5, -2.0, torch.nan])
    mini["drawn"] = torch.tensor([True, True, True, False])
    config = AlgorithmConfig(importance_cap=10.0, importance_normalize=True)
    assert mean_importance_weight(mini, config) == pytest.approx(0.25 * math.exp(0.5) + 0.25 * math.exp(1.0) + 0.5)


def test_nothing_is_needed_that_nothing_is_chosen_by() -> None:
    assert not selection.columns_needed(AlgorithmConfig()) and not token_selections([], AlgorithmConfig(), [0])
    assert selection.columns_needed(AlgorithmConfig(loss="kl_cov")) == {"old_logprobs"}
    assert selection.columns_needed(AlgorithmConfig(importance_normalize=True)) == {"old_logprobs"}
    assert selection.columns_needed(AlgorithmConfig(entropy=EntropyConfig(top_share=0.2))) == {"old_entropy"}
