"""Policy losses by name, a file each, and user-defined losses by import path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from skyrl_mega.algorithms.losses.base import Loss, LossInputs, Metrics
from skyrl_mega.algorithms.losses.cispo import cispo
from skyrl_mega.algorithms.losses.covariance import clip_cov, kl_cov
from skyrl_mega.algorithms.losses.dppo import dppo_kl, dppo_tv
from skyrl_mega.algorithms.losses.dro import dro
from skyrl_mega.algorithms.losses.gmpo import gmpo
from skyrl_mega.algorithms.losses.gspo import gspo
from skyrl_mega.algorithms.losses.inputs import Figures
from skyrl_mega.algorithms.losses.ppo import ppo
from skyrl_mega.algorithms.losses.sapo import sapo
from skyrl_mega.algorithms.losses.supervised import supervised
from skyrl_mega.algorithms.losses.trial import check_on_tokens, check_reads_engine
from skyrl_mega.config import imports
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig, AsynchronyConfig
from skyrl_mega.config.values import shown

__all__ = [
    "LOSSES",
    "PULLING_AT_ZERO_ADVANTAGE",
    "Figures",
    "Loss",
    "LossInputs",
    "Metrics",
    "check",
    "find",
    "with_absolute_path",
]

LOSSES: Mapping[str, Loss] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""Values of `algorithm.loss`."""
PULLING_AT_ZERO_ADVANTAGE = frozenset({"dro", "kl_cov"})
"""Losses with a gradient at advantage 0: they pull the policy back to the old policy."""
SUPERVISED = "supervised"
"""Loss of the warm-up; not available as `algorithm.loss`."""


def find(name: str) -> Loss:
    """Returns the loss named by `algorithm.loss`, or `supervised`.

    Raises:
        UserError: The name is unknown, or the import path leads nowhere.
    """
    if name == SUPERVISED:
        return supervised
    loss: Loss = imports.function_by_name(name, LOSSES, "algorithm.loss", "(LossInputs, AlgorithmConfig)")
    return loss


def check(algorithm: AlgorithmConfig, asynchrony: AsynchronyConfig | None = None) -> None:
    """Checks before any process starts that the loss exists and, if it is user-defined, that it works.

    Args:
        algorithm: The settings of the loss.
        asynchrony: Decides if tokens may come from older weights; None if never.

    Raises:
        UserError: The loss is unknown or invalid.
    """
    if algorithm.loss == SUPERVISED:
        raise UserError(
            f"the warm-up has it; allowed is one of {', '.join(LOSSES)}", key="algorithm.loss", value="supervised"
        )
    loss = find(algorithm.loss)
    if algorithm.loss not in LOSSES:
        setting = f"algorithm.loss = {shown(algorithm.loss)}"
        check_on_tokens(loss, setting, algorithm)
        if asynchrony and asynchrony.mode != "off" and asynchrony.max_staleness:
            check_reads_engine(loss, setting, algorithm, asynchrony.mode)


def with_absolute_path(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Returns the settings with an absolute path of the loss's file, for processes that start in another folder."""
    source, _, name = algorithm.loss.rpartition(":")
    return replace(algorithm, loss=f"{Path(source).absolute()}:{name}") if source.endswith(".py") else algorithm
