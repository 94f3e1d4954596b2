"""Micro-batches of a mini-batch on every data-parallel rank. Samples without a gradient may get micro-batches of their
own, which take no backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from skyrl_mega.batch.samples import Samples
from skyrl_mega.megatron.shared_prefixes import common_with_previous
from skyrl_mega.parallel.balance import balance_groups
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.flops import BACKWARD, SMALL
from skyrl_mega.trajectories.sequences import TRAJECTORY, Sequences

Rows = list[list[Tensor]]
"""For each data-parallel rank, the indices of the sequences in each micro-batch."""


class Split(NamedTuple):
    """The micro-batches of a mini-batch on all data-parallel ranks."""

    rows: Rows
    """[data-parallel rank][micro-batch]: indices of the sequences."""
    forward_only: int
    """Number of micro-batches at the end of each rank's that take a forward pass only; equal on all ranks."""
    left_out: Tensor
    """int64 [S]: number of first tokens that each sequence leaves out, because another sequence of the same micro-batch
    computes equal tokens."""

    @property
    def forward_only_sequences(self) -> Tensor:
        """int64: indices of the sequences, of all ranks, that take a forward pass only."""
        empty = torch.zeros(0, dtype=torch.int64)
        return torch.cat([empty, *(m for micros in self.rows for m in micros[len(micros) - self.forward_only :])])


def split_micro_batches(
    batch: Samples | Sequences, parallel: ParallelDims, tokens: int, *, share: bool = False
) -> Rows:
    """Splits a mini-batch into micro-batches, equally many on every data-parallel rank, and returns the indices of
    their sequences: [data-parallel rank][micro-batch], int64 each. With few sequences micro-batches may be empty.

    With `algorithm.sequence_unit: trajectory`, all samples of a trajectory are in one micro-batch.

    Args:
        batch: The mini-batch.
        parallel: The layout.
        tokens: Token budget of one micro-batch, over all context ranks; a single trajectory may exceed the budget.
        share: True if a rank leaves out first tokens of a sequence that another of the micro-batch has too. Adjacent
            sequences with much in common then come into one micro-batch, and left-out tokens count neither for the
            budget nor for the balance.
    """
    return _Splitter.of(batch, parallel, tokens, share).balanced(torch.arange(len(batch.lengths)))


def split_apart(
    batch: Samples | Sequences, silent: Tensor | None, parallel: ParallelDims, tokens: int, *, share: bool = False
) -> Split:
    """Splits a mini-batch as `split_micro_batches` does and returns the micro-batches of all ranks, with separate
    micro-batches for samples without a gradient if this saves time by an estimate.

    Args:
        batch, parallel, tokens, share: See `split_micro_batches`.
        silent: bool [S]: True for samples with a gradient of exactly 0; None for no such samples. If all are silent,
            `forward_only` is 0 all the same. Where a trajectory's samples stay together, a trajectory is silent only if
            all of its samples are.
    """
    splitter = _Splitter.of(batch, parallel, tokens, share)
    together = splitter.balanced(torch.arange(len(batch.lengths)))
    if silent is None or not silent.any():
        return Split(together, 0, splitter.left_out(together))
    if TRAJECTORY in batch.columns:  # samples of a trajectory stay in one micro-batch
        _, number = torch.tensor(_group_numbers(batch)).unique(return_inverse=True)
        silent = ~torch.zeros(int(number.max()) + 1).index_add(0, number, (~silent).float()).bool()[number]
    if silent.all():
        return Split(together, 0, splitter.left_out(together))
    trained, forward_only = (splitter.balanced(part.nonzero()[:, 0]) for part in (~silent, silent))
    apart = BACKWARD * splitter.duration(trained) + splitter.duration(forward_only)
    if apart >= BACKWARD * splitter.duration(together):
        return Split(together, 0, splitter.left_out(together))
    rows = [a + b for a, b in zip(trained, forward_only, strict=True)]
    return Split(rows, len(forward_only[0]), splitter.left_out(rows))


@dataclass(frozen=True)
class _Splitter:
    """The division of a mini-batch into micro-batches."""

    batch: Samples | Sequences
    parallel: ParallelDims
    tokens: int
    """Token budget of a micro-batch."""
    common: Tensor
    """int64 [S]: number of first tokens that each sequence leaves out if the sequence before it is in the same
    micro-batch."""

    @classmethod
    def of(cls, batch: Samples | Sequences, parallel: ParallelDims, tokens: int, share: bool) -> Self:
        """Returns the division of a mini-batch; see `split_micro_batches`."""
        if not share:
            common = torch.zeros(len(batch.lengths), dtype=torch.int64)
        else:
            common = batch.common if isinstance(batch, Samples) else common_with_previous(batch)
        return cls(batch, parallel, tokens, common)

    def balanced(self, sequences: Tensor) -> Rows:
        """Splits some sequences of the mini-batch, given by ascending index. Of several sizes of the pieces that keep
        common tokens together, takes the one with the shortest estimated pass, and few micro-batches."""
        sizes = {0}
        if self.common.any():
            mean = int(self.batch.lengths[sequences].sum()) // self.parallel.data
            sizes |= {min(n // part, self.tokens) for n in (self.tokens, mean) for part in (1, 2, 4)}

        def cost(rows: Rows) -> int:
            return self.duration(rows) + len(rows[0]) * (self.tokens // SMALL)

        return min((self._pieces(sequences, size) for size in sorted(sizes, reverse=True)), key=cost)

    def _pieces(self, sequences: Tensor, most: int) -> Rows:
        """Splits as `balanced`, with sequences that have tokens in common in pieces of up to `most` tokens."""
        multiple = self.parallel.pipeline if self.parallel.virtual_pipeline > 1 else 1
        numbers, lengths, shared = _group_numbers(self.batch), self.batch.lengths.tolist(), self.common.tolist()
        pieces: list[int] = []
        costs: list[int] = []
        size = before = -1
        for _, run in groupby(sequences.tolist(), key=numbers.__getitem__):  # a sequence, or those of a trajectory
            members = list(run)
            left_out = [min(shared[a + 1 : b + 1], default=0) for a, b in pairwise([before, *members])]
            left_out[0] *= before >= 0
            own = [lengths[i] - without for i, without in zip(members, left_out, strict=True)]
            if left_out[0] and size + sum(own) <= most:
                size += sum(own)
            else:
                own[0] = lengths[members[0]]
                size = sum(own)
                piece = members[0]
            pieces += [piece] * len(members)
            costs += own
            before = members[-1]
        rows = balance_groups(costs, pieces, self.parallel.data, self.tokens, multiple)
        return [[sequences[torch.tensor(m, dtype=torch.int64)] for m in micros] for micros in rows]

    def duration(self, rows: Rows) -> int:
        """Returns the duration of a forward pass in tokens: ranks wait for the largest of each k-th micro-batch, and
        pipeline stages for the first and the last micro-batch."""
        own = self.batch.lengths - self.left_out(rows)
        slowest = [max(int(own[m].sum()) for m in of_ranks) for of_ranks in zip(*rows, strict=True)]
        durations = [max(load, self.tokens // SMALL) for load in slowest]
        return sum(durations) + (self.parallel.pipeline - 1) * max(durations)

    def left_out(self, rows: Rows) -> Tensor:
        """Returns int64 [S]: the number of first tokens that each sequence leaves out in these micro-batches."""
        left_out = torch.zeros_like(self.common)
        for micro in chain.from_iterable(rows):
            follows = micro[1:][micro[1:] == micro[:-1] + 1]
            left_out[follows] = self.common[follows]
        return left_out


def _group_numbers(batch: Samples | Sequences) -> list[int]:
    """Returns a number for each sequence; sequences with equal numbers share a micro-batch."""
    if TRAJECTORY not in batch.columns:
        return list(range(len(batch.lengths)))
    if isinstance(batch, Samples):
        return batch.columns[TRAJECTORY].tolist()
    return batch[TRAJECTORY][batch.starts].tolist()
