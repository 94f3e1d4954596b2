"""Micro-batches of a mini-batch on every data-parallel rank. Samples without a gradient may get micro-batches of their
own, which take no backward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_mega.batch.samples import Samples
from skyrl_mega.parallel.balance import balance_groups
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.flops import BACKWARD
from skyrl_mega.trajectories.sequences import TRAJECTORY, Sequences

Rows = list[list[Tensor]]
"""For each data-parallel rank, the indices of the sequences in each micro-batch."""
SMALL = 8
"""The budget of tokens divided by this number: a smaller micro-batch takes about as long as one of this size."""


class Split(NamedTuple):
    """The micro-batches of a mini-batch on all data-parallel ranks."""

    rows: Rows
    """[data-parallel rank][micro-batch]: indices of the sequences."""
    forward_only: int = 0
    """Number of micro-batches at the end of each rank's that take a forward pass only; equal on all ranks."""

    @property
    def forward_only_sequences(self) -> Tensor:
        """int64: indices of the sequences, of all ranks, that take a forward pass only."""
        empty = torch.zeros(0, dtype=torch.int64)
        return torch.cat([empty, *(m for micros in self.rows for m in micros[len(micros) - self.forward_only :])])


def split_micro_batches(batch: Samples | Sequences, parallel: ParallelDims, tokens: int) -> Rows:
    """Splits a mini-batch into micro-batches, equally many on every data-parallel rank, and returns the indices of
    their sequences: [data-parallel rank][micro-batch], int64 each. With few sequences micro-batches may be empty.

    With `algorithm.sequence_unit: trajectory`, all samples of a trajectory are in one micro-batch.

    Args:
        batch: The mini-batch.
        parallel: The layout.
        tokens: Token budget of one micro-batch, over all context ranks; a single trajectory may exceed the budget.
    """
    return _balanced(torch.arange(len(batch.lengths)), batch, parallel, tokens)


def split_apart(batch: Samples | Sequences, silent: Tensor | None, parallel: ParallelDims, tokens: int) -> Split:
    """Splits a mini-batch as `split_micro_batches` does and returns the micro-batches of all ranks, with separate
    micro-batches for samples without a gradient if this saves time by an estimate.

    Args:
        batch, parallel, tokens: See `split_micro_batches`.
        silent: bool [S]: True for samples with a gradient of exactly 0; None for no such samples. If all are silent,
            `forward_only` is 0 all the same. Where a trajectory's samples stay together, a trajectory is silent only if
            all of its samples are.
    """
    together = split_micro_batches(batch, parallel, tokens)
    if silent is None or not silent.any():
        return Split(together)
    if TRAJECTORY in batch.columns:  # samples of a trajectory stay in one micro-batch
        _, number = torch.tensor(_group_numbers(batch)).unique(return_inverse=True)
        silent = ~torch.zeros(int(number.max()) + 1).index_add(0, number, (~silent).float()).bool()[number]
    if silent.all():
        return Split(together)
    trained, forward_only = (_balanced(part.nonzero()[:, 0], batch, parallel, tokens) for part in (~silent, silent))
    apart = BACKWARD * _duration(trained, batch.lengths, parallel, tokens)
    apart += _duration(forward_only, batch.lengths, parallel, tokens)
    if apart >= BACKWARD * _duration(together, batch.lengths, parallel, tokens):
        return Split(together)
    return Split([a + b for a, b in zip(trained, forward_only, strict=True)], len(forward_only[0]))


def _balanced(sequences: Tensor, batch: Samples | Sequences, parallel: ParallelDims, tokens: int) -> Rows:
    """Splits some sequences of a mini-batch, given by index."""
    multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
    numbers = _group_numbers(batch)
    groups = [numbers[i] for i in sequences.tolist()]
    rows = balance_groups(batch.lengths[sequences].tolist(), groups, parallel.data, tokens, multiple)
    return [[sequences[torch.tensor(m, dtype=torch.int64)] for m in micros] for micros in rows]


def _duration(rows: Rows, lengths: Tensor, parallel: ParallelDims, tokens: int) -> int:
    """Returns the duration of a forward pass in tokens: ranks wait for the largest of each k-th micro-batch, and
    pipeline stages for the first and the last micro-batch."""
    slowest = [max(int(lengths[m].sum()) for m in of_ranks) for of_ranks in zip(*rows, strict=True)]
    durations = [max(load, tokens // SMALL) for load in slowest]
    return sum(durations) + (parallel.pipeline - 1) * max(durations)


def _group_numbers(batch: Samples | Sequences) -> list[int]:
    """Returns a number for each sequence; sequences with equal numbers share a micro-batch."""
    if TRAJECTORY not in batch.columns:
        return list(range(len(batch.lengths)))
    if isinstance(batch, Samples):
        return batch.columns[TRAJECTORY].tolist()
    return batch[TRAJECTORY][batch.starts].tolist()
