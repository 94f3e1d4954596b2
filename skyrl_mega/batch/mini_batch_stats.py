"""Statistics over a whole mini-batch that no single micro-batch can compute: selected tokens and the mean importance
weight. All are computed under the sampling weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_mega.algorithms import selection
from skyrl_mega.algorithms.losses import LossInputs
from skyrl_mega.algorithms.losses.correction import importance_mean
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.trajectories.sequences import Sequences


def token_selections(
    minis: Sequence[Sequences], algorithm: AlgorithmConfig, seed: Sequence[int]
) -> dict[str, list[Tensor]]:
    """Returns the selections of tokens made by the loss: name of the column → bool [T] for each mini-batch.

    The result is {} if the loss selects no tokens. The names are `selection.COVARIANCE` and `selection.ENTROPY`.

    Args:
        minis: Mini-batches with weights, advantages and the columns in `selection.columns_needed`.
        algorithm: Defines the selections.
        seed: Seed of random selections; the mini-batch's index is appended.
    """
    columns: dict[str, list[Tensor]] = {}
    if algorithm.loss_traits.covariance:
        columns[selection.COVARIANCE] = [_by_covariance(m, algorithm, [*seed, i]) for i, m in enumerate(minis)]
    if algorithm.entropy.top_share < 1:
        columns[selection.ENTROPY] = [_by_entropy(m, algorithm.entropy.top_share) for m in minis]
    return columns


def mean_importance_weight(mini: Sequences, algorithm: AlgorithmConfig) -> float:
    """Returns the mean of the importance weights over a mini-batch's tokens in the loss, by which each importance
    weight is divided. Returns 1 without `importance_normalize`, and if all importance weights are 0.

    Args:
        mini: A mini-batch with the columns `weights`, `old_logprobs` and `rollout_logprobs`.
        algorithm: Defines the importance weights.
    """
    if not algorithm.importance_normalize:
        return 1.0
    old, engine = mini["old_logprobs"], mini["rollout_logprobs"]
    answer, answers = mini.answers()
    inputs = LossInputs(
        logprobs_L=old,
        weights_L=mini["weights"],
        old_L=old,
        advantages_L=old,
        rollout_L=torch.where(mini["drawn"], engine, old) if "drawn" in mini else engine,
        sequence_L=answer,
        sequences=answers,
    )
    return importance_mean(inputs, algorithm)


def _by_covariance(mini: Sequences, algorithm: AlgorithmConfig, seed: Sequence[int]) -> Tensor:
    counts = mini["weights"] != 0
    if not counts.any():
        return counts
    covariance_P = selection.covariance(mini["advantages"][counts], mini["old_logprobs"][counts])
    if algorithm.loss_traits.covariance == "highest":
        return _scatter(counts, selection.punished_by_covariance(covariance_P, share=algorithm.kl_cov.share))
    c = algorithm.clip_cov
    return _scatter(
        counts, selection.clipped_by_covariance(covariance_P, share=c.share, low=c.low, high=c.high, seed=seed)
    )


def _by_entropy(mini: Sequences, share: float) -> Tensor:
    counts = mini["weights"] != 0
    return _scatter(counts, selection.high_entropy(mini["old_entropy"][counts], share=share))


def _scatter(counts_T: Tensor, chosen_P: Tensor) -> Tensor:
    """Scatters selections over the counted tokens, bool [P], into all tokens: bool [T]."""
    return torch.zeros_like(counts_T).masked_scatter(counts_T, chosen_P)
