"""What a Megatron model of a run is for: its name says where its settings, logs and checkpoints are."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.models.registry import HeadKind


@dataclass(frozen=True)
class ModelRole:
    """One of a run's Megatron models."""

    name: str
    """Its group of settings (`<name>.layout`), and the name of its actors, their logs and its part of a checkpoint."""
    trainable: bool
    """Whether it has gradients and an optimizer."""
    head: HeadKind = "vocab"
    """What reads its last hidden states: log-probs of tokens, or a value."""
    synced: bool = False
    """Whether engines receive its weights."""


POLICY = ModelRole("policy", trainable=True, synced=True)
REFERENCE = ModelRole("reference", trainable=False)
CRITIC = ModelRole("critic", trainable=True, head="value")
