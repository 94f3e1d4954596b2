"""How far the engine's log-probs lie from the policy's, for the tokens that the engine drew, at the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from skyrl_mega.algorithms.kl import kl
from skyrl_mega.algorithms.losses.base import LossInputs

COUNT = "mismatch_tokens"
TOTALS = {
    "mismatch/logprob_abs_mean": "mismatch_abs",
    "mismatch/kl": "mismatch_kl",
    "mismatch/kl_k1": "mismatch_signed",
    "mismatch/far_fraction": "mismatch_far",
}
PEAKS = {"mismatch/logprob_abs_max": "mismatch_abs_max"}
WITHIN = "mismatch_within"
P99 = "mismatch/logprob_abs_p99"

FAR = math.log(2.0)
"""Nats from which a token is far off: engine and policy give it probabilities that differ by a factor of two."""
PER_DECADE = 24
FIRST, LAST = -8 * PER_DECADE, 2 * PER_DECADE
EDGES = tuple(10 ** (i / PER_DECADE) for i in range(FIRST, LAST + 1))
"""Distances in nats, from 1e-8 to 100, up to each of which tokens are counted: so a percentile needs no gather."""
ERROR = 10 ** (0.5 / PER_DECADE) - 1
"""The largest relative error of a percentile, 4.9 %: the middle of a cell is that far from its edges."""


def mismatch_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """What one micro-batch adds: tokens, sums and the maximum, without gradient; {} without the engine's log-probs.

    |engine - policy|; estimates k1 and k3 of KL(engine ‖ policy): the tokens are the engine's, so it is the sampling
    distribution; and `mismatch_within`, int64 [len(EDGES)]: tokens that differ by no more than each edge. All on the
    device, without waiting for it.
    """
    if inputs.rollout_L is None:
        return {}
    counts = inputs.active_L if inputs.drawn_L is None else inputs.active_L & inputs.drawn_L
    engine = torch.where(counts, inputs.rollout_L, 0.0).double()
    policy = torch.where(counts, inputs.old_L.detach(), 0.0).double()
    distance = (engine - policy).abs()
    # What does not count lies beyond every edge. Sorting has no atomic addition, whose order would be free.
    ordered = torch.where(counts, distance, math.inf).sort().values
    edges = 10 ** (torch.arange(FIRST, LAST + 1, dtype=torch.float64, device=ordered.device) / PER_DECADE)
    return {
        COUNT: counts.sum(),
        "mismatch_abs": distance.sum(),
        "mismatch_kl": kl(engine, policy, "k3").sum(),
        "mismatch_signed": (engine - policy).sum(),
        "mismatch_far": (distance > FAR).sum(),
        WITHIN: torch.searchsorted(ordered, edges, right=True),
        "mismatch_abs_max": distance.amax() if len(distance) else distance.sum(),
    }


def mismatch(updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """A step's mismatch, from the sums of its optimizer steps: mean, 99th percentile and maximum of the distance, KL
    and the share of the tokens that are far off.

    Entry i of `mismatch_within` is called `mismatch_within.<i>`. All 0 without tokens.
    """
    updates = list(updates)
    tokens = sum(sums[COUNT] for sums in updates)
    means = {name: sum(sums[key] for sums in updates) / max(tokens, 1) for name, key in TOTALS.items()}
    peaks = {name: max((sums[key] for sums in updates), default=0.0) for name, key in PEAKS.items()}
    within = [sum(sums[f"{WITHIN}.{i}"] for sums in updates) for i in range(len(EDGES))]
    return means | peaks | {P99: quantile(within, tokens, 0.99, peaks["mismatch/logprob_abs_max"])}


def quantile(within: list[float], tokens: float, share: float, most: float) -> float:
    """The smallest distance that so large a share of the tokens does not exceed, but for `ERROR` of it.

    Args:
        within: Tokens up to each of `EDGES`.
        tokens: All tokens.
        share: Between 0 and 1.
        most: The largest distance.

    Returns:
        Nats: the geometric middle of the cell that it lies in; 0 below the first edge, `most` beyond the last.
    """
    if not tokens:
        return 0.0
    at = next((i for i, count in enumerate(within) if count >= share * tokens), None)
    if at is None:
        return most
    return 0.0 if at == 0 else min(most, math.sqrt(EDGES[at - 1] * EDGES[at]))
