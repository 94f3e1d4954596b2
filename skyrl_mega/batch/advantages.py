"""The advantage of every token of an RL step, and the tokens with something to learn.

Legend: N trajectories, S samples, T tokens of all samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages import NEEDS, AdvantageInputs, TokenInputs, estimate, is_per_token, needs, whiten
from skyrl_mega.batch.make_batch import Batch, run_sums
from skyrl_mega.batch.rewards import Turns
from skyrl_mega.config.schema import AlgorithmConfig, MoeConfig
from skyrl_mega.trajectories.sequences import ragged_arange


class Advantages(NamedTuple):
    """Advantages as float32; 0 in failed trajectories."""

    whitened: Tensor
    """[T] if the batch has tokens (`Batch.by_token`), else [S], a value for all tokens of a sample; after whitening
    (`algorithm.whiten`)."""
    estimated: Tensor
    """The same before whitening; a critic's returns are computed from these."""
    learning: Tensor
    """int64 [S]: number of tokens in the loss with a nonzero advantage."""


def compute_advantages(batch: Batch, algorithm: AlgorithmConfig) -> Advantages:
    """Estimates the advantages of an RL step and returns them before and after whitening: a value per token if the
    batch has tokens, else per sample. Failed trajectories get 0. `batch` stays unchanged.

    An estimator gives an advantage per trajectory, shared by all tokens and samples, or an advantage per policy token.
    In the second case the other tokens get 0; the loss gives these no weight anyway.

    Args:
        batch: For a per-token estimator, and for KL in the reward, with tokens (`Batch.read_tokens`) and the columns
            needed (`algorithms.advantages.needs`).
        algorithm: Names the estimator.

    Raises:
        ValueError: The lengths of a trajectory's answers contradict the trajectory's mask, or a reward is NaN or
            infinite.
        UserError: The estimator cannot be found or imported, returns another shape, or refuses the rewards.
        KeyError: The batch lacks a needed column.
    """
    judged, per_token, rewards = batch.judged, is_per_token(algorithm), batch.rewards
    if batch.penalty is not None:
        rewards = rewards - batch.per_trajectory(batch.penalty)
    inputs = AdvantageInputs(
        rewards[judged],
        batch.group_of[judged],
        batch.written[judged],
        greedy_N=batch.greedy[batch.group_of][judged],
        token_inputs=_token_inputs(batch, needs(algorithm)) if per_token else None,
        named={name: rewards[judged] for name, rewards in batch.named.items()},
    )

    def scatter(values: Tensor) -> Tensor:
        if per_token:
            return torch.zeros(len(batch.tokens.tokens)).masked_scatter(_judged_tokens(batch), values.float())
        values_N = torch.zeros(len(judged)).masked_scatter(judged, values.float())
        return values_N.repeat_interleave(batch.trajectory_tokens if batch.by_token else batch.samples)

    estimated = estimate(inputs, algorithm)
    whitened = scatter(whiten(estimated, inputs, algorithm))
    if batch.by_token:
        learning = run_sums(((batch.tokens["mask"] != 0) & (whitened != 0)).long(), batch.tokens.lengths)
    else:
        learning = batch.refs.counts * (whitened != 0)
    return Advantages(whitened, scatter(estimated), learning)


def _token_inputs(batch: Batch, columns: frozenset[str]) -> TokenInputs:
    """Returns the policy's tokens in judged trajectories, with the named columns."""
    turns, judged = Turns.of(batch.trajectories), batch.judged
    answered_N, trained_N = run_sums(turns.tokens, turns.answers), batch.per_trajectory(batch.trained_here.long())
    if not (torch.equal(answered_N, batch.written) and torch.equal(trained_N, batch.written)):
        raise ValueError(
            "a trajectory's answers have not as many tokens as its mask says that the policy wrote: "
            f"{answered_N.tolist()[:8]} by its steps, {trained_N.tolist()[:8]} by its mask"
        )
    ends_R, ends_N = turns.tokens.cumsum(0) - 1, batch.written.cumsum(0) - 1
    rewards_P = torch.zeros(int(batch.written.sum()), dtype=torch.float64)
    if batch.token_rewards is not None:
        rewards_P += batch.token_rewards[batch.trained_here]
    rewards_P[ends_R] += turns.rewards - run_sums(rewards_P, turns.tokens)
    answered = batch.written > 0
    rewards_P[ends_N[answered]] += batch.punishment.double()[answered]
    turn_R = ragged_arange(torch.zeros_like(turns.answers), turns.answers)
    kept_P = judged.repeat_interleave(batch.written)
    if batch.penalty is not None:
        rewards_P -= batch.penalty[batch.trained_here].double()
    judged_tokens = _judged_tokens(batch)
    return TokenInputs(
        trajectory_T=torch.arange(int(judged.sum())).repeat_interleave(batch.written[judged]),
        turn_T=turn_R.repeat_interleave(turns.tokens)[kept_P],
        rewards_T=rewards_P[kept_P],
        known_T=batch.tokens["mask"][judged_tokens] != 0 if columns else None,
        **{NEEDS[name]: batch.tokens[name][judged_tokens] for name in columns},
    )


def _judged_tokens(batch: Batch) -> Tensor:
    """Returns bool [T]: the policy's tokens in trajectories without failure."""
    return batch.trained_here & batch.judged.repeat_interleave(batch.trajectory_tokens)


def follow_from_rewards(algorithm: AlgorithmConfig) -> bool:
    """Returns True if advantages follow from rewards and lengths alone, before any log-probs or values are known.

    Raises:
        UserError: The estimator cannot be found or imported.
    """
    return not is_per_token(algorithm) and not needs(algorithm)


def has_gradient(counts_S: Tensor, learning_S: Tensor, algorithm: AlgorithmConfig, moe: MoeConfig) -> bool:
    """Returns True if a mini-batch may have a gradient other than 0. If False, an optimizer step would move the weights
    only by Adam's moments and weight decay.

    Without samples the result is False. With a load-balancing loss of a router, an entropy bonus, a KL term, or a loss
    that gives a gradient to tokens with advantage 0, any token in the loss makes the result True.

    Args:
        counts_S: Number of tokens in the loss of each sample of the mini-batch, over all ranks.
        learning_S: Number of these tokens with an advantage other than 0 (`Advantages.learning`).
        algorithm, moe: The settings.
    """
    return bool((counts_S if moe.aux_loss or _learns_without_advantage(algorithm) else learning_S).any())


def silent_samples(counts_S: Tensor, learning_S: Tensor, algorithm: AlgorithmConfig, moe: MoeConfig) -> Tensor:
    """Returns True for the samples of a mini-batch with a gradient of exactly 0: bool [S].

    A router's load-balancing loss counts all tokens: with this loss every value is False.

    Args:
        counts_S: Number of tokens in the loss of each sample of the mini-batch, over all ranks.
        learning_S: Number of these tokens with an advantage other than 0 (`Advantages.learning`).
        algorithm, moe: The settings.
    """
    if moe.aux_loss:
        return torch.zeros(len(counts_S), dtype=torch.bool)
    return (counts_S if _learns_without_advantage(algorithm) else learning_S) == 0


def _learns_without_advantage(algorithm: AlgorithmConfig) -> bool:
    """Returns True if tokens with advantage 0 may have a gradient. A user-defined loss may learn from such tokens."""
    entropy = bool(algorithm.entropy.coefficient) or algorithm.entropy.target is not None
    return bool(algorithm.kl.in_loss) or entropy or algorithm.loss_traits.learns_without_advantage
