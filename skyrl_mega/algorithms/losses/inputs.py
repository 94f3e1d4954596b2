"""What a loss is given: the tokens of one micro-batch on one rank.

Legend: L tokens of the micro-batch on this rank, S sequences of the micro-batch. Under context parallelism a rank has
some tokens of every sequence. Entries where the weight is 0 (prompts, observations, padding) may hold anything, NaN
included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
"""Without gradient, each already weighted: summed over the micro-batches and the DP × CP ranks of a mini-batch, they
are its means. Those named `…_max` are maxima."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a loss is told of the run and of the whole mini-batch."""

    entropy_coefficient: float | None = None
    """In place of `algorithm.entropy.coefficient`, where it adapts; None takes that."""
    importance_mean: float = 1.0
    """What the mini-batch's importance weights are divided by (`algorithm.importance_normalize`)."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The tokens of one micro-batch on one rank. Only `logprobs_L` and `entropy_L` have a gradient."""

    logprobs_L: Tensor
    """Log-probs under the weights that are trained."""
    weights_L: Tensor
    """Slice of `token_weights` for these tokens."""
    old_L: Tensor
    """Log-probs under the weights at the start of the RL step."""
    advantages_L: Tensor
    """Each token's advantage; NaN in a supervised step."""
    rollout_L: Tensor | None = None
    """The engine's log-probs."""
    drawn_L: Tensor | None = None
    """bool: whether the engine drew the token; None: all that count. Where it did not, `rollout_L` is `old_L`."""
    reference_L: Tensor | None = None
    """The reference's; there where `kl.coefficient` is above 0."""
    entropy_L: Tensor | None = None
    """Entropy of the policy at each token, in nats."""
    high_covariance_L: Tensor | None = None
    """bool: the tokens that clip_cov and kl_cov treat apart."""
    high_entropy_L: Tensor | None = None
    """bool: the tokens that the policy loss is of; None: all."""
    kl_weights_L: Tensor | None = None
    """As `weights_L`, for the KL term's own mean; None takes `weights_L`."""
    sequence_L: Tensor | None = None
    """int64: number of the token's sequence in the micro-batch, the same on all context ranks. A sequence is one answer
    of the policy: a run of tokens with a weight. A trajectory of several turns has several, however
    `rollout.step_wise` cuts it into samples; with `algorithm.sequence_unit: trajectory` it has one."""
    sequences: int = 0
    """Sequences of the micro-batch, those included of which this rank has no token."""
    figures: Figures = Figures()
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda partial_S: partial_S
    """Adds up the context ranks' partial sums; it can be differentiated through."""

    @property
    def active_L(self) -> Tensor:
        """bool: whether the token counts."""
        return self.weights_L != 0

    def clean(self, values_L: Tensor) -> Tensor:
        """The values, 0 where the weight is: 0 · NaN would be NaN, in the loss and in its gradient."""
        return torch.where(self.active_L, values_L, 0.0)

    def mean(self, values_L: Tensor) -> Tensor:
        """A metric: the weighted sum of the values, without gradient."""
        return (self.weights_L * values_L).detach().sum()

    def sequence_mean(self, values_L: Tensor) -> Tensor:
        """Each token gets the mean of the values over all tokens of its sequence that count: [L], differentiable.

        Under context parallelism all ranks of the group must call it, and use what it gives alike.
        """
        sums_L, counts_L = self._of_sequences(values_L)
        return sums_L / counts_L.clamp(min=1)

    def sequence_sum(self, values_L: Tensor) -> Tensor:
        """As `sequence_mean`, the sum."""
        return self._of_sequences(values_L)[0]

    def _of_sequences(self, values_L: Tensor) -> Tensor:
        """Each token gets the values' sum over the tokens of its sequence that count, and their number: [2, L]."""
        assert self.sequence_L is not None, "sequence_L is needed"
        both = torch.stack([self.clean(values_L), self.active_L.to(values_L.dtype)])
        partial_2S = both.new_zeros(2, max(self.sequences, 1)).index_add(1, self.sequence_L, both)
        return self.sum_over_ranks(partial_2S)[:, self.sequence_L]
