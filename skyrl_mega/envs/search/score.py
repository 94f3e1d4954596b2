"""Scores of answers to open questions: SQuAD's normalisation, exact match and F1 (arXiv:1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from skyrl_mega.envs.truths import wrong_spelling, wrong_text

PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Returns a text in lower case, without ASCII punctuation and the articles a, an, the, and with single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def compared(text: str) -> str:
    """Returns the normalised text, or the lower-case text if normalisation leaves nothing ("A", "!!!")."""
    return normalise(text) or text.strip().lower()


def exact_match(answer: str, targets: Iterable[str]) -> float:
    """Returns 1 if the answer equals a target after normalisation, else 0."""
    return float(compared(answer) in {compared(target) for target in targets})


def f1(answer: str, targets: Iterable[str]) -> float:
    """Returns the harmonic mean of precision and recall of the answer's words, 0 to 1, for the target with the highest
    value; 0 without targets."""
    return max((_f1(compared(answer).split(), compared(target).split()) for target in targets), default=0.0)


def _f1(answer: Sequence[str], target: Sequence[str]) -> float:
    if not answer or not target:
        return float(answer == target)
    common = sum((Counter(answer) & Counter(target)).values())
    return 2 * common / (len(answer) + len(target))


def targets_of(ground_truth: Any) -> list[str]:
    """Returns the right answers of a row as texts; empty values, and values other than text or numbers, are left out.

    Args:
        ground_truth: Search-R1's `{"target": [...]}`, a list, or a single text.
    """
    return [str(target) for target in _listed(ground_truth) if not wrong_text(target)]


def wrong_targets(ground_truth: Any) -> str | None:
    """Returns the reason why no answer to a row can be right; None if one of its targets can be given as an answer.

    Args:
        ground_truth: Search-R1's `{"target": [...]}`, a list, or a single text.
    """
    targets = _listed(ground_truth)
    reasons = [wrong_spelling(target) for target in targets]
    if None in reasons:
        return None
    wrong = next(filter(None, reasons), None)
    if wrong and isinstance(ground_truth, dict | list):
        return f"none of its targets can be given, the first because {wrong}"
    return wrong or (None if targets else 'it has no target; allowed is a text, a list of texts, or {"target": a list}')


def _listed(ground_truth: Any) -> list[Any]:
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target")
    if ground_truth is None:
        return []
    return ground_truth if isinstance(ground_truth, list) else [ground_truth]
