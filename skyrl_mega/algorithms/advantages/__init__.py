"""Advantages by name, and the user's own by import path: how much better a trajectory did than others."""

from __future__ import annotations

from collections.abc import Mapping

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
from skyrl_mega.algorithms.advantages.gae import gae
from skyrl_mega.algorithms.advantages.greedy import remax
from skyrl_mega.algorithms.advantages.group import gpg, grpo, maxrl, opo, pass_at_k, rloo
from skyrl_mega.algorithms.advantages.several import gdpo
from skyrl_mega.algorithms.advantages.token_baseline import optimal_token_baseline
from skyrl_mega.algorithms.advantages.turns import grpo_turns, reinforce_plus_plus
from skyrl_mega.algorithms.advantages.whitening import after
from skyrl_mega.algorithms.advantages.whole_batch import reinforce, reinforce_plus_plus_baseline
from skyrl_mega.config import imports
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig

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
    "needs",
    "of_tokens",
    "per_token",
    "varied",
    "whiten",
]

GAE = "gae"
"""The only one with a critic (`config.derived.has_critic`)."""
ADVANTAGES: Mapping[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "maxrl": maxrl,
    "gpg": gpg,
    "gdpo": gdpo,
    "grpo_turns": grpo_turns,
    "optimal_token_baseline": optimal_token_baseline,
    "remax": remax,
    "reinforce": reinforce,
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": reinforce_plus_plus_baseline,
    GAE: gae,
}
"""What `algorithm.advantage` may name."""
TAKES = "(AdvantageInputs, AlgorithmConfig)"
"""The arguments of one, for errors."""
KL_NEEDS = frozenset({"old_logprobs", "reference_logprobs"})
"""What KL in the reward is made from."""


def advantages(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """Advantages by the estimator that `algorithm.advantage` names, whitened as `algorithm.whiten` says, in the dtype
    of the rewards: [N] or [T] as `estimate` gives them, which says what is raised, too."""
    return whiten(estimate(inputs, algorithm), inputs, algorithm).to(inputs.rewards_N.dtype)


def estimate(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """What the estimator that `algorithm.advantage` names gives, before any whitening.

    Returns:
        float64 [N], one for each trajectory; with one that is marked with `per_token` [T], one for each token.

    Raises:
        UserError: It names none, its import path leads nowhere, or an estimator of the user's own gives another shape.
    """
    estimator = find(algorithm.advantage)
    found = estimator(inputs, algorithm)
    tokens = isinstance(estimator, PerToken)
    like, each = (inputs.token.rewards_T, "tokens") if tokens else (inputs.rewards_N, "trajectories")
    if found.shape != like.shape:
        gives = f"it gives {tuple(found.shape)} for {tuple(like.shape)} {each}"
        other = "leave @per_token away" if tokens else "mark it with @per_token(…)"
        raise UserError(f"algorithm.advantage = {algorithm.advantage}: {gives}; return one number for each, or {other}")
    return found.double()


def whiten(estimated: Tensor, inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
    """What `algorithm.whiten` makes of what `estimate` gave: float64, of the same shape."""
    return after(estimated, inputs, algorithm.whiten, tokens=of_tokens(algorithm))


def find(name: str) -> Estimator:
    """The estimator that `algorithm.advantage` names.

    Raises:
        UserError: It names none, or its import path leads nowhere.
    """
    found: Estimator = imports.named(name, ADVANTAGES, "algorithm.advantage", TAKES)
    if isinstance(found, PerToken):
        imports.check_takes_two(found.estimate, f"algorithm.advantage = {name}", TAKES)
    return found


def of_tokens(algorithm: AlgorithmConfig) -> bool:
    """Whether each token has an advantage of its own."""
    return isinstance(find(algorithm.advantage), PerToken)


def needs(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Columns of the batch from which advantages are made: the loop has them computed first."""
    estimator = find(algorithm.advantage)
    needed = estimator.needs if isinstance(estimator, PerToken) else frozenset()
    return needed | KL_NEEDS if algorithm.kl.where == "reward" else needed


def check(algorithm: AlgorithmConfig) -> None:
    """Refuses an estimator that cannot be found, or that needs a critic which is not there, before any process starts.

    Raises:
        UserError: It cannot.
    """
    if CRITICS in needs(algorithm) and algorithm.advantage != GAE:
        raise UserError(
            f"algorithm.advantage = {algorithm.advantage}: it needs a critic's values, and only gae has a critic; "
            "allowed needs of an estimator of your own are old_logprobs, old_squares and reference_logprobs"
        )
    if "reference_logprobs" in needs(algorithm) and not algorithm.kl.coefficient:
        raise UserError(
            f"algorithm.advantage = {algorithm.advantage}: it needs the reference's log-probs, and "
            "algorithm.kl.coefficient=0 has no reference; give a number above 0"
        )
