"""Trial of a user-defined loss on a few tokens before a run starts.

Without a trial, errors in the loss appear only in a run's first step, on a rank, after the start of engines and the
warm-up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyrl_mega.algorithms.losses.base import Loss, LossInputs
from skyrl_mega.algorithms.losses.inputs import Figures
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.trials import last_frame
from skyrl_mega.config.schema import AlgorithmConfig

ANSWERS = [0, 0, 0, 0, 1, 1, 1, 2, 2]
"""Answer index of each token. The first token of each answer belongs to a prompt and has no weight."""
CLOSE = 0.02
"""Tolerance between the gradient of all answers and the sum over single answers, relative to the largest entry.

A loss may compute in bfloat16; a loss that depends on other tokens of the micro-batch differs by much more.
"""
FAR = 20.0
"""Shift of the engine's log-probs in nats, beyond every cap and bound, to test if a loss reads them."""
NOT_RUNNABLE_MARKS = ("PROCESS GROUP", "IS NOT INITIALIZED", "CUDA", "TRITON")
"""Parts of errors, in capitals, that only show the absence of ranks or devices: on a rank the loss may be fine."""


class _NotRunnableHere(Exception):
    """The function needs ranks or a device that are not available here."""


class _Trial(NamedTuple):
    """Metrics and gradients of a loss on some of the tokens."""

    metrics: dict[str, Tensor]
    gradients: Tensor
    """Gradients of logprobs_L and entropy_L, [2, L] for all answers; 0 for tokens left out."""


def check_on_tokens(loss: Loss, setting: str, algorithm: AlgorithmConfig) -> None:
    """Calls a loss on nine tokens: checks that it runs, returns a scalar and a dict of finite scalar metrics, has a
    finite gradient, and does not depend on the cut of a mini-batch.

    A loss that needs ranks or a GPU cannot be tried and passes. The cut is not checked for a loss whose gradient
    differs between two equal calls.

    Args:
        loss: The function.
        setting: `algorithm.loss = …`, for errors.
        algorithm: Settings passed to the loss.

    Raises:
        UserError: A check failed, or the loss raises.
    """
    every = range(len(ANSWERS))
    try:
        whole = _run_loss(loss, setting, algorithm, [*every])
        parts = [_run_loss(loss, setting, algorithm, [i for i in every if ANSWERS[i] == answer]) for answer in range(3)]
        empty = _run_loss(loss, setting, algorithm, [0])
        again = _run_loss(loss, setting, algorithm, [*every])
    except _NotRunnableHere:
        return
    if unlike := [trial for trial in (*parts, empty) if set(trial.metrics) != set(whole.metrics)]:
        raise UserError(
            f"its metrics are {_listed(whole)} with one micro-batch and {_listed(unlike[0])} with another",
            key=setting,
            fix="return the same names every time",
        )
    if not torch.equal(whole.gradients, again.gradients):
        return  # random or stateful: the cut is not the only difference
    cut = torch.stack([part.gradients for part in parts]).sum(0)
    if bool((whole.gradients - cut).abs().max() > CLOSE * whole.gradients.abs().max()):
        raise UserError(
            "its gradient for three answers in one micro-batch differs from the sum over three "
            "micro-batches of one answer, so that it would change with the layout",
            key=setting,
            fix="return the sum of weights_L times each token's loss (docs/own-loss.md)",
        )


def check_reads_engine(loss: Loss, setting: str, algorithm: AlgorithmConfig, mode: str) -> None:
    """Calls a loss with shifted log-probs of the engine: checks that its gradient depends on them.

    Otherwise tokens from older weights would be trained on as if sampled by the policy. A loss that needs ranks or a
    GPU cannot be tried and passes.

    Args:
        loss: The function, already accepted by `check_on_tokens`.
        setting: `algorithm.loss = …`, for errors.
        algorithm: Settings passed to the loss.
        mode: `asynchrony.mode`, for errors.

    Raises:
        UserError: The loss reads neither `rollout_L` nor an `old_L` equal to the engine's log-probs.
    """
    every = [*range(len(ANSWERS))]
    try:
        unmoved = _run_loss(loss, setting, algorithm, every).gradients
        moved = [_run_loss(loss, setting, algorithm, every, moved=shift).gradients for shift in (-FAR, FAR)]
    except (_NotRunnableHere, UserError):  # a UserError can only come from shifted log-probs, so the loss reads them
        return
    if all(torch.equal(unmoved, gradients) for gradients in moved):
        raise UserError(
            f"asynchrony.mode = {mode} trains on tokens of older weights, and its gradient is the "
            "same whatever the engine's log-probs are; weigh each token by exp(old_L - "
            "rollout_L), or end with `return total(inputs, losses_L, metrics, algorithm)` and "
            "set algorithm.importance_cap=2 (docs/own-loss.md), or give "
            "asynchrony.max_staleness=0",
            key=setting,
        )


def _run_loss(loss: Loss, setting: str, algorithm: AlgorithmConfig, tokens: list[int], *, moved: float = 0.0) -> _Trial:
    """Returns metrics and gradients of a loss for these tokens, with the engine's log-probs shifted by `moved`.

    Raises:
        _NotRunnableHere: The loss cannot run here.
        UserError: The loss is invalid.
    """
    inputs, leaves = _inputs(algorithm, tokens, moved)
    many = f"with {len(tokens)} tokens, of which {int(inputs.active_L.sum())} count,"
    try:
        result: Any = loss(inputs, algorithm)
        _check_form(result, setting)
        if result[0].requires_grad:
            result[0].backward()
    except UserError:
        raise
    except Exception as error:  # a user's function may raise anything
        if any(part in str(error).upper() for part in NOT_RUNNABLE_MARKS):
            raise _NotRunnableHere from error
        raise UserError(f"{many} it raises {_text(error)}", key=f"{setting}{_line(loss, error)}") from error
    value, metrics = result
    if len(tokens) == len(ANSWERS) and all(leaf.grad is None for leaf in leaves):
        raise UserError(
            "it has no gradient",
            key=setting,
            fix="compute the loss from logprobs_L or entropy_L, and do not detach these",
        )
    gradients = torch.zeros(len(leaves), len(ANSWERS))
    gradients[:, tokens] = torch.stack([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
    if not bool(value.isfinite() and gradients.isfinite().all()):
        fix = "compute with inputs.clean(…) of what you read: where the weight is 0 there may be NaN"
        fix = (
            fix
            if bool(inputs.active_L.any())
            else "divide by what cannot be 0, or by nothing: weights_L makes the mean"
        )
        raise UserError(f"{many} it, or its gradient, is NaN or infinite", key=setting, fix=fix)
    for name, metric in metrics.items():
        if not bool(metric.isfinite()):
            raise UserError(
                f"{many} its metric {name!r} is {metric.item()}, which is not finite; compute it with inputs.mean(…)",
                key=setting,
            )
    return _Trial(metrics, gradients)


def _check_form(result: Any, setting: str) -> None:
    if not (isinstance(result, tuple) and len(result) == 2 and _is_number(result[0]) and isinstance(result[1], dict)):
        raise UserError(
            f"it returns {_form(result)}", key=setting, fix="return a tensor of one number, and a dict of metrics"
        )
    for name, metric in result[1].items():
        if not isinstance(name, str) or not _is_number(metric):
            raise UserError(
                f"its metric {name!r} is {_form(metric)}",
                key=setting,
                fix="give a tensor of one number, under a name (a text)",
            )


def _inputs(algorithm: AlgorithmConfig, tokens: list[int], moved: float) -> tuple[LossInputs, list[Tensor]]:
    """Returns a rank's inputs for these tokens of three answers, and the tensors with a gradient.

    Optional columns and figures are set according to the settings. Entries of prompts are NaN. Half of the ratios are
    near 1.
    """
    counts = torch.tensor([i > 0 and ANSWERS[i] == ANSWERS[i - 1] for i in tokens])
    answer = torch.tensor([ANSWERS[i] for i in tokens])
    generator = torch.Generator().manual_seed(0)

    def some(least: float, most: float) -> Tensor:
        return (least + (most - least) * torch.rand(len(ANSWERS), generator=generator))[tokens]

    def given(values: Tensor) -> Tensor:
        return torch.where(counts, values, torch.nan)

    now = some(-2.0, -0.1)
    near = torch.tensor([i % 2 == 0 for i in tokens])
    rollout = now - torch.where(near, 0.001, some(-0.5, 0.5))
    rollout = rollout + moved
    old = rollout if algorithm.old_logprobs == "engine" else now - torch.where(near, 0.002, some(-0.5, 0.5))
    logprobs, entropy = given(now).requires_grad_(), given(some(0.1, 2.0)).requires_grad_()
    weights, kl, bonus = torch.where(counts, 0.2, 0.0), algorithm.kl, algorithm.entropy
    inputs = LossInputs(
        logprobs_L=logprobs,
        entropy_L=entropy,
        weights_L=weights,
        old_L=given(old),
        advantages_L=given(some(-1.0, 1.0)),
        rollout_L=given(rollout),
        drawn_L=counts,
        reference_L=given(some(-2.0, -0.1)) if kl.coefficient else None,
        kl_weights_L=0.5 * weights if kl.in_loss and kl.mean != "loss" else None,
        high_entropy_L=counts & near if bonus.top_share < 1 else None,
        sequence_L=torch.unique(answer, return_inverse=True)[1],
        sequences=len(answer.unique()),
        figures=Figures(entropy_coefficient=None if bonus.target is None else bonus.coefficient),
    )
    return inputs, [logprobs, entropy]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_form, value))})"
    return f"a {type(value).__name__}" if value is not None else "None"


def _listed(trial: _Trial) -> str:
    return ", ".join(sorted(trial.metrics)) or "none"


def _line(loss: Loss, error: Exception) -> str:
    """Returns the line number of the error in the function's own file."""
    frame = last_frame(error, getattr(getattr(loss, "__code__", None), "co_filename", None))
    return f", line {frame.lineno}" if frame else ""


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
