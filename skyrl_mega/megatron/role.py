"""What a trained model is for: its name says where its settings, logs and checkpoints are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelRole:
    """One of a run's Megatron models."""

    name: str
    """Its group of settings (`<name>.layout`), and the name of its actors and their logs."""
    trainable: bool
    """Whether it has gradients and an optimizer."""


POLICY = ModelRole("policy", trainable=True)
REFERENCE = ModelRole("reference", trainable=False)
