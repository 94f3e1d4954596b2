"""Training steps with tokens in Ray's object store. The driver sends references plus a weight and an advantage per
sample.

Rewards and lengths determine both, so the driver's work and memory grow with the number of trajectories, not of tokens.
The results are equal to `batch.make_batch`, `mini_batches` and `token_advantages`.

Legend: G groups, N trajectories, S samples in total.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from skyrl_mega.algorithms.advantages import AdvantageInputs, estimate, of_tokens, whiten
from skyrl_mega.algorithms.old_logprobs import columns
from skyrl_mega.algorithms.token_weights import sequence_weights
from skyrl_mega.config.derived import has_critic, response_limit
from skyrl_mega.config.schema import AlgorithmConfig, Config, MoeConfig
from skyrl_mega.megatron.parts import Part, Referred
from skyrl_mega.megatron.sequences import TRAJECTORY, Sequences
from skyrl_mega.planner.flops import Load
from skyrl_mega.rollout.by_reference import all_remote
from skyrl_mega.rollout.trajectory import Group, Kind, Trajectory
from skyrl_mega.trainer import speed
from skyrl_mega.trainer.batch import Sample, greedy_rewards, pulls, punishment, samples_of, teaches
from skyrl_mega.trainer.rewards import by_name
from skyrl_mega.trainer.whole_mini_batch import mean_weight

Mini = Sequences | Referred


def goes_by_reference(config: Config, groups: list[Group]) -> bool:
    """Returns True if the driver needs no tokens: all trajectories are stored remotely, and no estimate or selection
    works on tokens. Anything else is fetched on access."""
    algorithm = config.algorithm
    by_token = has_critic(config) or of_tokens(algorithm) or columns(algorithm)
    carried = config.reference.layout is not None or config.policy.moe.replay == "rollout"
    return not by_token and not carried and all_remote([t for group in groups for t in group.trajectories])


@dataclass
class Outcomes:
    """Rewards, samples and advantages of a step's trajectories."""

    groups: list[Group]
    played: list[Trajectory]
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
        return torch.tensor([t.written for t in self.played], dtype=torch.int64) * self.kept

    @property
    def with_advantage(self) -> float:
        """Share of tokens in the loss with a nonzero advantage; 0 without tokens."""
        return float(self.counts[self.advantages != 0].sum()) / max(1, int(self.counts.sum()))


def outcomes(groups: list[Group], config: Config) -> Outcomes:
    """Computes the rewards and advantages of a step's trajectories."""
    algorithm, limit = config.algorithm, response_limit(config.rollout)
    played = [t for group in groups for t in group.trajectories]
    judged = ~torch.tensor([t.status.failed for t in played], dtype=torch.bool)
    kept = judged
    if algorithm.overlong.filter:
        by = algorithm.overlong.filter_by
        kept = judged & ~torch.tensor([t.status.filtered(by) for t in played], dtype=torch.bool)
    group_N = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group.trajectories) for group in groups]))
    rewards = torch.tensor([t.reward for t in played], dtype=torch.float32) + punishment(played, algorithm, limit)
    named = by_name(played, algorithm.reward_weights).items()
    inputs = AdvantageInputs(
        rewards[judged],
        group_N[judged],
        torch.tensor([t.written for t in played], dtype=torch.int64)[judged],
        greedy_N=greedy_rewards(groups, algorithm, limit)[group_N][judged],
        named={name: torch.tensor(values)[judged] for name, values in named},
    )
    found = whiten(estimate(inputs, algorithm), inputs, algorithm)
    advantages = torch.zeros(len(played)).masked_scatter(judged, found.float())
    samples = [samples_of(t, config.rollout.step_wise) for t in played]
    return Outcomes(groups, played, samples, judged, kept, advantages)


def mini_batches(found: Outcomes, config: Config) -> list[Referred]:
    """Cuts a step into mini-batches of whole groups, with weights and advantages, as `batch.mini_batches` does."""
    size = config.data.mini_batch_prompts or len(found.groups)
    ends_N = torch.tensor([len(group.trajectories) for group in found.groups]).cumsum(0).tolist()
    minis, first = [], 0
    for at in range(0, len(found.groups), size):
        of_groups = found.groups[at : at + size]
        last = ends_N[min(at + size, len(ends_N)) - 1]
        minis.append(_mini_batch(found, slice(first, last), of_groups, config.algorithm))
        first = last
    return minis


def _mini_batch(found: Outcomes, rows: slice, groups: list[Group], algorithm: AlgorithmConfig) -> Referred:
    cut, kept = found.samples[rows], found.kept[rows].tolist()
    parts, counts = [], []
    for t, samples, counted in zip(found.played[rows], cut, kept, strict=True):
        assert t.remote_arrays is not None
        parts += [Part(t.remote_arrays.ref, *sample) for sample in samples]
        counts += [_written(t, sample) * counted for sample in samples]
    samples_N = torch.tensor([len(samples) for samples in cut])
    tokens_N, kept_N = found.counts[rows].double(), found.kept[rows]
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
    mini = Referred(parts, torch.tensor(counts, dtype=torch.int64), {"weights": of_samples(weights * kept_N)})
    if algorithm.kl.in_loss and algorithm.kl.mean != "loss":
        mini.columns["kl_weights"] = of_samples(sequence_weights(tokens_N, algorithm.kl.mean) * kept_N)
    mini.columns["advantages"] = of_samples(found.advantages[rows])
    if algorithm.sequence_unit == "trajectory":
        mini.columns[TRAJECTORY] = torch.arange(len(cut), dtype=torch.int32).repeat_interleave(samples_N)
    return mini


def _written(t: Trajectory, sample: Sample) -> int:
    """Returns the number of policy tokens trained on in a sample."""
    own = [(max(s.start, sample.own), min(s.end, sample.end)) for s in t.steps if s.kind is Kind.RESPONSE]
    return sum(max(0, end - start) for start, end in own)


@singledispatch
def load_of(mini: Mini) -> Load:
    """Returns the work of a forward pass over a mini-batch: the real tokens, without padding."""
    raise TypeError(type(mini))


load_of.register(Sequences)(speed.load_of)


@load_of.register
def _(mini: Referred) -> Load:
    return Load.of(mini.lengths.tolist(), float(mini.counts.sum()))


def weight_of(mini: Mini) -> float:
    """Returns the sum of all token weights."""
    if isinstance(mini, Referred):
        return float((mini.counts * mini.columns["weights"].double()).sum())
    return float(mini["weights"].sum())


def learns(mini: Mini, algorithm: AlgorithmConfig, moe: MoeConfig) -> bool:
    """Returns True if a mini-batch contains anything to learn; see `batch.teaches`."""
    if not isinstance(mini, Referred):
        return teaches(mini, algorithm, moe)
    counts = mini.counts > 0
    return bool((counts & (pulls(algorithm, moe) | (mini.columns["advantages"] != 0))).any())


def importance_mean_of(mini: Mini, algorithm: AlgorithmConfig) -> float:
    """Returns the divisor of the importance weights; always 1 for references (`goes_by_reference`)."""
    return 1.0 if isinstance(mini, Referred) else mean_weight(mini, algorithm)
