"""How far the engine's log-probs lie from the policy's, for the tokens that the engine drew, at the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from skyrl_mega.algorithms.kl import kl
from skyrl_mega.algorithms.losses.base import LossInputs

COUNT = "mismatch_tokens"
TOTALS = {"mismatch/logprob_abs_mean": "mismatch_abs", "mismatch/kl": "mismatch_kl"}
PEAKS = {"mismatch/logprob_abs_max": "mismatch_abs_max"}


def mismatch_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """What one micro-batch adds: tokens, sums and the maximum, without gradient; {} without the engine's log-probs.

    |engine - policy|, and the k3 estimate of KL(engine ‖ policy): the tokens are the engine's, so it is the sampling
    distribution.
    """
    if inputs.rollout_L is None:
        return {}
    counts = inputs.active_L if inputs.drawn_L is None else inputs.active_L & inputs.drawn_L
    engine = torch.where(counts, inputs.rollout_L, 0.0).double()
    policy = torch.where(counts, inputs.old_L.detach(), 0.0).double()
    distance = (engine - policy).abs()
    return {
        COUNT: counts.sum(),
        "mismatch_abs": distance.sum(),
        "mismatch_kl": kl(engine, policy, "k3").sum(),
        "mismatch_abs_max": distance.amax() if len(distance) else distance.sum(),
    }


def mismatch(updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """A step's mismatch, from the sums of its optimizer steps: the mean and the maximum of the distance, and KL.

    All 0 without tokens.
    """
    updates = list(updates)
    tokens = sum(sums[COUNT] for sums in updates)
    means = {name: sum(sums[key] for sums in updates) / max(tokens, 1) for name, key in TOTALS.items()}
    return means | {name: max((sums[key] for sums in updates), default=0.0) for name, key in PEAKS.items()}
