"""The loss of a critic: squared distance of values from returns, with PPO's clip.

Legend: L tokens of the micro-batch on this rank. Entries with weight 0 may contain anything, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_mega.algorithms.losses.inputs import Metrics


@dataclass(frozen=True, kw_only=True)
class ValueInputs:
    """The tokens of a micro-batch on a rank. Only `values_L` carries a gradient."""

    values_L: Tensor
    """float32: V(s_t) under the weights in training, where s_t is all tokens before t."""
    weights_L: Tensor
    """Each token's weight in the loss, a slice of `token_weights`; 0: the token does not count."""
    old_L: Tensor
    """Values under the weights at the start of the RL step."""
    returns_L: Tensor
    """Targets of the values: advantage estimate plus old value."""


def value(inputs: ValueInputs, clip: float | None) -> tuple[Tensor, Metrics]:
    """Returns the loss of PPO's critic for a micro-batch, and metrics.

        L_t = ½ max((V_t - R_t)², (clip(V_t, V_old,t - c, V_old,t + c) - R_t)²)        loss = Σ w_t L_t

    The square is from PPO, arXiv:1707.06347, equation 9; the clip is from OpenAI's baselines (arXiv:2005.12729, section
    3).

    Args:
        inputs: The tokens.
        clip: c, `critic.value_clip`; None does not clip.

    Returns:
        The micro-batch's loss, and the metrics loss, clip_fraction (share of tokens with the clipped loss, which has no
            gradient), and value (mean value). Each is the micro-batch's summand of the mini-batch's mean (`Metrics`).
    """
    counts_L = inputs.weights_L != 0
    values_L, old_L, returns_L = (
        torch.where(counts_L, tensor, 0.0) for tensor in (inputs.values_L, inputs.old_L, inputs.returns_L)
    )
    losses_L = (values_L - returns_L).square()
    clipped = torch.zeros_like(counts_L)
    if clip is not None:
        near_L = torch.clamp(values_L, old_L - clip, old_L + clip)
        bounded_L = (near_L - returns_L).square()
        clipped = bounded_L > losses_L
        losses_L = torch.where(clipped, bounded_L, losses_L)
    loss = 0.5 * (inputs.weights_L * losses_L).sum()
    return loss, {
        "loss": loss.detach(),
        "clip_fraction": (inputs.weights_L * clipped).sum(),
        "value": (inputs.weights_L * values_L.detach()).sum(),
    }
