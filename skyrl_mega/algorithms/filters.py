"""Which groups a step learns from: DAPO's dynamic sampling (arXiv:2503.14476, section 3.2).

A group whose samples all earn the same reward has zero advantages and only dilutes the batch. Dynamic sampling draws
further prompts until the batch is full of groups that differ (equation 11: 0 < number of correct samples < n). Judge
the rewards as the environment gave them, before any length shaping: the shaping would make equal answers differ.
"""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.algorithms.advantages import varied

__all__ = ["informative_groups", "varied"]


def informative_groups(rewards_GN: Tensor) -> Tensor:
    """Whether each group's rewards differ: [G, n] → bool [G]. For ragged groups see `varied`."""
    return rewards_GN.amax(dim=1) > rewards_GN.amin(dim=1)
