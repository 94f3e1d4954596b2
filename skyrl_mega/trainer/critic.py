"""Critic operations of the loop: values of a step's tokens, optimizer steps towards the returns, and quality."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_mega.batch.samples import Samples
from skyrl_mega.megatron.group import TrainGroup
from skyrl_mega.megatron.objectives import VALUE
from skyrl_mega.trajectories.sequences import Sequences

OLD = "old_values"
"""The column of values under the critic's weights at the start of the RL step."""


def values(critic: TrainGroup, minis: Sequence[Samples]) -> Tensor:
    """Returns the critic's value of the state before each token of all mini-batches: float32 [T], 0 for tokens with
    weight 0. Also sends the mini-batches to the critic's ranks, which keep the mini-batches with these values as the
    column `OLD`.

    Raises:
        ActorFailed: A rank failed; the critic's group is ended.
    """
    critic.hold([mini.with_weights_only() for mini in minis])
    return torch.cat(critic.values(OLD))


def train_critic(critic: TrainGroup, minis: Sequence[Sequences], epochs: int) -> dict[str, float]:
    """Trains the critic towards the column `returns`: `epochs` passes, an optimizer step per mini-batch with a nonzero
    weight. The critic's ranks already keep the mini-batches (`values`); `minis` gives only the weights.

    Returns:
        `critic/…`: means over the optimizer steps; {} if no mini-batch contains a token with a weight in the loss.
        Of a mini-batch, `critic/value` and `critic/clip_fraction` are means by the tokens' weights in the loss.

    Raises:
        ActorFailed: A rank failed.
    """
    totals = {mini: float(held["weights"].sum()) for mini, held in enumerate(minis) if held["weights"].any()}
    values_by_name: dict[str, list[float]] = {}
    for mini, total in [*totals.items()] * epochs:
        for name, value in critic.train(mini, loss=VALUE).items():
            mean = name in ("clip_fraction", "value")  # token means: divide by the weights' sum, which need not be 1
            values_by_name.setdefault(f"critic/{name}", []).append(value / total if mean else value)
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


def quality(batch: Sequences) -> dict[str, float]:
    """Returns how well the column `values` predicted the column `returns`, over the tokens of a step with `mask` 1.

        explained_variance = 1 - Var(R - V) / Var(R)

    1 is perfect, 0 as good as the mean return, below 0 worse.

    Returns:
        `critic/return`, the mean return, and `critic/explained_variance`, left out if all returns are equal; {} without
        tokens with `mask` 1.
    """
    counts = batch["mask"] != 0
    returns, errors = batch["returns"][counts].double(), (batch["returns"] - batch["values"])[counts].double()
    if not len(returns):
        return {}
    metrics = {"critic/return": float(returns.mean())}
    if variance := float(returns.var(correction=0)):
        metrics["critic/explained_variance"] = 1 - float(errors.var(correction=0)) / variance
    return metrics
