"""From trajectories to the tokens, weights and advantages that one RL step trains on. Pure tensor code.

Legend: N trajectories, T tokens of all of them.
"""

from __future__ import annotations

import numpy as np
import torch

from skyrl_mega.algorithms.advantages import advantages
from skyrl_mega.algorithms.losses import token_weights
from skyrl_mega.algorithms.shaping import soft_overlong, without_truncated
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.policy.sequences import Sequences
from skyrl_mega.rollout.trajectory import Trajectory


def batch_of(groups: list[list[Trajectory]], algorithm: AlgorithmConfig, response_limit: int) -> Sequences:
    """The tokens of all groups' trajectories, in order, with fields `mask`, `rollout_logprobs` and `advantages`.

    The mask covers what the policy wrote, less truncated trajectories where overlong filtering is on, and less those
    whose environment failed. Truncated ones still count for their group's baseline; failed ones count for nothing.
    """
    trajectories = [t for group in groups for t in group]
    batch = Sequences.of([t.tokens for t in trajectories])
    lengths = torch.from_numpy(batch.lengths)
    mask = torch.from_numpy(np.concatenate([np.asarray(t.mask, np.float32) for t in trajectories]))
    failed = torch.tensor([t.status.failed for t in trajectories])
    leave_out = failed
    if algorithm.overlong.filter:
        leave_out = failed | torch.tensor([t.status.truncated for t in trajectories])
    mask = without_truncated(mask, lengths, leave_out)

    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)
    rewards += soft_overlong(
        torch.tensor([t.response_length for t in trajectories]),
        response_limit,
        algorithm.overlong.buffer,
        algorithm.overlong.penalty,
    )
    group = torch.repeat_interleave(torch.tensor([len(g) for g in groups]))
    values = torch.zeros(len(trajectories))
    values[~failed] = advantages(rewards[~failed], group[~failed], algorithm)

    batch.fields = {
        "mask": mask.numpy(),
        "rollout_logprobs": np.concatenate([np.asarray(t.logprobs, np.float32) for t in trajectories]),
        "advantages": batch.per_token(values.numpy()),
    }
    return batch


def mini_batches(batch: Sequences, sizes: list[int], groups: int, loss_mean: str) -> list[Sequences]:
    """Cuts an RL step's batch into optimizer steps of `groups` whole groups each, with final token weights.

    Args:
        batch: From `batch_of`.
        sizes: Trajectories of each group.
        groups: Groups of one optimizer step; the last may have fewer.
        loss_mean: `algorithm.loss_mean`.
    """
    ends = np.cumsum(sizes)
    parts = []
    for start in range(0, len(sizes), groups):
        first = int(ends[start] - sizes[start])
        part = batch.take(np.arange(first, int(ends[min(start + groups, len(sizes)) - 1])))
        mask, lengths = torch.from_numpy(part.fields["mask"]), torch.from_numpy(part.lengths)
        part.fields["weights"] = token_weights(mask, lengths, loss_mean).numpy()
        parts.append(part)
    return parts
