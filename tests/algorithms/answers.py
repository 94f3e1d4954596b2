"""Answers in the form of the reference losses, token by token, and in the form of a loss: one packed row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skyrl_mega.algorithms.losses import LossInputs

Answer = tuple[list[Tensor], list[float], float]
"""Log-probs (scalars with a gradient), old log-probs and advantage of an answer."""


def some_answers(lengths: list[int], seed: int, spread: float = 0.5) -> list[Answer]:
    """Returns random float64 answers of these lengths; `spread` is the standard deviation of the log-ratios."""
    g = torch.Generator().manual_seed(seed)
    answers: list[Answer] = []
    for n in lengths:
        now = -torch.rand(n, generator=g, dtype=torch.float64)
        old = (now + torch.randn(n, generator=g, dtype=torch.float64) * spread).clamp(max=0).tolist()
        advantage = torch.randn((), generator=g, dtype=torch.float64).item()
        answers.append(([value.clone().requires_grad_() for value in now], old, advantage))
    return answers


def packed(answers: list[Answer], prompts: list[int], mean: str) -> tuple[Tensor, LossInputs]:
    """Returns a row of prompts (NaN entries) and answers, with weights by the definition of the mean."""
    parts: dict[str, list[float]] = {name: [] for name in ("now", "old", "advantage", "weight", "answer")}
    total = sum(len(tokens) for tokens, _, _ in answers)
    for number, (prompt, (tokens, old, advantage)) in enumerate(zip(prompts, answers, strict=True)):
        weight = 1 / total if mean == "tokens" else 1 / (len(answers) * len(tokens))
        for name, values in (
            ("now", [math.nan] * prompt + [t.item() for t in tokens]),
            ("old", [math.nan] * prompt + old),
            ("advantage", [math.nan] * prompt + [advantage] * len(tokens)),
            ("weight", [0.0] * prompt + [weight] * len(tokens)),
            ("answer", [0.0] * prompt + [float(number)] * len(tokens)),
        ):
            parts[name] += values
    row = {name: torch.tensor(values, dtype=torch.float64) for name, values in parts.items()}
    logprobs = row["now"].requires_grad_()
    inputs = LossInputs(
        logprobs_L=logprobs,
        old_L=row["old"],
        advantages_L=row["advantage"],
        weights_L=row["weight"],
        sequence_L=row["answer"].long(),
        sequences=len(answers),
    )
    return logprobs, inputs
