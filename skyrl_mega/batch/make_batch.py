"""Turns the trajectories of an RL step into samples and mini-batches with final token weights.

A trajectory is a single sample, or several with `rollout.step_wise`. Each token of the policy is in the loss exactly
once, with the same context, advantage and weight. Loss and gradient do not depend on the cut.

Rewards and lengths determine all of this, so the driver's work and memory grow with the number of trajectories. Tokens
are read only for algorithms that work on tokens (`needs_tokens`).

Legend: G groups, N trajectories, S samples in total, T tokens in total.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages import is_per_token
from skyrl_mega.algorithms.old_logprobs import columns
from skyrl_mega.algorithms.shaping import soft_overlong
from skyrl_mega.algorithms.token_weights import sequence_weights
from skyrl_mega.batch.rewards import rewards_by_name
from skyrl_mega.batch.samples import Samples, add_columns, common_tokens, read_samples, samples_of, trained_tokens
from skyrl_mega.config.derived import has_critic, response_limit
from skyrl_mega.config.schema import AlgorithmConfig, Config, RolloutConfig
from skyrl_mega.trajectories.remote_arrays import arrays_lost
from skyrl_mega.trajectories.sequences import TRAJECTORY, Sequences
from skyrl_mega.trajectories.trajectory import TOKEN_REWARDS, Group, Trajectory


@dataclass
class Batch:
    """The trajectories of an RL step, ordered by group, and their samples, ordered by trajectory."""

    trajectories: list[Trajectory]
    refs: Samples
    """The samples of all trajectories."""
    groups: Tensor
    """int64 [G]: trajectories per group."""
    samples: Tensor
    """int64 [N]: samples per trajectory."""
    rewards: Tensor
    """float32 [N]: rewards after length shaping."""
    punishment: Tensor
    """float32 [N], at most 0: the part of `rewards` due to length shaping."""
    written: Tensor
    """int64 [N]: tokens written by the policy, truncated trajectories included."""
    judged: Tensor
    """bool [N]: False if the environment failed. A failed trajectory does not count at all."""
    kept: Tensor
    """bool [N]: True if the trajectory's tokens are in the loss: neither failed nor filtered by `algorithm.overlong`.
    Truncated trajectories still count for the group's baseline, failed trajectories do not."""
    greedy: Tensor
    """float32 [G]: reward of each group's greedy answer, shaped like `rewards`. NaN without a greedy answer or after a
    failure of the environment."""
    named: dict[str, Tensor] = field(default_factory=dict)
    """Name → float32 [N]: the reward of each trajectory under this name, for environments with several rewards; 0 if an
    environment does not give the name."""

    tokens: Sequences = field(default_factory=lambda: Sequences.of([]))
    """The tokens of all samples after `read_tokens`, with the trajectories' columns and `mask`, float32: 1 for tokens
    in the loss. Empty before."""
    by_token: bool = False
    """True after `read_tokens`."""
    trained_here: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """bool [T]: True for tokens written by the policy, each in a single sample. Includes truncated trajectories."""
    token_rewards: Tensor | None = None
    """float64 [T]: rewards of single tokens within an answer (`trajectory.TOKEN_REWARDS`); None if no environment gives
    any."""
    penalty: Tensor | None = None
    """float32 [T]: amount subtracted from each token's reward (`trainer/kl_reward.py`)."""

    @property
    def group_of(self) -> Tensor:
        """int64 [N]: the index of each trajectory's group, from 0."""
        return torch.arange(len(self.groups)).repeat_interleave(self.groups)

    @property
    def counts(self) -> Tensor:
        """int64 [N]: tokens of each trajectory in the loss: `written`, or 0 unless `kept`."""
        return self.written * self.kept

    @property
    def trajectory_tokens(self) -> Tensor:
        """int64 [N]: tokens of each trajectory, summed over the samples."""
        return run_sums(self.refs.lengths, self.samples)

    def per_trajectory(self, values_T: Tensor) -> Tensor:
        """Returns [N]: the sum over each trajectory's tokens of a value per token of the batch, [T]."""
        return run_sums(values_T, self.trajectory_tokens)

    def read_tokens(self) -> None:
        """Reads the tokens of all samples, and sets `tokens`, `trained_here`, `token_rewards` and `by_token`. Copies
        the tokens into this process; a second call reads again.

        Raises:
            ClusterError: Trajectories stored on a node are lost.
        """
        import ray

        try:
            (self.tokens,) = read_samples([self.refs], driver_columns=True)
        except ray.exceptions.RayError as error:
            raise arrays_lost(error) from error
        self.by_token = True
        self.trained_here = self.tokens["mask"] != 0
        kept_T = self.kept.repeat_interleave(self.trajectory_tokens)
        self.tokens["mask"] = (self.trained_here & kept_T).float()
        rewards = self.tokens.columns.pop(TOKEN_REWARDS, None)
        self.token_rewards = None if rewards is None else rewards.values

    def mini_batch_tokens(self, minis: list[Samples], advantages: list[Tensor]) -> list[Sequences]:
        """Returns the sequences of each mini-batch as views of `tokens`, with the columns of `tokens` and of the
        mini-batch, and the column `advantages`; `tokens` itself gets no column. Call `read_tokens` first. The
        mini-batches together must hold all samples, in the order of the batch.

        Args:
            minis: All mini-batches of the step, in order.
            advantages: For each mini-batch a value per token, [T].

        Raises:
            ValueError: `minis` and `advantages` differ in length, or advantages are not one value per token.
        """
        first, views = 0, []
        for mini, advantages_T in zip(minis, advantages, strict=True):
            view = self.tokens.part(first, first + len(mini.parts))
            add_columns(view, mini.columns, view["mask"])
            view["advantages"] = advantages_T
            views.append(view)
            first += len(mini.parts)
        return views


def needs_tokens(config: Config) -> bool:
    """Returns True if the driver needs tokens: for advantages or a selection of tokens, a critic, KL in the reward, or
    the check of an engine's routes.

    Raises:
        UserError: The estimator cannot be found or imported.
    """
    algorithm = config.algorithm
    by_token = has_critic(config) or is_per_token(algorithm) or bool(columns(algorithm))
    return by_token or config.policy.moe.replay == "rollout"


def make_batch(groups: list[Group], algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Batch:
    """Returns the batch of an RL step: all trajectories cut into samples, with rewards and counts. Without groups the
    batch is empty. Reads no token (`Batch.read_tokens` does). Failed trajectories stay in the batch, with 0 trained
    tokens.

    Args:
        groups: The groups of the step; greedy answers only give the baseline, not samples.
        algorithm: Defines length shaping, the filter of truncated trajectories and the weights of named rewards.
        rollout: Defines the cut into samples and the longest response.

    Raises:
        ValueError: In a trajectory of this process, the number of a column's values differs from the number of tokens.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    cut = [samples_of(t, rollout.step_wise) for t in trajectories]
    failed = torch.tensor([t.status.failed for t in trajectories], dtype=torch.bool)
    left_out = failed
    if algorithm.overlong.filter:
        by = algorithm.overlong.filter_by
        left_out = failed | torch.tensor([t.status.filtered(by) for t in trajectories], dtype=torch.bool)
    counts = [
        0 if out else trained_tokens(t, sample)
        for t, samples, out in zip(trajectories, cut, left_out.tolist(), strict=True)
        for sample in samples
    ]
    punished = punishment(trajectories, algorithm, response_limit(rollout))
    return Batch(
        trajectories,
        Samples(
            [sample for samples in cut for sample in samples],
            torch.tensor(counts, dtype=torch.int64),
            common_tokens(groups, cut),
            drawn=rollout.conversation == "one_message",
        ),
        groups=torch.tensor([len(group.trajectories) for group in groups], dtype=torch.int64),
        samples=torch.tensor([len(samples) for samples in cut], dtype=torch.int64),
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float32) + punished,
        punishment=punished,
        written=torch.tensor([t.written for t in trajectories], dtype=torch.int64),
        judged=~failed,
        kept=~left_out,
        greedy=greedy_rewards(groups, algorithm, response_limit(rollout)),
        named={
            name: torch.tensor(values)
            for name, values in rewards_by_name(trajectories, algorithm.reward_weights).items()
        },
    )


def punishment(trajectories: list[Trajectory], algorithm: AlgorithmConfig, limit: int) -> Tensor:
    """Returns the addition to each trajectory's reward for a long response, by `algorithm.overlong`: float32 [N], at
    most 0; all 0 if `overlong.buffer` is 0.

    Args:
        trajectories: N trajectories.
        algorithm: Defines the punishment.
        limit: Maximum number of tokens of a response.
    """
    lengths = torch.tensor([t.response_length for t in trajectories], dtype=torch.int64)
    return soft_overlong(lengths, limit, algorithm.overlong.buffer, algorithm.overlong.penalty)


def greedy_rewards(groups: list[Group], algorithm: AlgorithmConfig, limit: int) -> Tensor:
    """Returns the reward of each group's greedy answer, including length punishment: float32 [G].

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


def mini_batches(batch: Batch, groups: int | None, algorithm: AlgorithmConfig) -> list[Samples]:
    """Cuts an RL step's batch into mini-batches of `groups` whole groups for the optimizer steps, in order, with final
    token weights as the column `weights`. Returns [] for a batch without groups. `batch` stays unchanged.

    If `loss_mean` counts sequences or samples, a trajectory counts once, cut or not. A KL term with a separate mean
    gets the column `kl_weights`; `algorithm.sequence_unit: trajectory` adds the column `sequences.TRAJECTORY`.

    Args:
        batch: From `make_batch`.
        groups: Groups per optimizer step; the last mini-batch may be smaller. None or 0: all groups.
        algorithm: Defines the means of the loss and of the KL term.

    Raises:
        ValueError: `loss_mean` or `kl.mean` is unknown, or lacks its setting, such as `loss_mean_samples`.
    """
    minis: list[Samples] = []
    first = first_sample = 0
    for groups_G in batch.groups.split(groups or len(batch.groups)) if len(batch.groups) else ():
        last = first + int(groups_G.sum())
        kept_N, samples_N = batch.kept[first:last], batch.samples[first:last]
        tokens_N, last_sample = batch.counts[first:last].double(), first_sample + int(samples_N.sum())
        mini = batch.refs.take(torch.arange(first_sample, last_sample))
        weights_N = sequence_weights(
            tokens_N,
            algorithm.loss_mean,
            algorithm.loss_mean_samples,
            groups_G=groups_G,
            length=algorithm.loss_mean_length,
        )
        mini.columns["weights"] = (weights_N * kept_N).float().repeat_interleave(samples_N)
        if algorithm.kl.in_loss and algorithm.kl.mean != "loss":
            kl_weights_N = sequence_weights(tokens_N, algorithm.kl.mean) * kept_N
            mini.columns["kl_weights"] = kl_weights_N.float().repeat_interleave(samples_N)
        if algorithm.sequence_unit == "trajectory":
            mini.columns[TRAJECTORY] = torch.arange(len(samples_N), dtype=torch.int32).repeat_interleave(samples_N)
        minis.append(mini)
        first, first_sample = last, last_sample
    return minis


def run_sums(values_S: Tensor, counts_N: Tensor) -> Tensor:
    """Returns [N]: the sums of the first `counts_N[0]` values, of the next `counts_N[1]` values, and so on; 0 for a
    count of 0. The counts, int64, add up to the number of values, and the sums have the values' dtype."""
    of_S = torch.arange(len(counts_N)).repeat_interleave(counts_N)
    return values_S.new_zeros(len(counts_N)).index_add(0, of_S, values_S)
