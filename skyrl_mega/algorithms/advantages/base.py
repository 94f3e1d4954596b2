"""What an estimator is given, and the parts that estimators share.

    Estimator = (AdvantageInputs, AlgorithmConfig) → advantages [N], or with `per_token` [T]

A trajectory has one advantage, which holds for each of its tokens, or each token has its own. Trajectories that failed
are not among the N.

Legend: N trajectories; T tokens that the policy wrote in them, each once, those of a trajectory one after another in
the order in which they were written. However a trajectory is cut into samples, these are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig

STD_EPSILON = 1e-6
"""Added to a standard deviation of rewards, so that nearly equal ones do not explode."""
ROUNDING, LEAST = 4 * torch.finfo(torch.float32).eps, 1e-9
"""What rewards may differ by that are the same: relative to the larger one, and where that is nearly 0."""


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """The T tokens. Prompts and observations are not among them, those of truncated trajectories are.

    Raises:
        ValueError: The shapes differ.
    """

    trajectory_T: Tensor
    """int64: the token's trajectory, counted from 0; it never falls."""
    turn_T: Tensor
    """int64: which of its trajectory's answers the token belongs to, counted from 0."""
    rewards_T: Tensor
    """float: an answer's reward at its last token, less what parts of it earned, which is at the tokens that complete
    them; 0 at the others. A trajectory's sum to its `rewards_N`."""
    known_T: Tensor | None = None
    """bool: whether the token has values in what follows; those without a weight in the loss, of filtered trajectories,
    have 0 there. None: all have."""
    old_T: Tensor | None = None
    """Log-probs under the weights at the start of the RL step. Of this and what follows: only what the estimator names
    in `per_token` is there."""
    squares_T: Tensor | None = None
    """Σ_v π(v)² of the distributions that the tokens were drawn from, under those weights."""
    reference_T: Tensor | None = None
    """Log-probs under the reference."""
    values_T: Tensor | None = None
    """A critic's value of the state in which the token was chosen."""

    def __post_init__(self) -> None:
        given = {name: tuple(t.shape) for name, t in vars(self).items() if t is not None}
        if len(set(given.values())) > 1 or self.rewards_T.dim() != 1:
            raise ValueError(f"values of tokens have shapes {given}: they must all be [T]")

    def returns(self, gamma: float) -> Tensor:
        """What is earned from each token on, float64 [T]: G_t = Σ γ^k r_{t+k} over the tokens of its trajectory."""
        return discounted(self.rewards_T.double(), self.trajectory_T, gamma)


NEEDS = {
    "old_logprobs": "old_T",
    "old_squares": "squares_T",
    "reference_logprobs": "reference_T",
    "values": "values_T",
}
"""What an estimator of tokens may need beside rewards: a column of the batch → its field of `TokenInputs`."""
CRITICS = "values"
"""The one of them that only gae may have: no other has a critic."""


@dataclass(frozen=True)
class AdvantageInputs:
    """N trajectories of one RL step.

    Raises:
        ValueError: The shapes differ, or a reward is NaN or infinite.
    """

    rewards_N: Tensor
    """float, in any dtype; advantages have the same."""
    groups_N: Tensor
    """Integers; equal ones belong to one group, the samples of one prompt."""
    tokens_N: Tensor | None = None
    """int64: tokens that the policy wrote; only estimators that weigh by length look at it."""
    greedy_N: Tensor | None = None
    """float: the reward of the greedy answer to the trajectory's prompt, NaN where there is none; only ReMax has
    any."""
    of_tokens: TokenInputs | None = None
    """The tokens themselves; there for estimators that are marked with `per_token`."""
    named: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each: an environment's rewards by name, before weights and the length's punishment; empty where it gives
    one."""

    def __post_init__(self) -> None:
        given = (self.rewards_N, self.groups_N, self.tokens_N, self.greedy_N)
        shapes = [tuple(t.shape) for t in given if t is not None]
        if len(set(shapes)) > 1 or self.rewards_N.dim() != 1:
            raise ValueError(f"rewards, groups, tokens and baselines have shapes {shapes}: they must all be [N]")
        check_finite(self.rewards_N)

    @cached_property
    def r(self) -> Tensor:
        """float64 [N]: the rewards."""
        return self.rewards_N.double()

    @cached_property
    def lengths(self) -> Tensor:
        """float64 [N]: `tokens_N`."""
        if self.tokens_N is None:
            raise ValueError("this estimator needs tokens_N")
        return self.tokens_N.double()

    @property
    def token(self) -> TokenInputs:
        """`of_tokens`.

        Raises:
            UserError: An estimator reads them that is not marked with `per_token`.
        """
        if self.of_tokens is None:
            raise UserError("algorithm.advantage: an estimator that reads inputs.token is marked with @per_token(…)")
        return self.of_tokens

    @cached_property
    def group(self) -> Tensor:
        """int64 [N]: groups counted from 0."""
        return torch.unique(self.groups_N, return_inverse=True)[1]

    @cached_property
    def varied(self) -> Tensor:
        """bool [N]: whether the rewards of the trajectory's group differ. Where they do not, nothing was better, and a
        baseline would leave rounding."""
        return varied(self.rewards_N, self.groups_N)

    def sums(self, values_N: Tensor) -> Tensor:
        """Each trajectory gets the sum of the values over its group: [N]."""
        return sums_of(values_N, self.group)

    @cached_property
    def count(self) -> Tensor:
        """float64 [N]: trajectories of the group."""
        return self.sums(torch.ones_like(self.r))

    def centred(self) -> Tensor:
        """float64 [N]: r - mean(r) of its group, exactly 0 where the group's rewards are all equal."""
        return torch.where(self.varied, self.r - self.sums(self.r) / self.count, 0.0)


Estimator = Callable[[AdvantageInputs, AlgorithmConfig], Tensor]


@dataclass(frozen=True)
class PerToken:
    """An estimator that gives each token an advantage of its own: [T]."""

    estimate: Estimator
    needs: frozenset[str]
    """Those of `NEEDS` that it reads."""

    def __call__(self, inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Tensor:
        """Advantages [T]."""
        return self.estimate(inputs, algorithm)


def per_token(*needs: str) -> Callable[[Estimator], PerToken]:
    """Marks an estimator that gives each token an advantage of its own; without it, it gives one to each trajectory.

    Args:
        needs: What it reads beside the rewards: names of `NEEDS`. The loop computes them before advantages.

    Raises:
        ValueError: There is no such column, or no parentheses stand behind it.
    """
    if any(callable(need) for need in needs):
        raise ValueError("per_token is called first: write @per_token(), or @per_token(…) with the names that it needs")
    if unknown := set(needs) - set(NEEDS):
        own = ", ".join(name for name in NEEDS if name != CRITICS)
        raise ValueError(f"per_token({', '.join(map(repr, sorted(unknown)))}): allowed are {own}")
    return lambda estimate: PerToken(estimate, frozenset(needs))


def sums_of(values_M: Tensor, group_M: Tensor) -> Tensor:
    """Each value's sum over its group: [M]. Groups are int64, counted from 0."""
    groups = int(group_M.max()) + 1 if len(group_M) else 0
    return values_M.new_zeros(groups).index_add(0, group_M, values_M)[group_M]


def discounted(values_T: Tensor, sequence_T: Tensor, gamma: float) -> Tensor:
    """Σ γ^k x_{t+k} over what follows in the same sequence: [T].

    Each pass doubles how far a sum reaches, so there are log2 of the longest sequence.

    Args:
        values_T: x.
        sequence_T: int64; equal ones stand one after another.
        gamma: γ, from one entry to the next.
    """
    sums_T, reach = values_T.clone(), 1
    while reach < len(sums_T) and bool((same := sequence_T[reach:] == sequence_T[:-reach]).any()):
        sums_T[:-reach] = sums_T[:-reach] + torch.where(same, gamma**reach * sums_T[reach:], 0.0)
        reach *= 2
    return sums_T


def check_finite(rewards_N: Tensor) -> None:
    """Refuses rewards that are NaN or infinite: compared with them, a group would be one without a signal.

    Raises:
        ValueError: There is one.
    """
    if not rewards_N.isfinite().all():
        at = int((~rewards_N.isfinite()).nonzero()[0])
        raise ValueError(f"reward {at} is {rewards_N[at].item()}; allowed is a finite number")


def beyond_rounding(difference: Tensor, scale: Tensor) -> Tensor:
    """bool: whether rewards differ by more than sums of them are rounded by: float32's rounding, and 1e-9 near 0.

    Args:
        difference: Of the largest and the smallest.
        scale: The largest of their magnitudes.
    """
    return difference > (ROUNDING * scale).clamp(min=LEAST)


def varied(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Whether each trajectory's group has rewards that differ, by more than rounding: bool [N]."""
    rewards_N = rewards_N.double()
    groups, index = torch.unique(groups_N, return_inverse=True)
    highest = rewards_N.new_zeros(len(groups)).scatter_reduce(0, index, rewards_N, "amax", include_self=False)
    lowest = rewards_N.new_zeros(len(groups)).scatter_reduce(0, index, rewards_N, "amin", include_self=False)
    return beyond_rounding(highest - lowest, torch.maximum(highest.abs(), lowest.abs()))[index]
