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

from skyrl_mega.algorithms.advantages import advantages
from skyrl_mega.algorithms.shaping import soft_overlong, without_truncated
from skyrl_mega.algorithms.token_weights import token_weights
from skyrl_mega.config.derived import response_limit
from skyrl_mega.config.schema import AlgorithmConfig, RolloutConfig
from skyrl_mega.megatron.sequences import Column, Sequences, flat, ragged_arange
from skyrl_mega.rollout.trajectory import Group, Kind, Trajectory


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
    judged: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """bool [N]: whether the environment judged it; one that failed counts for nothing."""

    @property
    def group_of(self) -> Tensor:
        """int64 [N]: the group of each trajectory."""
        return torch.arange(len(self.groups)).repeat_interleave(self.groups)

    @property
    def trajectory_tokens(self) -> Tensor:
        """int64 [N]: tokens of each trajectory, over its samples."""
        return _sums(self.lengths, self.samples)


def samples_of(t: Trajectory, step_wise: str) -> list[Sample]:
    """What is trained on for one trajectory: at least one sample.

    Args:
        t: Played to its end.
        step_wise: `rollout.step_wise`. off: the whole of it. turns: for each response, what the policy saw and what it
            said. merged: for each conversation (a rewriting begins another) all up to its last response.
    """
    whole = [Sample(0, 0, len(t.tokens))]
    if step_wise == "off":
        return whole
    ends: dict[tuple[int, int], int] = {}
    """(where the sample starts, from where on it is trained on) → its end; the last one counts."""
    start = 0
    for step in t.steps:
        if step.kind is Kind.PROMPT:
            start = step.start
        elif step.kind is Kind.RESPONSE and step.start < step.end:
            ends[start, step.start if step_wise == "turns" else start] = step.end
    return [Sample(start, own, end) for (start, own), end in ends.items()] or whole


def make_batch(groups: list[Group], algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Batch:
    """The samples of all groups' trajectories, with columns `mask` and `rollout_logprobs`, and with `drawn` where the
    conversation is one message.

    The mask covers what the policy wrote, less truncated trajectories where overlong filtering is on, and less those
    whose environment failed. Truncated ones still count for their group's baseline; failed ones count for nothing.
    Further columns of the trajectories are cut and carried along.
    """
    played = [t for group in groups for t in group.trajectories]
    cut = [samples_of(t, rollout.step_wise) for t in played]
    spans = _Spans.of(played, cut)
    failed = torch.tensor([t.status.failed for t in played])
    batch = Batch(
        spans.lengths,
        spans.take(flat([t.tokens for t in played], np.int32)),
        groups=torch.tensor([len(group.trajectories) for group in groups]),
        samples=torch.tensor([len(samples) for samples in cut]),
        rewards=_rewards(played, algorithm, response_limit(rollout)),
        judged=~failed,
    )
    left_out = failed
    if algorithm.overlong.filter:
        left_out = failed | torch.tensor([t.status.truncated for t in played])
    mask = spans.own(spans.take(flat([t.mask for t in played], np.float32)))
    batch["mask"] = without_truncated(mask, batch.trajectory_tokens, left_out)
    batch["rollout_logprobs"] = spans.take(flat([t.logprobs for t in played], np.float32))
    if rollout.conversation == "one_message":
        batch["drawn"] = drawn(batch)
    for name in sorted({name for t in played for name in t.columns}):
        batch.add(name, spans.column(name, played))
    return batch


def _rewards(played: list[Trajectory], algorithm: AlgorithmConfig, limit: int) -> Tensor:
    """float32 [N]: with the punishment of responses that are near the limit or past it."""
    rewards = torch.tensor([t.reward for t in played], dtype=torch.float32)
    lengths = torch.tensor([t.response_length for t in played])
    return rewards + soft_overlong(lengths, limit, algorithm.overlong.buffer, algorithm.overlong.penalty)


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
        start, own, end = torch.tensor([sample for samples in cut for sample in samples]).reshape(-1, 3).T
        tokens = torch.tensor([len(t.tokens) for t in played])
        if torch.equal(end, tokens) and not start.any():
            return cls(end, own, None)
        base = (tokens.cumsum(0) - tokens).repeat_interleave(torch.tensor([len(samples) for samples in cut]))
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


def token_advantages(batch: Batch, algorithm: AlgorithmConfig) -> Tensor:
    """The advantage of every token: float32 [T]. A trajectory has one, which all its samples share; failed ones 0."""
    advantages_N = torch.zeros(len(batch.rewards))
    judged = batch.judged
    advantages_N[judged] = advantages(batch.rewards[judged], batch.group_of[judged], algorithm)
    return advantages_N.repeat_interleave(batch.trajectory_tokens)


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
    of its own, the column `kl_weights` has its weights. The mask is in the weights then, and is left out.

    Args:
        batch: From `make_batch`.
        groups: Groups of one optimizer step, of which the last may have fewer; None: all of them.
        algorithm: Which means the loss and its KL term are.
    """
    trajectory_ends, sample_ends = batch.groups.cumsum(0).tolist(), batch.samples.cumsum(0).tolist()
    parts = []
    first = 0
    for last in trajectory_ends[(groups or len(batch.groups)) - 1 : -1 : groups] + trajectory_ends[-1:]:
        samples = batch.samples[first:last]
        part = batch.part(sample_ends[first] - int(samples[0]), sample_ends[last - 1])
        mask, tokens_N = part.columns.pop("mask").values, _sums(part.lengths, samples)
        part["weights"] = token_weights(mask, tokens_N, algorithm.loss_mean, algorithm.loss_mean_samples)
        if algorithm.kl.coefficient and algorithm.kl.mean != "loss":
            part["kl_weights"] = token_weights(mask, tokens_N, algorithm.kl.mean)
        parts.append(part)
        first = last
    return parts


def _sums(lengths_S: Tensor, samples_N: Tensor) -> Tensor:
    """int64 [N]: tokens of each trajectory, over its samples."""
    ends = torch.nn.functional.pad(lengths_S.cumsum(0), (1, 0))[samples_N.cumsum(0)]
    return ends.diff(prepend=ends.new_zeros(1))
