"""Losses by name: a file each, and the user's own by import path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from skyrl_mega.algorithms.losses.base import Loss, LossInputs, Metrics
from skyrl_mega.algorithms.losses.gspo import gspo
from skyrl_mega.algorithms.losses.ppo import ppo
from skyrl_mega.algorithms.losses.supervised import supervised
from skyrl_mega.config import imports
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.config.values import shown

__all__ = ["LOSSES", "Loss", "LossInputs", "Metrics", "check", "find", "with_absolute_path"]

LOSSES: Mapping[str, Loss] = {"ppo": ppo, "gspo": gspo}
"""What `algorithm.loss` may name."""
SUPERVISED = "supervised"
"""The warm-up's loss, which no run is trained with."""


def find(name: str) -> Loss:
    """The loss that `algorithm.loss` names, or `supervised`.

    Raises:
        UserError: It names none, or its import path leads nowhere.
    """
    if name == SUPERVISED:
        return supervised
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise UserError(
            f"algorithm.loss = {shown(name)}: allowed is one of {', '.join(LOSSES)}, or your own as "
            f"{imports.forms('function')}"
        )
    loss = imports.load(name, "algorithm.loss", kind="function")
    if not callable(loss):
        raise UserError(f"algorithm.loss = {shown(name)}: it is not a function of (LossInputs, AlgorithmConfig)")
    return cast(Loss, loss)


def check(algorithm: AlgorithmConfig) -> None:
    """Refuses a loss that cannot be found, before any process starts.

    Raises:
        UserError: It cannot.
    """
    if algorithm.loss == SUPERVISED:
        raise UserError(f"algorithm.loss = supervised: the warm-up has it; allowed is one of {', '.join(LOSSES)}")
    find(algorithm.loss)


def with_absolute_path(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """The same with a file's path made absolute, for processes that start in another folder."""
    source, _, name = algorithm.loss.rpartition(":")
    return replace(algorithm, loss=f"{Path(source).absolute()}:{name}") if source.endswith(".py") else algorithm
