"""Scores of sets of samples, each with a standard error, and the two means over sets.

The n samples of a prompt are not independent, so the prompt is the unit: a score is the mean over prompts of the mean
over a prompt's samples, and the standard error is s / √P for P independent prompts. A bootstrap over prompts tends to
the same value; for single samples with 0/1 scores this is the binomial error.

A sample with a failed environment gets no score, as in training: only the prompt's other samples count, and a prompt
without others does not count at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_mega.evaluate.results import Key, ScoredSample


@dataclass(frozen=True)
class Score:
    """A mean over prompts, with the standard error."""

    value: float
    error: float | None
    """Standard error; None for a single prompt."""


@dataclass(frozen=True)
class SetScores:
    """Scores of a set of prompts, and the shares of truncated and failed samples."""

    name: str
    prompts: int
    """Number of prompts, including prompts without a score."""
    samples: int
    """Samples per prompt."""
    scores: dict[str, Score]
    """`reward`, `accuracy` and `pass` (a prompt with a right sample), then further metrics of the environment. Empty if
    every sample failed."""
    truncated: float
    """Share of samples ended by a budget."""
    failed: float
    """Share of samples with a failed environment, excluded from all scores."""
    tokens: float
    """Mean number of tokens written by the policy."""
    left_out: int = 0
    """Number of prompts skipped as too long, not included in `prompts`."""
    unjudged: int = 0
    """Number of prompts without a score: the environments of all samples failed."""


def set_scores(name: str, samples: Mapping[Key, ScoredSample], left_out: int = 0) -> SetScores:
    """Returns the scores of a set.

    `scores` has `reward`, `accuracy` and `pass`, and all metrics of the samples but the first, which is the accuracy;
    {} if every sample failed. Failed samples are left out of `scores`, but count in `failed`, `truncated` and `tokens`.
    A prompt whose samples all failed counts in `prompts` and in `unjudged`.

    Args:
        name: Name of the set.
        samples: (uid, sample number) → sample; not empty, else ValueError. Every prompt has the same number of samples,
            failed samples included; not checked.
        left_out: Number of skipped prompts; only reported.
    """
    by_prompt: dict[int, list[ScoredSample]] = {}
    for (uid, _), sample in sorted(samples.items(), key=lambda item: item[0]):
        by_prompt.setdefault(uid, []).append(sample)
    every = [sample for group in by_prompt.values() for sample in group]
    judged = [[sample for sample in group if not sample.status.failed] for group in by_prompt.values()]
    groups = [group for group in judged if group]
    further = sorted({metric for sample in every for metric in list(sample.metrics)[1:]})
    per_prompt: dict[str, list[float]] = {
        "reward": [_mean([s.reward for s in group]) for group in groups],
        "accuracy": [_mean([s.accuracy for s in group]) for group in groups],
        "pass": [float(any(s.accuracy >= 1 for s in group)) for group in groups],
        **{m: [_mean([s.metrics.get(m, 0.0) for s in group]) for group in groups] for m in further},
    }
    return SetScores(
        name,
        prompts=len(by_prompt),
        samples=max(map(len, by_prompt.values())),
        scores={metric: _score(values) for metric, values in per_prompt.items() if values},
        truncated=_mean([s.status.truncated for s in every]),
        failed=_mean([s.status.failed for s in every]),
        tokens=_mean([s.tokens for s in every]),
        left_out=left_out,
        unjudged=len(by_prompt) - len(groups),
    )


def mean_over_sets(sets: Sequence[SetScores], metric: str) -> Score | None:
    """Returns the mean of the score `metric` over the sets with this score, weighting sets equally, with its standard
    error.

    None if no set has the score, and if a set has no scores at all: the mean would cover other sets than the table.
    """
    return _combined(sets, [(1.0, s.scores[metric]) for s in sets if metric in s.scores])


def mean_over_examples(sets: Sequence[SetScores], metric: str) -> Score | None:
    """Returns the mean of the score `metric` over all scored prompts, weighting sets by the number of these prompts,
    with its standard error.

    None if no set has the score, and if a set has no scores at all: the mean would cover other sets than the table.
    """
    return _combined(sets, [(float(s.prompts - s.unjudged), s.scores[metric]) for s in sets if metric in s.scores])


def _combined(sets: Sequence[SetScores], parts: Sequence[tuple[float, Score]]) -> Score | None:
    total = sum(weight for weight, _ in parts)
    if not parts or not all(s.scores for s in sets):
        return None
    value = sum(weight * score.value for weight, score in parts) / total
    errors = [(weight, score.error) for weight, score in parts]
    if any(error is None for _, error in errors):
        return Score(value, None)
    return Score(value, math.sqrt(sum((weight * (error or 0.0)) ** 2 for weight, error in errors)) / total)


def _score(values: Sequence[float]) -> Score:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return Score(_mean(values), error)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
