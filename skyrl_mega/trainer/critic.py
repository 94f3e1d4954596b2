"""What the loop asks of a critic: values of a step's tokens, optimizer steps towards the returns, its quality."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_mega.megatron.group import TrainGroup
from skyrl_mega.megatron.objectives import VALUE
from skyrl_mega.megatron.sequences import Sequences
from skyrl_mega.trainer.batch import Batch

OLD = "old_values"
"""The column of values under the weights at the start of the RL step."""


def values(critic: TrainGroup, minis: Sequence[Sequences]) -> Tensor:
    """Values of the states in which the tokens of all mini-batches were chosen: float32 [T], 0 where no weight is.

    The critic's ranks hold the mini-batches from then on, with these values.
    """
    critic.hold([Sequences(m.lengths, m.tokens, {"weights": m.columns["weights"]}) for m in minis])
    return torch.cat(critic.values(OLD))


def train_critic(critic: TrainGroup, minis: Sequence[Sequences], epochs: int) -> dict[str, float]:
    """`epochs` times an optimizer step on each mini-batch that has a token to learn from, towards `returns`.

    Returns:
        `critic/…`: means over the optimizer steps; {} where no mini-batch has such a token.
    """
    totals = {mini: float(held["weights"].sum()) for mini, held in enumerate(minis) if held["weights"].any()}
    found: dict[str, list[float]] = {}
    for mini, total in [*totals.items()] * epochs:
        for name, figure in critic.train(mini, loss=VALUE).items():
            mean = name in ("clip_fraction", "value")  # of tokens, whose weights need not sum to 1
            found.setdefault(f"critic/{name}", []).append(figure / total if mean else figure)
    return {name: sum(figures) / len(figures) for name, figures in found.items()}


def quality(batch: Batch) -> dict[str, float]:
    """How well the values at the start of the step foretold the returns, over the tokens that count.

        explained_variance = 1 - Var(R - V) / Var(R)

    1 is perfect, 0 as good as the mean return, below 0 worse. It is left out where all returns are equal.
    """
    counts = batch["mask"] != 0
    returns, off = batch["returns"][counts].double(), (batch["returns"] - batch["values"])[counts].double()
    if not len(returns):
        return {}
    found = {"critic/return": float(returns.mean())}
    if spread := float(returns.var(correction=0)):
        found["critic/explained_variance"] = 1 - float(off.var(correction=0)) / spread
    return found
