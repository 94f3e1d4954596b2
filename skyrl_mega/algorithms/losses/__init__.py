"""Policy losses by name (`config.schema.losses`), and user-defined losses by import path."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from skyrl_mega.algorithms.losses.base import Loss, LossInputs, Metrics
from skyrl_mega.algorithms.losses.inputs import Figures
from skyrl_mega.algorithms.losses.supervised import supervised
from skyrl_mega.algorithms.losses.trial import check_on_tokens, check_reads_engine
from skyrl_mega.common import imports
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.schema import AlgorithmConfig, AsynchronyConfig
from skyrl_mega.config.schema.losses import LOSSES as TRAITS

__all__ = [
    "LOSSES",
    "Figures",
    "Loss",
    "LossInputs",
    "Metrics",
    "check",
    "find",
]

LOSSES: Mapping[str, Loss] = {
    name: getattr(import_module(f"{__name__}.{file}"), function)
    for name, (file, function) in ((name, traits.function.split(":")) for name, traits in TRAITS.items())
}
"""The function of each value of `algorithm.loss`."""
SUPERVISED = "supervised"
"""Loss of the warm-up; not available as `algorithm.loss`."""


def find(name: str) -> Loss:
    """Returns the loss function for a value of `algorithm.loss`.

    Args:
        name: A key of `LOSSES`, an import path such as `file.py:function`, or "supervised".

    Raises:
        UserError: The name is unknown, the import fails (also if the user's code raises), or the function does not
            accept two arguments.
    """
    if name == SUPERVISED:
        return supervised
    loss: Loss = imports.function_by_name(name, LOSSES, "algorithm.loss", "(LossInputs, AlgorithmConfig)")
    return loss


def check(algorithm: AlgorithmConfig, asynchrony: AsynchronyConfig | None = None) -> None:
    """Checks before any process starts that the loss exists and, if it is user-defined, that it works on a few tokens.
    A user-defined loss is imported and called.

    Args:
        algorithm: The settings of the loss.
        asynchrony: Decides if tokens may come from older weights; then a user-defined loss must read the engine's
            log-probs. None: never.

    Raises:
        UserError: The loss is unknown, cannot be imported, is "supervised", fails on these tokens, or must read the
            engine's log-probs and does not.
    """
    if algorithm.loss == SUPERVISED:
        raise UserError(
            f"this loss is only for the warm-up (warmup.files); allowed is one of {', '.join(LOSSES)}",
            key="algorithm.loss",
            value="supervised",
        )
    loss = find(algorithm.loss)
    if algorithm.loss not in LOSSES:
        setting = f"algorithm.loss = {shown(algorithm.loss)}"
        check_on_tokens(loss, setting, algorithm)
        if asynchrony and asynchrony.mode != "off" and asynchrony.max_staleness:
            check_reads_engine(loss, setting, algorithm, asynchrony.mode)
