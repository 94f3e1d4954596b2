"""From trajectories to the tokens, weights and advantages that one RL step trains on. Pure tensor code.

A trajectory is one sample, or with `rollout.step_wise` several. However it is cut, each of the policy's tokens is in
the loss once, with the same context, advantage and weight: the cut changes neither loss nor gradient.

Legend: G groups, N trajectories, S samples of all of them, T tokens of all of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from skyrl_mega.algorithms.advantages import advantages
from skyrl_mega.algorithms.shaping import soft_overlong, without_truncated
from skyrl_mega.algorithms.token_weights import token_weights
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.megatron.sequences import Sequences
from skyrl_mega.rollout.trajectory import Group, Kind, Trajectory


@dataclass(frozen=True)
class Sample:
    """One sequence to be trained on; the lists are aligned by position."""

    tokens: list[int]
    mask: list[int]
    """1 where the policy produced the token and this sample is the one that trains on it."""
    logprobs: list[float]


@dataclass
class Batch(Sequences):
    """Samples, those of a trajectory one after another, and trajectories, those of a group one after another."""

    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [N]: samples of each trajectory."""
    groups: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [G]: trajectories of each group."""


def samples_of(t: Trajectory, step_wise: str) -> list[Sample]:
    """What is trained on for one trajectory: at least one sample.

    Args:
        t: Played to its end.
        step_wise: `rollout.step_wise`. off: the whole of it. turns: for each response, what the policy saw and what it
            said. merged: for each conversation (a rewriting begins another) all up to its last response.
    """
    whole = [Sample(t.tokens, t.mask, t.logprobs)]
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
    return [
        Sample(t.tokens[start:end], [0] * (own - start) + t.mask[own:end], t.logprobs[start:end])
        for (start, own), end in ends.items()
    ] or whole


def batch_of(groups: list[Group], algorithm: AlgorithmConfig, response_limit: int, step_wise: str = "off") -> Batch:
    """The samples of all groups' trajectories, with fields `mask`, `rollout_logprobs` and `advantages`.

    The mask covers what the policy wrote, less truncated trajectories where overlong filtering is on, and less those
    whose environment failed. Truncated ones still count for their group's baseline; failed ones count for nothing.
    A trajectory has one advantage, which all its samples share.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    cut = [samples_of(t, step_wise) for t in trajectories]
    samples = [sample for of_one in cut for sample in of_one]
    batch = Batch.of([sample.tokens for sample in samples])
    batch.samples = np.array([len(of_one) for of_one in cut], np.int64)
    batch.groups = np.array([len(group.trajectories) for group in groups], np.int64)
    tokens_N = _sums(batch.lengths, batch.samples)

    mask = torch.from_numpy(np.concatenate([np.asarray(sample.mask, np.float32) for sample in samples]))
    failed = torch.tensor([t.status.failed for t in trajectories])
    leave_out = failed
    if algorithm.overlong.filter:
        leave_out = failed | torch.tensor([t.status.truncated for t in trajectories])
    mask = without_truncated(mask, torch.from_numpy(tokens_N), leave_out)

    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)
    rewards += soft_overlong(
        torch.tensor([t.response_length for t in trajectories]),
        response_limit,
        algorithm.overlong.buffer,
        algorithm.overlong.penalty,
    )
    group = torch.repeat_interleave(torch.from_numpy(batch.groups))
    values = torch.zeros(len(trajectories))
    values[~failed] = advantages(rewards[~failed], group[~failed], algorithm)

    batch.fields = {
        "mask": mask.numpy(),
        "rollout_logprobs": np.concatenate([np.asarray(sample.logprobs, np.float32) for sample in samples]),
        "advantages": np.repeat(values.numpy(), tokens_N),
    }
    return batch


def not_drawn(batch: Batch, conversation: str) -> np.ndarray:
    """bool [T]: end tokens that no engine drew (`rollout.conversation: one_message`), whose log-prob is NaN.

    They end a sample. NaN anywhere else is an engine's fault, and stays to be seen.
    """
    found = np.zeros(len(batch.tokens), bool)
    if conversation == "one_message":
        ends = np.cumsum(batch.lengths) - 1
        found[ends] = np.isnan(batch.fields["rollout_logprobs"][ends])
    return found


def mini_batches(batch: Batch, groups: int, algorithm: AlgorithmConfig) -> list[Sequences]:
    """Cuts an RL step's batch into optimizer steps of `groups` whole groups each, with final token weights.

    Where `loss_mean` counts sequences or samples, a trajectory is one, however it was cut. Where the KL term has a mean
    of its own, the field `kl_weights` has its weights.

    Args:
        batch: From `batch_of`.
        groups: Groups of one optimizer step; the last may have fewer.
        algorithm: Which means the loss and its KL term are.
    """
    trajectory_ends = np.cumsum(batch.groups)
    sample_ends = np.cumsum(batch.samples)
    parts = []
    first = 0
    for start in range(0, len(batch.groups), groups):
        last = int(trajectory_ends[min(start + groups, len(batch.groups)) - 1])
        samples = batch.samples[first:last]
        part = batch.take(np.arange(sample_ends[first] - samples[0], sample_ends[last - 1]))
        mask, tokens_N = torch.from_numpy(part.fields["mask"]), torch.from_numpy(_sums(part.lengths, samples))
        part.fields["weights"] = token_weights(mask, tokens_N, algorithm.loss_mean, algorithm.loss_mean_samples).numpy()
        if algorithm.kl.coefficient and algorithm.kl.mean != "loss":
            part.fields["kl_weights"] = token_weights(mask, tokens_N, algorithm.kl.mean).numpy()
        parts.append(part)
        first = last
    return parts


def _sums(lengths_S: np.ndarray, samples_N: np.ndarray) -> np.ndarray:
    """int64 [N]: tokens of each trajectory, over its samples."""
    ends = np.concatenate([[0], np.cumsum(lengths_S)])[np.cumsum(samples_N)]
    return np.diff(ends, prepend=0)
