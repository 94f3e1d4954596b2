"""Mismatch between the engine's and the policy's log-probs of sampled tokens, at equal weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from skyrl_mega.algorithms.kl import kl
from skyrl_mega.algorithms.losses.base import LossInputs

COUNT = "mismatch_tokens"
"""Key of the number of compared tokens in `mismatch_sums`."""
TOTALS = {
    "mismatch/logprob_abs_mean": "mismatch_abs",
    "mismatch/kl": "mismatch_kl",
    "mismatch/kl_k1": "mismatch_signed",
    "mismatch/far_fraction": "mismatch_far",
}
"""Metric of a step → key of its sum over tokens in `mismatch_sums`."""
PEAKS = {"mismatch/logprob_abs_max": "mismatch_abs_max"}
"""Metric of a step → key of its maximum over tokens."""
WITHIN = "mismatch_within"
"""Key of the numbers of tokens within each of `EDGES`."""
P99 = "mismatch/logprob_abs_p99"

FAR = math.log(2.0)
"""Log-prob distance in nats above which a token counts as far: the two probabilities differ by a factor of two."""
PER_DECADE = 24
FIRST, LAST = -8 * PER_DECADE, 2 * PER_DECADE
EDGES = tuple(10 ** (i / PER_DECADE) for i in range(FIRST, LAST + 1))
"""Distances in nats from 1e-8 to 100 up to which tokens are counted, so that a percentile needs no gather."""
ERROR = 10 ** (0.5 / PER_DECADE) - 1
"""Largest relative error of a percentile, 4.9 %: the distance from the middle of a cell to its edges."""


def mismatch_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Returns a micro-batch's number of compared tokens, and sums and maximum of their log-prob distances, without
    gradient; {} without `rollout_L`. The keys are `COUNT`, `WITHIN` and the values of `TOTALS` and `PEAKS`.

    Compares `rollout_L` and `old_L` of the counting tokens sampled by the engine: |engine - policy|; estimates k1 and
    k3 of KL(engine ‖ policy); and `mismatch_within`, int64 [len(EDGES)], the number of tokens with at most each
    distance. Everything stays on the device, without synchronisation.
    """
    if inputs.rollout_L is None:
        return {}
    counts = inputs.active_L if inputs.drawn_L is None else inputs.active_L & inputs.drawn_L
    engine = torch.where(counts, inputs.rollout_L, 0.0).double()
    policy = torch.where(counts, inputs.old_L.detach(), 0.0).double()
    distance = (engine - policy).abs()
    # Ignored tokens lie beyond every edge. Sorting is deterministic, unlike a histogram with atomic additions.
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
    """Returns the metrics of an RL step from the sums (`mismatch_sums`) of its optimizer steps: of the distance in nats
    the mean, 99th percentile and maximum (`mismatch/logprob_abs_mean`, `_p99` and `_max`); KL(engine ‖ policy) by k3
    and by k1 (`mismatch/kl`, `mismatch/kl_k1`); and the share of far tokens (`mismatch/far_fraction`).

    Every element of `updates` must have all keys of `mismatch_sums`, with entry i of `mismatch_within` as
    `mismatch_within.<i>`; other keys are ignored. All metrics are 0 without tokens, and without `updates`. Raises
    KeyError if a key is missing.
    """
    updates = list(updates)
    tokens = sum(sums[COUNT] for sums in updates)
    means = {name: sum(sums[key] for sums in updates) / max(tokens, 1) for name, key in TOTALS.items()}
    peaks = {name: max((sums[key] for sums in updates), default=0.0) for name, key in PEAKS.items()}
    within = [sum(sums[f"{WITHIN}.{i}"] for sums in updates) for i in range(len(EDGES))]
    return means | peaks | {P99: quantile(within, tokens, 0.99, peaks["mismatch/logprob_abs_max"])}


def quantile(within: list[float], tokens: float, share: float, most: float) -> float:
    """Returns the smallest distance not exceeded by this share of the tokens, up to a relative error of `ERROR`.

    Args:
        within: Number of tokens up to each of `EDGES`.
        tokens: Number of all tokens.
        share: Between 0 and 1.
        most: The largest distance.

    Returns:
        Nats: the geometric middle of the cell; 0 below the first edge and without tokens, `most` above the last.
    """
    if not tokens:
        return 0.0
    cell = next((i for i, count in enumerate(within) if count >= share * tokens), None)
    if cell is None:
        return most
    return 0.0 if cell == 0 else min(most, math.sqrt(EDGES[cell - 1] * EDGES[cell]))
