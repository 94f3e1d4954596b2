"""Advantage estimators by name, and user-defined estimators by import path."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from torch import Tensor

from skyrl_mega.algorithms.advantages.base import (
    CRITICS,
    NEEDS,
    AdvantageInputs,
    Estimator,
    PerToken,
    TokenInputs,
    check_finite,
    per_token,
    varied,
)
from skyrl_mega.algorithms.advantages.whitening import apply_whitening
from skyrl_mega.common import imports
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.config.schema.estimators import ESTIMATORS

__all__ = [
    "ADVANTAGES",
    "NEEDS",
    "AdvantageInputs",
    "Estimator",
    "PerToken",
    "TokenInputs",
    "advantages",
    "check",
    "check_finite",
    "estimate",
    "is_per_token",
    "needs",
    "per_token",
    "varied",
    "whiten",
]

ADVANTAGES: Mapping[str, Estimator] = {
    name: getattr(import_module(f"{__name__}.{file}"), function)
    for name, (file, function) in ((name, traits.function.split(":")) for name, traits in ESTIMATORS.items())
}
"""The function of each value of `algorithm.advantage`."""
TAKES = "(AdvantageInputs, AlgorithmConfig)"
"""Arguments of an estimator, for errors."""
KL_NEEDS = frozenset({"old_logprobs", "reference_logprobs"})
"""Columns required for KL in the reward."""


def advantages(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Returns the advantages of the estimator in `algorithm.advantage`, whitened as set in `algorithm.whiten`.

    Returns:
        [N], a value per trajectory, or [T], a value per token (`estimate`); in the dtype of the rewards.

    Raises:
        UserError: The estimator cannot be found or imported, returns another shape, or refuses the inputs (maxrl, a
            negative reward).
        ValueError: Inputs of the estimator are missing, or lengths for whitening. Errors in a user-defined estimator
            pass through unchanged.
    """
    return whiten(estimate(inputs, algorithm), inputs, algorithm).to(inputs.rewards_N.dtype)


def estimate(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Returns the advantages of the estimator in `algorithm.advantage`, before any whitening.

    Returns:
        float64 [N], a value per trajectory; [T], a value per token, for estimators marked with `per_token`.

    Raises:
        UserError: The estimator cannot be found or imported (`find`), returns another shape, or refuses the inputs
            (maxrl, a negative reward).
        ValueError: Inputs of the estimator are missing. Errors in a user-defined estimator pass through unchanged.
    """
    estimator = find(algorithm.advantage)
    estimated = estimator(inputs, algorithm)
    tokens = isinstance(estimator, PerToken)
    like, each = (inputs.token.rewards_T, "tokens") if tokens else (inputs.rewards_N, "trajectories")
    if estimated.shape != like.shape:
        gives = f"it gives {tuple(estimated.shape)} for {tuple(like.shape)} {each}"
        other = "leave @per_token away" if tokens else "mark it with @per_token(…)"
        raise UserError(
            f"{gives}; return one number for each, or {other}", key="algorithm.advantage", value=algorithm.advantage
        )
    return estimated.double()


def whiten(estimated: Tensor, inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Returns the result of `estimate`, whitened as set in `algorithm.whiten` (`none`: `estimated` itself): float64,
    same shape. `estimated` is not changed.

    Raises:
        UserError: The estimator cannot be found or imported.
        ValueError: As in `apply_whitening`: lengths are needed, and `inputs.tokens_N` is None.
    """
    return apply_whitening(estimated, inputs, algorithm.whiten, tokens=is_per_token(algorithm))


def find(name: str) -> Estimator:
    """Returns the estimator for a value of `algorithm.advantage`.

    Args:
        name: A key of `ADVANTAGES`, or an import path such as `file.py:function`, which is imported.

    Raises:
        UserError: The name is unknown, the import fails (also if the user's code raises), or the function does not
            accept two arguments.
    """
    estimator: Estimator = imports.function_by_name(name, ADVANTAGES, "algorithm.advantage", TAKES)
    if isinstance(estimator, PerToken):
        imports.check_takes(estimator.estimate, f"algorithm.advantage = {name}", TAKES)
    return estimator


def is_per_token(algorithm: AlgorithmConfig) -> bool:
    """Returns True if the estimator in `algorithm.advantage` has a separate advantage for each token.

    Raises:
        UserError: The estimator cannot be found or imported.
    """
    return isinstance(find(algorithm.advantage), PerToken)


def needs(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Returns the columns of the batch (keys of `NEEDS`) that the estimator or KL in the reward reads.

    Empty if neither reads any. Checks nothing, as `check` does. The training loop computes these columns before the
    advantages.

    Raises:
        UserError: The estimator cannot be found or imported.
    """
    estimator = find(algorithm.advantage)
    needed = estimator.needs if isinstance(estimator, PerToken) else frozenset()
    return needed | KL_NEEDS if algorithm.kl.where == "reward" else needed


def check(algorithm: AlgorithmConfig) -> None:
    """Checks before any process starts that the estimator of the settings exists and that its inputs will be available.
    A user-defined estimator is imported, but not called.

    Raises:
        UserError: The estimator cannot be found or imported, or needs a critic or a reference that is not configured.
    """
    if CRITICS in needs(algorithm) and not algorithm.advantage_traits.critic:
        raise UserError(
            "it needs a critic's values, and only gae has a critic; allowed needs of an "
            "estimator of your own are old_logprobs, old_squares and reference_logprobs",
            key="algorithm.advantage",
            value=algorithm.advantage,
        )
    if "reference_logprobs" in needs(algorithm) and not algorithm.kl.coefficient:
        raise UserError(
            "it needs the reference's log-probs, and algorithm.kl.coefficient=0 has no "
            "reference; give a number above 0",
            key="algorithm.advantage",
            value=algorithm.advantage,
        )
