"""Roles of a run's Megatron models. A role's name determines the places of settings, logs and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.models.registry import HeadKind


@dataclass(frozen=True)
class ModelRole:
    """The role of a Megatron model in a run: policy, reference or critic."""

    name: str
    """Name of the group of settings (`<name>.layout`), of actors and logs, and of the role's part of a checkpoint."""
    trainable: bool
    """True if the model uses gradients and an optimizer."""
    head: HeadKind = "vocab"
    """Head on the last hidden states: log-probs of tokens, or a value."""
    synced: bool = False
    """True if engines receive the weights."""


POLICY = ModelRole("policy", trainable=True, synced=True)
REFERENCE = ModelRole("reference", trainable=False)
CRITIC = ModelRole("critic", trainable=True, head="value")
