"""Training steps with tokens in Ray's object store. The driver sends references plus a weight and an advantage per
sample.

Rewards and lengths determine both, so the driver's work and memory grow with the number of trajectories, not of tokens.
The results are equal to `batch.make_batch`, `mini_batches` and `token_advantages`.

Legend: G groups, N trajectories, S samples in total.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages import AdvantageInputs, estimate, is_per_token, whiten
from skyrl_mega.algorithms.old_logprobs import columns
from skyrl_mega.algorithms.token_weights import sequence_weights
from skyrl_mega.batch.make_batch import (
    Sample,
    greedy_rewards,
    learns_without_advantage,
    punishment,
    samples_of,
    tokens_have_gradient,
)
from skyrl_mega.batch.mini_batch_stats import mean_importance_weight
from skyrl_mega.batch.rewards import rewards_by_name
from skyrl_mega.batch.sample_refs import SampleRef, SampleRefs
from skyrl_mega.config.derived import has_critic, response_limit
from skyrl_mega.config.schema import AlgorithmConfig, Config, MoeConfig
from skyrl_mega.trajectories.by_reference import all_remote
from skyrl_mega.trajectories.sequences import TRAJECTORY, Sequences
from skyrl_mega.trajectories.trajectory import Group, Kind, Trajectory

MiniBatch = Sequences | SampleRefs


def tokens_stay_remote(config: Config, groups: list[Group]) -> bool:
    """Returns True if the driver needs no tokens: all trajectories are stored remotely, and no estimate or selection
    works on tokens. Anything else is fetched on access."""
    algorithm = config.algorithm
    by_token = has_critic(config) or is_per_token(algorithm) or columns(algorithm)
    carried = config.reference.layout is not None or config.policy.moe.replay == "rollout"
    return not by_token and not carried and all_remote([t for group in groups for t in group.trajectories])


@dataclass
class RemoteBatch:
    """Rewards, samples and advantages of a step's trajectories."""

    groups: list[Group]
    trajectories: list[Trajectory]
    samples: list[list[Sample]]
    judged: Tensor
    """bool [N]: False if the environment failed. A failed trajectory does not count at all."""
    kept: Tensor
    """bool [N]: True if the trajectory's tokens are in the loss."""
    advantages: Tensor
    """float32 [N]: the advantage of each trajectory."""

    @property
    def counts(self) -> Tensor:
        """int64 [N]: tokens in the loss."""
        return torch.tensor([t.written for t in self.trajectories], dtype=torch.int64) * self.kept

    @property
    def advantage_fraction(self) -> float:
        """Share of tokens in the loss with a nonzero advantage; 0 without tokens."""
        return float(self.counts[self.advantages != 0].sum()) / max(1, int(self.counts.sum()))


def make_remote_batch(groups: list[Group], config: Config) -> RemoteBatch:
    """Computes the rewards and advantages of a step's trajectories from rewards and lengths, without fetching any
    token."""
    algorithm, limit = config.algorithm, response_limit(config.rollout)
    trajectories = [t for group in groups for t in group.trajectories]
    judged = ~torch.tensor([t.status.failed for t in trajectories], dtype=torch.bool)
    kept = judged
    if algorithm.overlong.filter:
        by = algorithm.overlong.filter_by
        kept = judged & ~torch.tensor([t.status.filtered(by) for t in trajectories], dtype=torch.bool)
    group_N = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group.trajectories) for group in groups]))
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32) + punishment(
        trajectories, algorithm, limit
    )
    named = rewards_by_name(trajectories, algorithm.reward_weights).items()
    inputs = AdvantageInputs(
        rewards[judged],
        group_N[judged],
        torch.tensor([t.written for t in trajectories], dtype=torch.int64)[judged],
        greedy_N=greedy_rewards(groups, algorithm, limit)[group_N][judged],
        named={name: torch.tensor(values)[judged] for name, values in named},
    )
    whitened = whiten(estimate(inputs, algorithm), inputs, algorithm)
    advantages = torch.zeros(len(trajectories)).masked_scatter(judged, whitened.float())
    samples = [samples_of(t, config.rollout.step_wise) for t in trajectories]
    return RemoteBatch(groups, trajectories, samples, judged, kept, advantages)


def mini_batches(batch: RemoteBatch, config: Config) -> list[SampleRefs]:
    """Cuts a step into mini-batches of whole groups, with weights and advantages, as `batch.mini_batches` does."""
    size = config.data.mini_batch_prompts or len(batch.groups)
    ends_N = torch.tensor([len(group.trajectories) for group in batch.groups]).cumsum(0).tolist()
    minis, first = [], 0
    for at in range(0, len(batch.groups), size):
        mini_groups = batch.groups[at : at + size]
        last = ends_N[min(at + size, len(ends_N)) - 1]
        minis.append(_mini_batch(batch, slice(first, last), mini_groups, config.algorithm))
        first = last
    return minis


def _mini_batch(batch: RemoteBatch, rows: slice, groups: list[Group], algorithm: AlgorithmConfig) -> SampleRefs:
    cut, kept = batch.samples[rows], batch.kept[rows].tolist()
    parts, counts = [], []
    for t, samples, counted in zip(batch.trajectories[rows], cut, kept, strict=True):
        assert t.remote_arrays is not None
        parts += [SampleRef(t.remote_arrays.ref, *sample) for sample in samples]
        counts += [_trained_tokens(t, sample) * counted for sample in samples]
    samples_N = torch.tensor([len(samples) for samples in cut])
    tokens_N, kept_N = batch.counts[rows].double(), batch.kept[rows]
    groups_G = torch.tensor([len(group.trajectories) for group in groups])

    def of_samples(values_N: Tensor) -> Tensor:
        return values_N.float().repeat_interleave(samples_N)

    weights = sequence_weights(
        tokens_N,
        algorithm.loss_mean,
        algorithm.loss_mean_samples,
        groups_G=groups_G,
        length=algorithm.loss_mean_length,
    )
    mini = SampleRefs(parts, torch.tensor(counts, dtype=torch.int64), {"weights": of_samples(weights * kept_N)})
    if algorithm.kl.in_loss and algorithm.kl.mean != "loss":
        mini.columns["kl_weights"] = of_samples(sequence_weights(tokens_N, algorithm.kl.mean) * kept_N)
    mini.columns["advantages"] = of_samples(batch.advantages[rows])
    if algorithm.sequence_unit == "trajectory":
        mini.columns[TRAJECTORY] = torch.arange(len(cut), dtype=torch.int32).repeat_interleave(samples_N)
    return mini


def _trained_tokens(t: Trajectory, sample: Sample) -> int:
    """Returns the number of policy tokens trained on in a sample."""
    spans = [(max(s.start, sample.trained_from), min(s.end, sample.end)) for s in t.steps if s.kind is Kind.RESPONSE]
    return sum(max(0, end - start) for start, end in spans)


def total_weight(mini: MiniBatch) -> float:
    """Returns the sum of all token weights."""
    if isinstance(mini, SampleRefs):
        return float((mini.counts * mini.columns["weights"].double()).sum())
    return float(mini["weights"].sum())


def has_gradient(mini: MiniBatch, algorithm: AlgorithmConfig, moe: MoeConfig) -> bool:
    """Returns True if a mini-batch contains anything to learn; otherwise an optimizer step would move the weights only
    by Adam's moments and weight decay."""
    if not isinstance(mini, SampleRefs):
        return tokens_have_gradient(mini, algorithm, moe)
    counts = mini.counts > 0
    return bool((counts & (learns_without_advantage(algorithm, moe) | (mini.columns["advantages"] != 0))).any())


def importance_mean_of(mini: MiniBatch, algorithm: AlgorithmConfig) -> float:
    """Returns the divisor of the importance weights; always 1 for references (`tokens_stay_remote`)."""
    return 1.0 if isinstance(mini, SampleRefs) else mean_importance_weight(mini, algorithm)
