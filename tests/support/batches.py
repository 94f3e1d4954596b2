"""Batches with all tokens in this process, in the form that ranks read, for tests of tokens, weights and advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_mega.batch import make_batch as module
from skyrl_mega.batch.advantages import compute_advantages, has_gradient
from skyrl_mega.batch.make_batch import Batch
from skyrl_mega.batch.samples import read_samples
from skyrl_mega.config.schema import AlgorithmConfig, MoeConfig, RolloutConfig
from skyrl_mega.trajectories.sequences import Sequences
from skyrl_mega.trajectories.trajectory import Group


def make_batch(groups: list[Group], algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Batch:
    """Returns the batch of these groups, with tokens."""
    batch = module.make_batch(groups, algorithm, rollout)
    batch.read_tokens()
    return batch


def token_advantages(batch: Batch, algorithm: AlgorithmConfig) -> Tensor:
    """Returns the whitened advantage of every token, [T]."""
    return compute_advantages(batch, algorithm).whitened


def mini_batches(batch: Batch, groups: int | None, algorithm: AlgorithmConfig) -> list[Sequences]:
    """Returns the mini-batches as read by ranks, with the columns of `batch.tokens` besides."""
    first, minis = 0, []
    for mini in read_samples(module.mini_batches(batch, groups, algorithm)):
        part = batch.tokens.part(first, first + len(mini))
        mini.columns = {**part.columns, **mini.columns}
        del mini.columns["mask"]
        minis.append(mini)
        first += len(mini)
    return minis


def teaches(batch: Batch, algorithm: AlgorithmConfig, moe: MoeConfig, groups: int | None = None) -> list[bool]:
    """Returns, for each mini-batch, if there is anything to learn."""
    minis = module.mini_batches(batch, groups, algorithm)
    learning = compute_advantages(batch, algorithm).learning.split([len(mini.parts) for mini in minis])
    return [has_gradient(mini.counts, part, algorithm, moe) for mini, part in zip(minis, learning, strict=True)]


def samples_of_tokens(tokens: Sequence[Sequence[int]]) -> module.Samples:
    """Returns samples of these tokens, all in the loss with weight 1."""
    from skyrl_mega.batch.samples import Sample, Samples

    parts = []
    for one in tokens:
        stored = Sequences.of([one])
        stored["mask"] = torch.ones(len(one), dtype=torch.int8)
        parts.append(Sample(stored, 0, 0, len(one)))
    counts, common = torch.tensor([len(one) for one in tokens]), torch.zeros(len(tokens), dtype=torch.int64)
    return Samples(parts, counts, common, {"weights": torch.ones(len(tokens))})
