"""Inputs of a loss: the tokens of a micro-batch on a rank.

Legend: L tokens of the micro-batch on this rank, S sequences of the micro-batch. Under context parallelism a rank holds
some tokens of every sequence. Entries with weight 0 (prompts, observations, padding) may contain anything, NaN
included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
"""Metrics without gradient, already weighted: the sum over micro-batches and DP × CP ranks is the mean of a mini-batch.
Names ending in `…_max` are maxima."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Numbers from outside of the micro-batch that the loss reads."""

    entropy_coefficient: float | None = None
    """Adapted coefficient; None means `algorithm.entropy.coefficient`."""
    importance_mean: float = 1.0
    """Divisor of the mini-batch's importance weights (`algorithm.importance_normalize`)."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The tokens of a micro-batch on a rank. Only `logprobs_L` and `entropy_L` carry a gradient."""

    logprobs_L: Tensor
    """Log-probs under the weights in training."""
    weights_L: Tensor
    """Slice of `token_weights` for these tokens."""
    old_L: Tensor
    """Log-probs under the weights at the start of the RL step."""
    advantages_L: Tensor
    """Each token's advantage; NaN in a supervised step."""
    rollout_L: Tensor | None = None
    """The engine's log-probs."""
    drawn_L: Tensor | None = None
    """bool: True if the engine sampled the token; None: all counting tokens. For other tokens `rollout_L` equals
    `old_L`."""
    reference_L: Tensor | None = None
    """The reference's log-probs; set if `kl.coefficient` is above 0."""
    entropy_L: Tensor | None = None
    """Entropy of the policy at each token, in nats."""
    high_covariance_L: Tensor | None = None
    """bool: the tokens selected for clip_cov and kl_cov."""
    high_entropy_L: Tensor | None = None
    """bool: the tokens of the policy loss; None: all."""
    kl_weights_L: Tensor | None = None
    """Each token's weight in the KL term, for a mean of its own (`kl.mean`); None means `weights_L`."""
    sequence_L: Tensor | None = None
    """int64: index of the token's sequence in the micro-batch, equal on all context ranks.

    A sequence is an answer of the policy: consecutive tokens with a weight. A trajectory of several turns contains
    several sequences, however `rollout.step_wise` cuts it into samples; with `algorithm.sequence_unit: trajectory` it
    is a single sequence.
    """
    sequences: int = 0
    """Number of sequences of the micro-batch, including sequences without a token on this rank."""
    figures: Figures = Figures()
    """Numbers of the run and of the whole mini-batch."""
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda partial_S: partial_S
    """Adds up the partial sums of the context ranks; differentiable."""

    @property
    def active_L(self) -> Tensor:
        """bool [L]: True if the token counts, that is, has a weight other than 0."""
        return self.weights_L != 0

    def clean(self, values_L: Tensor) -> Tensor:
        """Returns the values, with 0 for tokens of weight 0: 0 · NaN would be NaN, in the loss and in the gradient."""
        return torch.where(self.active_L, values_L, 0.0)

    def mean(self, values_L: Tensor) -> Tensor:
        """Returns Σ w_t v_t over the tokens of `weights_L`, a scalar without gradient: this micro-batch's part of a
        mean over the mini-batch. NaN at a token with weight 0 makes the result NaN (`clean`)."""
        return (self.weights_L * values_L).detach().sum()

    def sequence_mean(self, values_L: Tensor) -> Tensor:
        """Returns for each counting token the mean of the values over all counting tokens of its sequence: [L],
        differentiable. At other tokens the values may be NaN, and the result is finite but has no meaning; 0 everywhere
        if no token counts. Needs `sequence_L`.

        Under context parallelism all ranks of the group must call this and use the result in the same way.

        Raises:
            AssertionError: `sequence_L` is missing.
        """
        sums_L, counts_L = self._of_sequences(values_L)
        return sums_L / counts_L.clamp(min=1)

    def sequence_sum(self, values_L: Tensor) -> Tensor:
        """Returns for each token the sum of the values over all counting tokens of its sequence: [L], differentiable; 0
        if no token of the sequence counts. Under context parallelism all ranks of the group must call this and use the
        result in the same way.

        Raises:
            AssertionError: `sequence_L` is missing.
        """
        return self._of_sequences(values_L)[0]

    def _of_sequences(self, values_L: Tensor) -> Tensor:
        """Returns for each token the sum of the values and the number of counting tokens in its sequence: [2, L]."""
        assert self.sequence_L is not None, "sequence_L is needed"
        both = torch.stack([self.clean(values_L), self.active_L.to(values_L.dtype)])
        partial_2S = both.new_zeros(2, max(self.sequences, 1)).index_add(1, self.sequence_L, both)
        return self.sum_over_ranks(partial_2S)[:, self.sequence_L]
