"""Packing: sequences of one micro-batch end to end in one row, as required by Megatron's THD format and context
parallelism.

Context parallelism cuts every sequence into 2·cp chunks and gives rank r the chunks r and 2·cp-1-r ("zigzag"), so that
the work under a causal mask is even. Hence every sequence is padded to a multiple of 2·cp, and a last sequence of
padding makes the row divisible for sequence parallelism. Padding always gets weight 0 and never influences a result.

With shared prefixes (`shared_prefixes`) a sequence leaves out first tokens that another sequence of the row has too,
and attends to the other's.

Legend: N sequences, T tokens in the packed row, L = T / cp tokens on this context rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from skyrl_mega.megatron.rotation import Rotation
from skyrl_mega.megatron.shared_prefixes import SharedPrefix, shared_prefixes
from skyrl_mega.trajectories.sequences import TRAJECTORY, Sequences, ragged_arange


@dataclass
class RowRoutes:
    """Expert choices for the tokens of a row seen by this rank's routers (`router_replay`).

    Legend: L these tokens, M MoE layers, K experts of a token.
    """

    routes: Tensor
    """[L, M, K], as in `models.routes`: the choices to replay."""
    expected: Tensor
    """[L, M, K]: the same choices derived in a second way, to check the result."""
    read: Tensor
    """int64 [L]: index of the token in the flat `Sequences`, or -1 for padding."""
    position: Tensor
    """int64 [L]: position of the token within the sequence."""
    recorded: Tensor | None = None
    """[L, M, K]: buffer for the routers' own choices when recording."""

    def to(self, device: torch.device) -> RowRoutes:
        """Returns a copy with all tensors on `device`."""
        return replace(self, **_on_device(self, device))


@dataclass
class SharedKeys:
    """The tokens that each sequence of a row with shared prefixes attends to, its own included.

    Legend: N sequences, K tokens attended to, over all sequences.
    """

    index_K: Tensor
    """int64 [K]: positions in the row, sequence by sequence."""
    bounds_q: Tensor
    """int32 [N + 1]: bounds of the sequences' own tokens in the row."""
    bounds_k: Tensor
    """int32 [N + 1]: bounds of the sequences in `index_K`."""
    longest_q: int
    """Most own tokens of a sequence."""

    def to(self, device: torch.device) -> SharedKeys:
        """Returns a copy with all tensors on `device`."""
        return replace(self, **_on_device(self, device))


@dataclass
class PackedRow(PackedSeqParams):
    """megatron-core's description of a packed row, plus the position of each of this rank's tokens.

    With shared prefixes megatron-core's bounds describe one sequence, because only the rotation of queries and keys
    reads them, by `position_L` (`model.HiddenGPT`).
    """

    sequence_L: Tensor | None = None
    """int64 [L]: index of each local token's sequence."""
    position_L: Tensor | None = None
    """int64 [L]: position of each local token within the sequence."""
    global_L: Tensor | None = None
    """int64 [T]: for each token of the whole row, the index in the concatenation of the context ranks' parts."""
    sequences: int = 0
    """Number of sequences in the row, a sequence of padding included."""
    keys: SharedKeys | None = None
    """The keys of a row with shared prefixes; otherwise None."""
    rotation: Rotation | None = None
    """Rotation of queries and keys by `PackedAttention`, set by the model in its own copy of the row; None if
    megatron-core rotates them."""
    routes: RowRoutes | None = None
    """Routes of a row to replay or record; otherwise None."""

    def whole(self) -> PackedRow:
        """Returns the description of the whole row, as for a single context rank, of a context rank's part; without
        routes. Returns the same object if the row is not cut among context ranks."""
        if self.global_L is None or self.cu_seqlens_q is None:
            return self
        lengths = (self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1]).long()
        sequence, position = run_positions(lengths, len(self.global_L))
        return replace(self, sequence_L=sequence, position_L=position, global_L=None, routes=None)


@dataclass
class MicroBatch:
    """One micro-batch on one context rank.

    Entry i of `targets`, and of a column aligned to the target, belongs to the token predicted by input i. Entry i of a
    column aligned to the input belongs to input i itself.
    """

    tokens: Tensor
    """int64 [1, L]: inputs."""
    positions: Tensor
    """int64 [1, L]: position of each input within its sequence."""
    targets: Tensor
    """int64 [L]: next tokens."""
    columns: dict[str, Tensor]
    """[L, …] each, with the original dtype; 0 for entries without a token."""
    row: PackedRow
    answer: Tensor
    """int64 [L]: index of the answer of each counted token (`Sequences.answers`); 0 for other tokens."""
    answers: int
    """Number of answers in the whole micro-batch, over all context ranks."""
    source: Tensor
    """int64 [L]: index of the predicted token in the flat `Sequences`, or -1 without a prediction."""
    read: Tensor
    """int64 [L]: index of the input token in the flat `Sequences`, or -1 for padding."""

    @property
    def padding(self) -> Tensor:
        """bool [1, L]: True for padding."""
        return (self.read < 0)[None]

    def to(self, device: torch.device) -> MicroBatch:
        """Returns a copy with all tensors, columns and routes included, on `device`."""
        columns = {name: values.to(device) for name, values in self.columns.items()}
        routes = self.row.routes.to(device) if self.row.routes else None
        keys = self.row.keys.to(device) if self.row.keys else None
        row = replace(self.row, routes=routes, keys=keys, **_on_device(self.row, device))
        return replace(self, columns=columns, row=row, **_on_device(self, device))


def pack(
    batch: Sequences, *, context: int, context_rank: int, tensor: int, rows: int = 1, share: bool = False
) -> MicroBatch:
    """Returns one context rank's part of a micro-batch packed into a row, in host memory.

    A sequence of n tokens gives n inputs; input i predicts token i + 1, the last predicts nothing. Without sequences
    the row is padding alone. The column `TRAJECTORY` is left out; `MicroBatch.answer` depends on it.

    Args:
        batch: The micro-batch's sequences.
        context: Number of context ranks.
        context_rank: Index of the context rank, from 0.
        tensor: Tensor-parallel size.
        rows: Each tensor rank's part of the row is padded to a multiple of this number of tokens.
        share: True to leave out first tokens that another sequence of the micro-batch has too. Needs a single context
            rank. Left-out tokens predict no counted token.
    """
    shared = shared_prefixes(batch) if share else []
    left_out = torch.zeros(len(batch), dtype=torch.int64)
    for prefix in shared:
        left_out[prefix.sequence] = prefix.tokens
    padded = padded_lengths(batch.lengths - left_out, context, tensor, rows)
    starts, total = padded.cumsum(0) - padded, int(padded.sum())
    read, predicted = torch.full((2, total), -1)
    """For each position of the whole row, the index of the input token and of the predicted token; -1 for none."""
    places = ragged_arange(starts[: len(batch)], batch.lengths - left_out)
    inputs = ragged_arange(batch.starts + left_out, batch.lengths - left_out)
    read[places] = inputs
    predicts = torch.ones(len(batch.tokens), dtype=torch.bool)
    predicts[batch.lengths.cumsum(0)[batch.lengths > 0] - 1] = False
    predicts = predicts[inputs]
    predicted[places[predicts]] = inputs[predicts] + 1

    local = _zigzag(starts, padded, context, context_rank)
    sources = {"input": read[local], "target": predicted[local]}

    def picked(values: Tensor, aligned: str = "target") -> Tensor:
        source = sources[aligned]
        valid = source >= 0
        out = values.new_zeros(len(source), *values.shape[1:])
        out[valid] = values[source[valid]]
        return out

    answer, answers = batch.answers()
    tokens = batch.tokens.long()
    keys = _shared_keys(batch, shared, padded, places, inputs) if shared else None
    row = _packed_row(starts, padded, local, context, left_out, keys)
    assert row.position_L is not None
    return MicroBatch(
        tokens=picked(tokens, "input")[None],
        positions=row.position_L[None],
        targets=picked(tokens),
        columns={name: picked(c.values, c.aligned) for name, c in batch.columns.items() if name != TRAJECTORY},
        row=row,
        answer=picked(answer),
        answers=answers,
        source=sources["target"],
        read=sources["input"],
    )


def _on_device(record: MicroBatch | PackedRow | RowRoutes | SharedKeys, device: torch.device) -> dict[str, Any]:
    """Returns the tensor fields of a record on a device.

    A tensor shared by several fields stays shared: if padded bounds and bounds are one tensor, Transformer Engine knows
    that no padding lies between the sequences.
    """
    tensors = {name: value for name, value in vars(record).items() if isinstance(value, Tensor)}
    moved = {key: value.to(device) for key, value in {id(value): value for value in tensors.values()}.items()}
    return {name: moved[id(value)] for name, value in tensors.items()}


def padded_lengths(lengths: Tensor, context: int, tensor: int, rows: int = 1) -> Tensor:
    """Returns the lengths of the sequences in the packed row with padding, int64 [N], or [N + 1] with a sequence of
    padding at the end.

    Every sequence is padded to a multiple of 2 · context (with several context ranks). A last sequence of padding makes
    the row divisible for sequence parallelism and zigzag, and each tensor rank's part divisible by `rows`.

    Args:
        lengths: int64 [N]: tokens of each sequence.
        context: Number of context ranks.
        tensor: Tensor-parallel size.
        rows: Divisor of each tensor rank's part of the row, in tokens.
    """
    chunks = 2 * context if context > 1 else 1
    padded = -(-lengths // chunks) * chunks
    width, total = math.lcm(chunks * tensor, context * tensor * rows), int(padded.sum())
    tail = -total % width if total else width
    return torch.cat([padded, padded.new_tensor([tail])]) if tail else padded


def run_positions(lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Returns for runs of `lengths` [n] (int64), laid end to end, each position's run and offset in the run: [total]
    each.

    `total` is the sum of the lengths; reading the sum from the device would make the host wait.
    """
    run = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths, output_size=total)
    first = torch.cumsum(lengths, 0) - lengths
    return run, torch.arange(total, device=lengths.device) - first[run]


def grid(x: Tensor, slot: Tensor, rows: int, width: int) -> Tensor:
    """Returns the tokens [L, …] as [rows, width, …]: token i at place `slot[i]` of the flattened rows, zeros
    elsewhere."""
    return x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, slot, x).view(rows, width, *x.shape[1:])


def _packed_row(
    starts: Tensor, padded: Tensor, local: Tensor, context: int, left_out: Tensor, keys: SharedKeys | None
) -> PackedRow:
    """Returns the description of the whole row and of this rank's positions `local`; `left_out` has the number of
    left-out first tokens of each sequence."""
    bounds = torch.cat([starts, padded.sum()[None]]).int()
    first = torch.nn.functional.pad(left_out, (0, len(padded) - len(left_out)))  # 0 for a sequence of padding
    longest = int((padded + first).max())
    sequence = torch.arange(len(padded)).repeat_interleave(padded)
    order = None
    if context > 1:
        order = torch.cat([_zigzag(starts, padded, context, rank) for rank in range(context)]).argsort()
    if keys is not None:
        bounds = bounds[[0, -1]]
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        sequence_L=sequence[local],
        position_L=local - (starts - first)[sequence[local]],
        global_L=order,
        sequences=len(padded),
        keys=keys,
    )


def _shared_keys(
    batch: Sequences, shared: list[SharedPrefix], padded: Tensor, places: Tensor, inputs: Tensor
) -> SharedKeys:
    """Returns the keys of a whole row with shared prefixes.

    Args:
        batch: The micro-batch.
        shared: The prefixes, each after the prefix of its source.
        padded: int64 [N] or [N + 1]: own tokens of each sequence, a sequence of padding included.
        places, inputs: int64 [L] each: positions of tokens in the row, and their indices in the flat `batch`.
    """
    place = torch.zeros(len(batch.tokens), dtype=torch.int64)
    """Position in the row of each token of the batch, or of the same token of another sequence."""
    place[inputs] = places
    starts = batch.starts.tolist()
    for sequence, source, tokens in shared:
        first, other = starts[sequence], starts[source]
        place[first : first + tokens] = place[other : other + tokens]
    padding = padded[len(batch) :]
    total, tail = int(padded.sum()), int(padding.sum())
    lengths = torch.cat([batch.lengths, padding])
    bounds_q, bounds_k = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).int() for n in (padded, lengths))
    return SharedKeys(torch.cat([place, torch.arange(total - tail, total)]), bounds_q, bounds_k, int(padded.max()))


def _zigzag(starts: Tensor, padded: Tensor, context: int, rank: int) -> Tensor:
    """Returns the positions in the row held by context rank `rank`, sequence by sequence."""
    if context == 1:
        return torch.arange(int(padded.sum()))
    width = padded // (2 * context)
    first = starts + rank * width
    second = starts + (2 * context - 1 - rank) * width
    return ragged_arange(torch.stack([first, second], 1).flatten(), width.repeat_interleave(2))
