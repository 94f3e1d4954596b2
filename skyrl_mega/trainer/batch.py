"""From trajectories to the tokens, weights and advantages that one RL step trains on. Pure tensor code.

A trajectory is one sample, or with `rollout.step_wise` several. However it is cut, each of the policy's tokens is in
the loss once, with the same context, advantage and weight: the cut changes neither loss nor gradient.

Legend: G groups, N trajectories, S samples of all of them, T tokens of all of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages import NEEDS, AdvantageInputs, TokenInputs, estimate, needs, of_tokens, whiten
from skyrl_mega.algorithms.losses import LOSSES, PULLING
from skyrl_mega.algorithms.shaping import soft_overlong, without_truncated
from skyrl_mega.algorithms.token_weights import token_weights
from skyrl_mega.config.derived import response_limit
from skyrl_mega.config.schema import AlgorithmConfig, MoeConfig, RolloutConfig
from skyrl_mega.megatron.sequences import TRAJECTORY, Column, Sequences, flat, ragged_arange
from skyrl_mega.rollout.token_rewards import TOKEN_REWARDS
from skyrl_mega.rollout.trajectory import Group, Kind, Trajectory
from skyrl_mega.trainer.rewards import by_name
from skyrl_mega.trainer.turns import Turns


class Sample(NamedTuple):
    """One sequence to be trained on: tokens `start … end - 1` of a trajectory."""

    start: int
    own: int
    """From here on this sample is the one that trains on what the policy produced."""
    end: int


@dataclass
class Batch(Sequences):
    """Samples, those of a trajectory one after another, and trajectories, those of a group one after another."""

    groups: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [G]: trajectories of each group."""
    samples: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [N]: samples of each trajectory."""
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float32 [N], shaped by their length."""
    punishment: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float32 [N]: what their length took from them, at most 0."""
    written: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [N]: tokens that the policy wrote, those of truncated trajectories too."""
    judged: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """bool [N]: whether the environment judged it; one that failed counts for nothing."""
    greedy: Tensor = field(default_factory=lambda: torch.zeros(0))
    """float32 [G]: the reward of each group's greedy answer, shaped as `rewards`; NaN where there is none, or its
    environment failed."""
    own: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """bool [T]: what the policy wrote, each token in one sample only; those of truncated trajectories too."""
    named: dict[str, Tensor] = field(default_factory=dict)
    """float32 [N] each: an environment's several rewards by name, 0 where it gives no such."""
    turns: Turns = field(default_factory=lambda: Turns.of([]))
    """Its answers and their rewards, not shaped by length."""

    earned: Tensor | None = None
    """float64 [T]: what each of the policy's tokens earned beside the rest of its answer (`rollout/token_rewards.py`);
    None where no environment tells."""
    penalty: Tensor | None = None
    """float32 [T]: what is taken from each token's reward (`trainer/kl_reward.py`)."""

    @property
    def group_of(self) -> Tensor:
        """int64 [N]: the group of each trajectory."""
        return torch.arange(len(self.groups)).repeat_interleave(self.groups)

    @property
    def trajectory_tokens(self) -> Tensor:
        """int64 [N]: tokens of each trajectory, over its samples."""
        return _sums(self.lengths, self.samples)

    def per_trajectory(self, values_T: Tensor) -> Tensor:
        """[N]: the sum of a value over each trajectory's tokens."""
        return _sums(values_T, self.trajectory_tokens)


def samples_of(t: Trajectory, step_wise: str) -> list[Sample]:
    """What is trained on for one trajectory: at least one sample.

    Args:
        t: Played to its end.
        step_wise: `rollout.step_wise`. off: the whole of it. turns: for each answer, what the policy saw and what it
            said. merged: for each conversation (a rewriting begins another) all up to its last response. Responses
            with nothing between them (an empty observation inside one message) are one answer, as in the whole.
    """
    whole = [Sample(0, 0, t.length)]
    if step_wise == "off":
        return whole
    ends: dict[tuple[int, int], int] = {}
    """(where the sample starts, from where on it is trained on) → its end; the last one counts."""
    start = own = end = 0
    for step in t.steps:
        if step.kind is Kind.PROMPT:
            start = end = step.start
        elif step.kind is Kind.RESPONSE and step.start < step.end:
            own = own if step.start == end else step.start
            end = step.end
            ends[start, own if step_wise == "turns" else start] = end
    return [Sample(start, own, end) for (start, own), end in ends.items()] or whole


def make_batch(groups: list[Group], algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Batch:
    """The samples of all groups' trajectories, with columns `mask` and `rollout_logprobs`, and with `drawn` where the
    conversation is one message.

    The mask covers what the policy wrote, less truncated trajectories as `algorithm.overlong` says, and less those
    whose environment failed. Truncated ones still count for their group's baseline; failed ones count for nothing.
    Further columns of the trajectories are cut and carried along.
    """
    played = [t for group in groups for t in group.trajectories]
    cut = [samples_of(t, rollout.step_wise) for t in played]
    spans = _Spans.of(played, cut)
    failed = torch.tensor([t.status.failed for t in played], dtype=torch.bool)
    punished = punishment(played, algorithm, response_limit(rollout))
    batch = Batch(
        spans.lengths,
        spans.take(flat([t.tokens for t in played], np.int32)),
        groups=torch.tensor([len(group.trajectories) for group in groups], dtype=torch.int64),
        samples=torch.tensor([len(samples) for samples in cut], dtype=torch.int64),
        rewards=torch.tensor([t.reward for t in played], dtype=torch.float32) + punished,
        punishment=punished,
        judged=~failed,
        greedy=greedy_rewards(groups, algorithm, response_limit(rollout)),
        named={name: torch.tensor(values) for name, values in by_name(played, algorithm.reward_weights).items()},
        turns=Turns.of(played),
    )
    left_out = failed
    if algorithm.overlong.filter:
        by = algorithm.overlong.filter_by
        left_out = failed | torch.tensor([t.status.filtered(by) for t in played], dtype=torch.bool)
    mask = spans.own(spans.take(flat([t.mask for t in played], np.float32)))
    of_token = torch.arange(len(played)).repeat_interleave(batch.trajectory_tokens)
    batch.own = mask != 0
    batch.written = torch.zeros(len(played), dtype=torch.int64).index_add(0, of_token, mask.long())
    batch["mask"] = without_truncated(mask, batch.trajectory_tokens, left_out)
    batch["rollout_logprobs"] = spans.take(flat([t.logprobs for t in played], np.float32))
    if rollout.conversation == "one_message":
        batch["drawn"] = drawn(batch)
    columns = {name: spans.column(name, played) for name in sorted({name for t in played for name in t.columns})}
    if TOKEN_REWARDS in columns:  # the driver's alone
        batch.earned = columns.pop(TOKEN_REWARDS).values
    for name, column in columns.items():
        batch.add(name, column)
    return batch


def punishment(played: list[Trajectory], algorithm: AlgorithmConfig, limit: int) -> Tensor:
    """float32 [N], at most 0: of responses that are near the limit or past it."""
    lengths = torch.tensor([t.response_length for t in played], dtype=torch.int64)
    return soft_overlong(lengths, limit, algorithm.overlong.buffer, algorithm.overlong.penalty)


def greedy_rewards(groups: list[Group], algorithm: AlgorithmConfig, limit: int) -> Tensor:
    """float32 [G]: `Batch.greedy`."""
    found = torch.full((len(groups),), torch.nan)
    for i, group in enumerate(groups):
        if group.greedy is not None and not group.greedy.status.failed:
            found[i] = group.greedy.reward + punishment([group.greedy], algorithm, limit)[0]
    return found


@dataclass(frozen=True)
class _Spans:
    """Where samples lie in the tokens of all trajectories, one after another."""

    lengths: Tensor
    """int64 [S]: tokens of each sample."""
    before: Tensor
    """int64 [S]: of these, how many come before those that it trains on."""
    index: Tensor | None
    """int64 [T]: places of the samples' tokens; None where samples and trajectories are the same."""

    @classmethod
    def of(cls, played: list[Trajectory], cut: list[list[Sample]]) -> _Spans:
        """Of these samples of these trajectories."""
        start, own, end = torch.tensor([s for samples in cut for s in samples], dtype=torch.int64).reshape(-1, 3).T
        tokens = torch.tensor([len(t.tokens) for t in played], dtype=torch.int64)
        if torch.equal(end, tokens) and not start.any():
            return cls(end, own, None)
        counts = torch.tensor([len(samples) for samples in cut], dtype=torch.int64)
        base = (tokens.cumsum(0) - tokens).repeat_interleave(counts)
        return cls(end - start, own - start, ragged_arange(base + start, end - start))

    def take(self, values: Tensor) -> Tensor:
        """Values of all trajectories' tokens → [T] of the samples'."""
        return values if self.index is None else values[self.index]

    def column(self, name: str, played: list[Trajectory]) -> Column:
        """A column of the trajectories, 0 for those without it: a failed one may have none."""
        like = next(t.columns[name] for t in played if name in t.columns)
        if wrong := [t for t in played if name in t.columns and len(t.columns[name].values) != len(t.tokens)]:
            count = len(wrong[0].columns[name].values)
            raise ValueError(f"column {name}: {count} values for a trajectory of {len(wrong[0].tokens)} tokens")
        absent = like.values.new_zeros(1, *like.values.shape[1:])
        parts = [
            t.columns[name].values if name in t.columns else absent.expand(len(t.tokens), *absent.shape[1:])
            for t in played
        ]
        return Column(self.take(torch.cat(parts)), like.aligned)

    def own(self, mask: Tensor) -> Tensor:
        """[T], 0 where another sample trains on the token."""
        if not self.before.any():
            return mask
        position = ragged_arange(torch.zeros_like(self.lengths), self.lengths)
        return mask * (position >= self.before.repeat_interleave(self.lengths))


class TokenAdvantages(NamedTuple):
    """Every token's advantage, float32 [T] each; 0 in trajectories that failed."""

    whitened: Tensor
    """As `algorithm.whiten` says."""
    estimated: Tensor
    """Before that, as a critic's returns are made from them."""


def token_advantages(batch: Batch, algorithm: AlgorithmConfig) -> TokenAdvantages:
    """The advantage of every token.

    A trajectory has one advantage, which all its tokens and samples share, or each token of the policy has its own:
    then all others, which have no weight, have 0.

    Args:
        batch: With the columns that the estimator needs (`algorithms.advantages.needs`).
        algorithm: Says how advantages are estimated.
    """
    judged, tokens = batch.judged, of_tokens(algorithm)
    rewards = batch.rewards
    if batch.penalty is not None:
        rewards = rewards - batch.per_trajectory(batch.penalty)
    inputs = AdvantageInputs(
        rewards[judged],
        batch.group_of[judged],
        batch.written[judged],
        greedy_N=batch.greedy[batch.group_of][judged],
        of_tokens=_token_inputs(batch, needs(algorithm)) if tokens else None,
        named={name: rewards[judged] for name, rewards in batch.named.items()},
    )

    def placed(found: Tensor) -> Tensor:
        if tokens:
            return torch.zeros(len(batch.tokens)).masked_scatter(_judged_tokens(batch), found.float())
        of_N = torch.zeros(len(judged)).masked_scatter(judged, found.float())
        return of_N.repeat_interleave(batch.trajectory_tokens)

    estimated = estimate(inputs, algorithm)
    return TokenAdvantages(placed(whiten(estimated, inputs, algorithm)), placed(estimated))


def _token_inputs(batch: Batch, columns: frozenset[str]) -> TokenInputs:
    """What the policy wrote in trajectories that were judged, with the columns of these names."""
    turns, judged = batch.turns, batch.judged
    if not torch.equal(_sums(turns.tokens, turns.answers), batch.written):
        raise ValueError("a trajectory's answers have not as many tokens as its mask says that the policy wrote")
    ends_R, ends_N = turns.tokens.cumsum(0) - 1, batch.written.cumsum(0) - 1
    rewards_P = torch.zeros(int(batch.written.sum()), dtype=torch.float64)
    if batch.earned is not None:
        rewards_P += batch.earned[batch.own]
    rewards_P[ends_R] += turns.rewards - _sums(rewards_P, turns.tokens)
    said = batch.written > 0
    rewards_P[ends_N[said]] += batch.punishment.double()[said]
    turn_R = ragged_arange(torch.zeros_like(turns.answers), turns.answers)
    kept_P = judged.repeat_interleave(batch.written)
    if batch.penalty is not None:
        rewards_P -= batch.penalty[batch.own].double()
    at = _judged_tokens(batch)
    return TokenInputs(
        trajectory_T=torch.arange(int(judged.sum())).repeat_interleave(batch.written[judged]),
        turn_T=turn_R.repeat_interleave(turns.tokens)[kept_P],
        rewards_T=rewards_P[kept_P],
        known_T=batch["mask"][at] != 0 if columns else None,
        **{NEEDS[name]: batch[name][at] for name in columns},
    )


def _judged_tokens(batch: Batch) -> Tensor:
    """bool [T]: what the policy wrote in trajectories that did not fail."""
    return batch.own & batch.judged.repeat_interleave(batch.trajectory_tokens)


def drawn(batch: Sequences) -> Tensor:
    """bool [T]: all but the end tokens that no engine drew (`rollout.conversation: one_message`): they have NaN.

    They end a sample. NaN anywhere else is an engine's fault, and stays to be seen.
    """
    found = torch.ones(len(batch.tokens), dtype=torch.bool)
    ends = batch.lengths.cumsum(0) - 1
    found[ends] = ~batch["rollout_logprobs"][ends].isnan()
    return found


def mini_batches(batch: Batch, groups: int | None, algorithm: AlgorithmConfig) -> list[Sequences]:
    """Cuts an RL step's batch into optimizer steps of `groups` whole groups each, with final token weights.

    Where `loss_mean` counts sequences or samples, a trajectory is one, however it was cut. Where the KL term has a mean
    of its own, the column `kl_weights` has its weights; `algorithm.sequence_unit: trajectory` adds the column
    `sequences.TRAJECTORY`. The mask is in the weights then, and is left out.

    Args:
        batch: From `make_batch`.
        groups: Groups of one optimizer step, of which the last may have fewer; None: all of them.
        algorithm: Which means the loss and its KL term are.
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


def teaches(mini: Sequences, algorithm: AlgorithmConfig, moe: MoeConfig) -> bool:
    """Whether a mini-batch has anything to learn from: else its gradient is 0, and an optimizer step on it would move
    the weights by Adam's moments and weight decay alone.

    A loss of the user's own may learn from tokens whose advantage is 0.
    """
    counts = mini["weights"] != 0
    if pulls(algorithm, moe):
        return bool(counts.any())
    return bool((counts & (mini["advantages"] != 0)).any())


def pulls(algorithm: AlgorithmConfig, moe: MoeConfig) -> bool:
    """Whether a token that counts may teach something though its advantage is 0."""
    entropy = algorithm.entropy.coefficient or algorithm.entropy.target is not None
    own = algorithm.loss in PULLING or algorithm.loss not in LOSSES
    return bool(algorithm.kl.in_loss or entropy or moe.aux_loss or own)


def _sums(values_S: Tensor, counts_N: Tensor) -> Tensor:
    """[N]: the sum of each one's values, which follow one another: tokens of a trajectory's samples, …"""
    of_S = torch.arange(len(counts_N)).repeat_interleave(counts_N)
    return values_S.new_zeros(len(counts_N)).index_add(0, of_S, values_S)
