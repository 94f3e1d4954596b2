"""Inputs and shared parts of advantage estimators.

    Estimator = (AdvantageInputs, AlgorithmConfig) → advantages [N], or with `per_token` [T]

A trajectory has a single advantage for all of its tokens, or each token has its own. Failed trajectories are not among
the N.

Legend: N trajectories; T tokens written by the policy, each once, trajectory by trajectory in the order of writing. The
way a trajectory is cut into samples does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig

STD_EPSILON = 1e-6
"""Added to a standard deviation of rewards, so that nearly equal rewards do not explode."""
ROUNDING, LEAST = 4 * torch.finfo(torch.float32).eps, 1e-9
"""Largest difference between equal rewards: relative to the larger reward, and absolute near 0."""


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """The T tokens. Prompts and observations are not included; tokens of truncated trajectories are.

    Raises:
        ValueError: The shapes differ.
    """

    trajectory_T: Tensor
    """int64: the token's trajectory, counted from 0, in ascending order."""
    turn_T: Tensor
    """int64: index of the token's answer within the trajectory, counted from 0."""
    rewards_T: Tensor
    """float: an answer's reward at its last token, except for rewards of parts, which are at the token that completes
    the part; 0 elsewhere. The sum over a trajectory is `rewards_N`."""
    known_T: Tensor | None = None
    """bool: True if the fields below are defined; they are 0 for tokens of filtered trajectories, whose weight in the
    loss is 0. None: all defined."""
    old_T: Tensor | None = None
    """Log-probs under the weights at the start of the RL step. Like all fields below, only set if named in
    `per_token`."""
    squares_T: Tensor | None = None
    """Σ_v π(v)² of the tokens' sampling distributions, under these weights."""
    reference_T: Tensor | None = None
    """Log-probs under the reference."""
    values_T: Tensor | None = None
    """A critic's value of the state before the token."""

    def __post_init__(self) -> None:
        shapes = {name: tuple(t.shape) for name, t in vars(self).items() if t is not None}
        if len(set(shapes.values())) > 1 or self.rewards_T.dim() != 1:
            raise ValueError(f"values of tokens have shapes {shapes}: they must all be [T]")

    def returns(self, gamma: float) -> Tensor:
        """Returns the return from each token on, float64 [T]: G_t = Σ γ^k r_{t+k} over the tokens of its trajectory.
        `gamma` is the discount of later rewards."""
        return discounted(self.rewards_T.double(), self.trajectory_T, gamma)


NEEDS = {
    "old_logprobs": "old_T",
    "old_squares": "squares_T",
    "reference_logprobs": "reference_T",
    "values": "values_T",
}
"""Optional inputs of per-token estimators: column of the batch → field of `TokenInputs`."""
CRITICS = "values"
"""The entry of `NEEDS` reserved for gae, the only estimator with a critic."""


@dataclass(frozen=True)
class AdvantageInputs:
    """N trajectories of an RL step.

    Raises:
        ValueError: The shapes differ, or a reward is NaN or infinite.
    """

    rewards_N: Tensor
    """float, in any dtype; advantages have the same dtype."""
    groups_N: Tensor
    """Integers; equal values mark a group, the samples of a prompt."""
    tokens_N: Tensor | None = None
    """int64: number of tokens written by the policy; only for estimators that weigh by length."""
    greedy_N: Tensor | None = None
    """float: reward of the greedy answer to the trajectory's prompt, NaN without a greedy answer; only for ReMax."""
    token_inputs: TokenInputs | None = None
    """The tokens; only set for estimators marked with `per_token`."""
    named: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each: an environment's rewards by name, before weights and length punishment; empty for a single reward."""

    def __post_init__(self) -> None:
        tensors = (self.rewards_N, self.groups_N, self.tokens_N, self.greedy_N)
        shapes = [tuple(t.shape) for t in tensors if t is not None]
        if len(set(shapes)) > 1 or self.rewards_N.dim() != 1:
            raise ValueError(f"rewards, groups, tokens and baselines have shapes {shapes}: they must all be [N]")
        check_finite(self.rewards_N)

    @cached_property
    def r(self) -> Tensor:
        """float64 [N]: the rewards, `rewards_N`."""
        return self.rewards_N.double()

    @cached_property
    def lengths(self) -> Tensor:
        """float64 [N]: number of tokens written by the policy, `tokens_N`.

        Raises:
            ValueError: `tokens_N` is None.
        """
        if self.tokens_N is None:
            raise ValueError("this estimator needs tokens_N")
        return self.tokens_N.double()

    @property
    def token(self) -> TokenInputs:
        """The tokens, `token_inputs`.

        Raises:
            UserError: `token_inputs` is None, because the estimator is not marked with `per_token`.
        """
        if self.token_inputs is None:
            raise UserError(
                "the estimator reads inputs.token and is not marked with @per_token(…)",
                key="algorithm.advantage",
                fix="write @per_token() above the function, or @per_token with the names of the columns that it reads",
            )
        return self.token_inputs

    @cached_property
    def group(self) -> Tensor:
        """int64 [N]: `groups_N`, renumbered to 0, 1, 2, …"""
        return torch.unique(self.groups_N, return_inverse=True)[1]

    @cached_property
    def varied(self) -> Tensor:
        """bool [N]: True if the rewards of the trajectory's group differ by more than rounding. In a group with equal
        rewards nothing is better, and subtracting a baseline would leave rounding errors."""
        return varied(self.rewards_N, self.groups_N)

    def sums(self, values_N: Tensor) -> Tensor:
        """Returns for each trajectory the sum of the values over its group: [N], in the dtype of `values_N`, which has
        a value per trajectory."""
        return sums_of(values_N, self.group)

    @cached_property
    def count(self) -> Tensor:
        """float64 [N]: number of trajectories in the trajectory's group."""
        return self.sums(torch.ones_like(self.r))

    def centred(self) -> Tensor:
        """Returns r - mean(r of its group) for each trajectory: float64 [N], exactly 0 if the group's rewards
        are equal."""
        return torch.where(self.varied, self.r - self.sums(self.r) / self.count, 0.0)


Estimator = Callable[[AdvantageInputs, AlgorithmConfig], Tensor]
"""An advantage estimator: returns advantages [N], or [T] if marked with `per_token`."""


@dataclass(frozen=True)
class PerToken:
    """An estimator with a separate advantage for each token: [T]. Made by the decorator `per_token`."""

    estimate: Estimator
    needs: frozenset[str]
    """Entries of `NEEDS` that the estimator reads."""

    def __call__(self, inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
        """Returns the result of `estimate` unchecked: advantages [T]."""
        return self.estimate(inputs, algorithm)


def per_token(*needs: str) -> Callable[[Estimator], PerToken]:
    """Returns a decorator for an estimator with an advantage per token: it wraps the function in `PerToken`.

    Without the decorator, an estimator returns an advantage per trajectory.

    Args:
        needs: Inputs besides the rewards: names of `NEEDS`. The loop computes them before advantages.

    Raises:
        ValueError: There is no such column, or the decorator is used without parentheses.
    """
    if any(callable(need) for need in needs):
        raise ValueError("per_token is called first: write @per_token(), or @per_token(…) with the names that it needs")
    if unknown := set(needs) - set(NEEDS):
        allowed = ", ".join(name for name in NEEDS if name != CRITICS)
        raise ValueError(f"per_token({', '.join(map(repr, sorted(unknown)))}): allowed are {allowed}")
    return lambda estimate: PerToken(estimate, frozenset(needs))


def sums_of(values_M: Tensor, group_M: Tensor) -> Tensor:
    """Returns for each value the sum of all values of its group: [M], in the dtype of the values. Groups are int64,
    counted from 0."""
    groups = int(group_M.max()) + 1 if len(group_M) else 0
    return values_M.new_zeros(groups).index_add(0, group_M, values_M)[group_M]


def discounted(values_T: Tensor, sequence_T: Tensor, gamma: float) -> Tensor:
    """Returns Σ γ^k x_{t+k} over the rest of the same sequence, token t included: a new tensor [T].

    Each pass doubles the range of the sums, so the number of passes is log2 of the longest sequence.

    Args:
        values_T: x.
        sequence_T: int64; equal values are consecutive.
        gamma: γ, from one entry to the next.
    """
    sums_T, reach = values_T.clone(), 1
    while reach < len(sums_T) and bool((same := sequence_T[reach:] == sequence_T[:-reach]).any()):
        sums_T[:-reach] = sums_T[:-reach] + torch.where(same, gamma**reach * sums_T[reach:], 0.0)
        reach *= 2
    return sums_T


def check_finite(rewards_N: Tensor) -> None:
    """Raises an error for NaN and infinite rewards, with index and value of the first, and returns nothing: a group
    with such a reward would look like a group without a signal.

    Raises:
        ValueError: A reward is NaN or infinite.
    """
    if not rewards_N.isfinite().all():
        index = int((~rewards_N.isfinite()).nonzero()[0])
        raise ValueError(f"reward {index} is {rewards_N[index].item()}; allowed is a finite number")


def beyond_rounding(difference: Tensor, scale: Tensor) -> Tensor:
    """Returns a bool tensor: True if two rewards differ by more than the rounding of their sums.

    The rounding is 4 float32 epsilons of `scale`, but at least 1e-9.

    Args:
        difference: The larger reward minus the smaller reward.
        scale: The larger magnitude of the two; same shape.
    """
    return difference > (ROUNDING * scale).clamp(min=LEAST)


def varied(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Returns bool [N]: True if the rewards of the trajectory's group differ by more than rounding; False in a group of
    one."""
    rewards_N = rewards_N.double()
    groups, index = torch.unique(groups_N, return_inverse=True)
    highest = rewards_N.new_zeros(len(groups)).scatter_reduce(0, index, rewards_N, "amax", include_self=False)
    lowest = rewards_N.new_zeros(len(groups)).scatter_reduce(0, index, rewards_N, "amin", include_self=False)
    return beyond_rounding(highest - lowest, torch.maximum(highest.abs(), lowest.abs()))[index]
