"""Turns trajectories into tokens, weights and advantages for an RL step. Pure tensor code.

A trajectory is a single sample, or several with `rollout.step_wise`. Each token of the policy is in the loss exactly
once, with the same context, advantage and weight. Loss and gradient do not depend on the cut.

Legend: G groups, N trajectories, S samples in total, T tokens in total.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages import NEEDS, AdvantageInputs, TokenInputs, estimate, is_per_token, needs, whiten
from skyrl_mega.algorithms.shaping import soft_overlong, without_truncated
from skyrl_mega.algorithms.token_weights import token_weights
from skyrl_mega.batch.rewards import Turns, rewards_by_name
from skyrl_mega.config.derived import response_limit
from skyrl_mega.config.schema import AlgorithmConfig, MoeConfig, RolloutConfig
from skyrl_mega.trajectories.sequences import TRAJECTORY, Column, Sequences, flat, ragged_arange
from skyrl_mega.trajectories.trajectory import TOKEN_REWARDS, Group, Kind, Trajectory


class Sample(NamedTuple):
    """A training sequence: tokens `start … end - 1` of a trajectory."""

    start: int
    trained_from: int
    """First position trained on in this sample; another sample trains on earlier policy tokens."""
    end: int


@dataclass
class Batch(Sequences):
    """The samples of an RL step, ordered by trajectory, and the trajectories, ordered by group."""

    groups: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [G]: trajectories per group."""
    samples: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [N]: samples per trajectory."""
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float32 [N]: rewards after length shaping."""
    punishment: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float32 [N], at most 0: the part of `rewards` due to length shaping."""
    written: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [N]: tokens written by the policy, truncated trajectories included."""
    judged: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """bool [N]: False if the environment failed. A failed trajectory does not count at all."""
    greedy: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float32 [G]: reward of each group's greedy answer, shaped like `rewards`. NaN without a greedy answer or after a
    failure of the environment."""
    trained_here: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """bool [T]: True for tokens written by the policy, each in a single sample. Includes truncated trajectories."""
    named: dict[str, Tensor] = field(default_factory=dict)
    """float32 [N] each: rewards by name, for environments with several; 0 if an environment does not give the name."""
    turns: Turns = field(default_factory=lambda: Turns.of([]))
    """The policy's answers, with rewards before length shaping."""

    token_rewards: Tensor | None = None
    """float64 [T]: rewards of single tokens within an answer (`trajectory.TOKEN_REWARDS`); None if no environment gives
    any."""
    penalty: Tensor | None = None
    """float32 [T]: amount subtracted from each token's reward (`trainer/kl_reward.py`)."""

    @property
    def group_of(self) -> Tensor:
        """int64 [N]: the group of each trajectory."""
        return torch.arange(len(self.groups)).repeat_interleave(self.groups)

    @property
    def trajectory_tokens(self) -> Tensor:
        """int64 [N]: tokens of each trajectory, summed over the samples."""
        return _sums(self.lengths, self.samples)

    def per_trajectory(self, values_T: Tensor) -> Tensor:
        """Returns [N]: the sum of a value over each trajectory's tokens."""
        return _sums(values_T, self.trajectory_tokens)


def samples_of(t: Trajectory, step_wise: str) -> list[Sample]:
    """Cuts a trajectory into training samples and returns a nonempty list.

    Args:
        t: A finished trajectory.
        step_wise: `rollout.step_wise`. off: the whole trajectory. turns: for each answer, the context and the answer.
            merged: for each conversation (a rewrite starts a new conversation), everything up to the last response.
            Responses with nothing in between (an empty observation inside one message) count as a single answer, as in
            the whole trajectory.
    """
    whole = [Sample(0, 0, t.length)]
    if step_wise == "off":
        return whole
    ends: dict[tuple[int, int], int] = {}
    """(start, own) → end of a sample; the last entry wins."""
    start = trained_from = end = 0
    for step in t.steps:
        if step.kind is Kind.PROMPT:
            start = end = step.start
        elif step.kind is Kind.RESPONSE and step.start < step.end:
            trained_from = trained_from if step.start == end else step.start
            end = step.end
            ends[start, trained_from if step_wise == "turns" else start] = end
    return [Sample(start, trained_from, end) for (start, trained_from), end in ends.items()] or whole


def make_batch(groups: list[Group], algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Batch:
    """Builds the samples of all trajectories, with the columns `mask` and `rollout_logprobs`.

    The mask covers the policy's tokens except truncated trajectories filtered by `algorithm.overlong` and trajectories
    with a failed environment. Truncated trajectories still count for the group's baseline, failed trajectories do not.
    With `rollout.conversation=one_message`, the column `drawn` is False for end tokens not sampled by an engine.
    Further columns of the trajectories are cut the same way and included.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    cut = [samples_of(t, rollout.step_wise) for t in trajectories]
    spans = _Spans.of(trajectories, cut)
    failed = torch.tensor([t.status.failed for t in trajectories], dtype=torch.bool)
    punished = punishment(trajectories, algorithm, response_limit(rollout))
    batch = Batch(
        spans.lengths,
        spans.take(flat([t.tokens for t in trajectories], np.int32)),
        groups=torch.tensor([len(group.trajectories) for group in groups], dtype=torch.int64),
        samples=torch.tensor([len(samples) for samples in cut], dtype=torch.int64),
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float32) + punished,
        punishment=punished,
        judged=~failed,
        greedy=greedy_rewards(groups, algorithm, response_limit(rollout)),
        named={
            name: torch.tensor(values)
            for name, values in rewards_by_name(trajectories, algorithm.reward_weights).items()
        },
        turns=Turns.of(trajectories),
    )
    left_out = failed
    if algorithm.overlong.filter:
        by = algorithm.overlong.filter_by
        left_out = failed | torch.tensor([t.status.filtered(by) for t in trajectories], dtype=torch.bool)
    mask = spans.mask_once(spans.take(flat([t.mask for t in trajectories], np.float32)))
    trajectory_T = torch.arange(len(trajectories)).repeat_interleave(batch.trajectory_tokens)
    batch.trained_here = mask != 0
    batch.written = torch.zeros(len(trajectories), dtype=torch.int64).index_add(0, trajectory_T, mask.long())
    batch["mask"] = without_truncated(mask, batch.trajectory_tokens, left_out)
    batch["rollout_logprobs"] = spans.take(flat([t.logprobs for t in trajectories], np.float32))
    if rollout.conversation == "one_message":
        batch["drawn"] = sampled_by_engine(batch)
    columns = {
        name: spans.column(name, trajectories) for name in sorted({name for t in trajectories for name in t.columns})
    }
    if TOKEN_REWARDS in columns:  # only the driver uses token rewards
        batch.token_rewards = columns.pop(TOKEN_REWARDS).values
    for name, column in columns.items():
        batch.add(name, column)
    return batch


def punishment(trajectories: list[Trajectory], algorithm: AlgorithmConfig, limit: int) -> Tensor:
    """Returns the length punishment of each response by `algorithm.overlong`: float32 [N], at most 0.

    Args:
        trajectories: The trajectories.
        algorithm: Defines the punishment.
        limit: Maximum number of tokens of a response.
    """
    lengths = torch.tensor([t.response_length for t in trajectories], dtype=torch.int64)
    return soft_overlong(lengths, limit, algorithm.overlong.buffer, algorithm.overlong.penalty)


def greedy_rewards(groups: list[Group], algorithm: AlgorithmConfig, limit: int) -> Tensor:
    """Returns the reward of each group's greedy answer with length punishment: float32 [G].

    The value is NaN without a greedy answer, or if the environment of the greedy answer failed.

    Args:
        groups: The groups.
        algorithm: Defines the length punishment.
        limit: Maximum number of tokens of a response.
    """
    rewards = torch.full((len(groups),), torch.nan)
    for i, group in enumerate(groups):
        if group.greedy is not None and not group.greedy.status.failed:
            rewards[i] = group.greedy.reward + punishment([group.greedy], algorithm, limit)[0]
    return rewards


@dataclass(frozen=True)
class _Spans:
    """Positions of the samples in the concatenated tokens of all trajectories."""

    lengths: Tensor
    """int64 [S]: tokens per sample."""
    context: Tensor
    """int64 [S]: leading tokens of each sample without training (`Sample.trained_from - Sample.start`)."""
    index: Tensor | None
    """int64 [T]: positions of the samples' tokens; None if each trajectory is a single sample."""

    @classmethod
    def of(cls, trajectories: list[Trajectory], cut: list[list[Sample]]) -> _Spans:
        """Computes the positions of these samples."""
        start, trained_from, end = (
            torch.tensor([s for samples in cut for s in samples], dtype=torch.int64).reshape(-1, 3).T
        )
        tokens = torch.tensor([len(t.tokens) for t in trajectories], dtype=torch.int64)
        if torch.equal(end, tokens) and not start.any():
            return cls(end, trained_from, None)
        counts = torch.tensor([len(samples) for samples in cut], dtype=torch.int64)
        base = (tokens.cumsum(0) - tokens).repeat_interleave(counts)
        return cls(end - start, trained_from - start, ragged_arange(base + start, end - start))

    def take(self, values: Tensor) -> Tensor:
        """Selects the samples' tokens, [T], from values of all trajectories' tokens."""
        return values if self.index is None else values[self.index]

    def column(self, name: str, trajectories: list[Trajectory]) -> Column:
        """Collects a column from all trajectories, filled with 0 for failed trajectories without the column."""
        like = next(t.columns[name] for t in trajectories if name in t.columns)
        if wrong := [t for t in trajectories if name in t.columns and len(t.columns[name].values) != len(t.tokens)]:
            count = len(wrong[0].columns[name].values)
            raise ValueError(f"column {name}: {count} values for a trajectory of {len(wrong[0].tokens)} tokens")
        absent = like.values.new_zeros(1, *like.values.shape[1:])
        parts = [
            t.columns[name].values if name in t.columns else absent.expand(len(t.tokens), *absent.shape[1:])
            for t in trajectories
        ]
        return Column(self.take(torch.cat(parts)), like.aligned)

    def mask_once(self, mask: Tensor) -> Tensor:
        """Returns [T]: the mask, set to 0 for tokens trained on in another sample."""
        if not self.context.any():
            return mask
        position = ragged_arange(torch.zeros_like(self.lengths), self.lengths)
        return mask * (position >= self.context.repeat_interleave(self.lengths))


class TokenAdvantages(NamedTuple):
    """The advantage of every token, float32 [T] each; 0 in failed trajectories."""

    whitened: Tensor
    """Advantages after whitening (`algorithm.whiten`)."""
    estimated: Tensor
    """Advantages before whitening; a critic's returns are computed from these."""


def token_advantages(batch: Batch, algorithm: AlgorithmConfig) -> TokenAdvantages:
    """Estimates the advantage of every token.

    An estimator gives an advantage per trajectory, shared by all tokens and samples, or an advantage per policy token.
    In the second case the other tokens get 0; the loss gives these no weight anyway.

    Args:
        batch: Includes the columns needed by the estimator (`algorithms.advantages.needs`).
        algorithm: Names the estimator.
    """
    judged, tokens = batch.judged, is_per_token(algorithm)
    rewards = batch.rewards
    if batch.penalty is not None:
        rewards = rewards - batch.per_trajectory(batch.penalty)
    inputs = AdvantageInputs(
        rewards[judged],
        batch.group_of[judged],
        batch.written[judged],
        greedy_N=batch.greedy[batch.group_of][judged],
        token_inputs=_token_inputs(batch, needs(algorithm)) if tokens else None,
        named={name: rewards[judged] for name, rewards in batch.named.items()},
    )

    def scatter(values: Tensor) -> Tensor:
        if tokens:
            return torch.zeros(len(batch.tokens)).masked_scatter(_judged_tokens(batch), values.float())
        values_N = torch.zeros(len(judged)).masked_scatter(judged, values.float())
        return values_N.repeat_interleave(batch.trajectory_tokens)

    estimated = estimate(inputs, algorithm)
    return TokenAdvantages(scatter(whiten(estimated, inputs, algorithm)), scatter(estimated))


def _token_inputs(batch: Batch, columns: frozenset[str]) -> TokenInputs:
    """Returns the policy's tokens in judged trajectories, with the named columns."""
    turns, judged = batch.turns, batch.judged
    if not torch.equal(_sums(turns.tokens, turns.answers), batch.written):
        raise ValueError("a trajectory's answers have not as many tokens as its mask says that the policy wrote")
    ends_R, ends_N = turns.tokens.cumsum(0) - 1, batch.written.cumsum(0) - 1
    rewards_P = torch.zeros(int(batch.written.sum()), dtype=torch.float64)
    if batch.token_rewards is not None:
        rewards_P += batch.token_rewards[batch.trained_here]
    rewards_P[ends_R] += turns.rewards - _sums(rewards_P, turns.tokens)
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
        known_T=batch["mask"][judged_tokens] != 0 if columns else None,
        **{NEEDS[name]: batch[name][judged_tokens] for name in columns},
    )


def _judged_tokens(batch: Batch) -> Tensor:
    """Returns bool [T]: the policy's tokens in trajectories without failure."""
    return batch.trained_here & batch.judged.repeat_interleave(batch.trajectory_tokens)


def sampled_by_engine(batch: Sequences) -> Tensor:
    """Returns bool [T]: False for end tokens appended without an engine (`rollout.conversation: one_message`).

    Such a token ends a sample, with a NaN log-prob. Any other NaN is an engine fault and stays visible.
    """
    sampled = torch.ones(len(batch.tokens), dtype=torch.bool)
    ends = batch.lengths.cumsum(0) - 1
    sampled[ends] = ~batch["rollout_logprobs"][ends].isnan()
    return sampled


def mini_batches(batch: Batch, groups: int | None, algorithm: AlgorithmConfig) -> list[Sequences]:
    """Cuts an RL step's batch into mini-batches of `groups` whole groups for the optimizer steps, with final token
    weights.

    If `loss_mean` counts sequences or samples, a trajectory counts once, cut or not. A KL term with a separate mean
    gets the column `kl_weights`; `algorithm.sequence_unit: trajectory` adds the column `sequences.TRAJECTORY`. The
    column `mask` is dropped because the weights include the mask.

    Args:
        batch: From `make_batch`.
        groups: Groups per optimizer step; the last mini-batch may be smaller. None: all groups.
        algorithm: Defines the means of the loss and of the KL term.
    """
    group_ends_G, sample_ends = batch.groups.cumsum(0), batch.samples.cumsum(0).tolist()
    group_ends = group_ends_G.tolist()
    parts = []
    first = 0
    for last in group_ends[(groups or len(batch.groups)) - 1 : -1 : groups] + group_ends[-1:]:
        samples = batch.samples[first:last]
        part = batch.part(sample_ends[first] - int(samples[0]), sample_ends[last - 1])
        mask, tokens_N = part.columns.pop("mask").values, _sums(part.lengths, samples)
        of_groups = batch.groups[(group_ends_G <= last) & (group_ends_G > first)]
        part["weights"] = token_weights(
            mask,
            tokens_N,
            algorithm.loss_mean,
            algorithm.loss_mean_samples,
            groups_G=of_groups,
            length=algorithm.loss_mean_length,
        )
        if algorithm.kl.in_loss and algorithm.kl.mean != "loss":
            part["kl_weights"] = token_weights(mask, tokens_N, algorithm.kl.mean)
        if algorithm.sequence_unit == "trajectory":
            part[TRAJECTORY] = torch.arange(len(samples), dtype=torch.int32).repeat_interleave(tokens_N)
        parts.append(part)
        first = last
    return parts


def tokens_have_gradient(mini: Sequences, algorithm: AlgorithmConfig, moe: MoeConfig) -> bool:
    """Returns True if a mini-batch contains anything to learn. Otherwise the gradient is 0, and an optimizer step would
    move the weights only by Adam's moments and weight decay.

    A user-defined loss may also learn from tokens with advantage 0.
    """
    counts = mini["weights"] != 0
    if learns_without_advantage(algorithm, moe):
        return bool(counts.any())
    return bool((counts & (mini["advantages"] != 0)).any())


def learns_without_advantage(algorithm: AlgorithmConfig, moe: MoeConfig) -> bool:
    """Returns True if a counted token with advantage 0 may still contribute to the gradient."""
    entropy = algorithm.entropy.coefficient or algorithm.entropy.target is not None
    loss = algorithm.loss_traits.learns_without_advantage
    return bool(algorithm.kl.in_loss or entropy or moe.aux_loss or loss)


def _sums(values_S: Tensor, counts_N: Tensor) -> Tensor:
    """Returns [N]: the sums over consecutive runs of `counts_N` values each, such as the tokens of a trajectory's
    samples."""
    of_S = torch.arange(len(counts_N)).repeat_interleave(counts_N)
    return values_S.new_zeros(len(counts_N)).index_add(0, of_S, values_S)
