"""Packing: sequences of one micro-batch end to end in one row, as Megatron's THD format and context parallelism want
them.

Context parallelism cuts every sequence into 2·cp chunks and gives rank r the chunks r and 2·cp-1-r ("zigzag"), so
that the work under a causal mask is even. Hence every sequence is padded to a multiple of 2·cp, and a last sequence
of padding makes the row divisible for sequence parallelism. Padding has weight 0 everywhere; nothing that counts
depends on it.

Legend: N sequences, T tokens in the packed row, L = T / cp tokens on this context rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from skyrl_mega.megatron.sequences import Sequences, ragged_arange


@dataclass
class PackedRow(PackedSeqParams):
    """megatron-core's description of a packed row, and where each of this rank's tokens lies in its sequence."""

    sequence_L: Tensor | None = None
    """int64 [L]: the sequence that a local token belongs to."""
    position_L: Tensor | None = None
    """int64 [L]: its position in that sequence."""
    global_L: Tensor | None = None
    """int64 [T]: for each token of the whole row, its place after the context ranks' parts are concatenated."""
    sequences: int = 0


@dataclass
class MicroBatch:
    """One micro-batch on one context rank.

    Entry i of `targets` and of the fields belongs to the token that input i predicts.
    """

    tokens: Tensor
    """int64 [1, L]: inputs."""
    positions: Tensor
    """int64 [1, L]."""
    targets: Tensor
    """int64 [L]: next tokens."""
    fields: dict[str, Tensor]
    """float32 [L] each."""
    row: PackedRow
    answer: Tensor
    """int64 [L]: which of the micro-batch's answers a token that counts belongs to; 0 for the others."""
    answers: int
    source: Tensor
    """int64 [L]: index of the predicted token in the flat `Sequences`, or -1 where nothing is predicted."""


def pack(batch: Sequences, *, context: int, context_rank: int, tensor: int, device: torch.device) -> MicroBatch:
    """Packs a micro-batch for one context rank.

    A sequence of n tokens gives n inputs; input i predicts token i + 1, the last predicts nothing. Fields are shifted
    the same way, and are 0 where nothing is predicted.
    """
    chunks = 2 * context if context > 1 else 1
    padded = -(-batch.lengths // chunks) * chunks
    total = int(padded.sum())
    # The width that sequence parallelism and the zigzag both divide.
    width = chunks * tensor
    tail = -total % width if total else width
    if tail:
        padded = np.append(padded, tail)
        total += tail
    starts = np.cumsum(padded) - padded

    place = ragged_arange(starts[: len(batch)], batch.lengths)  # [tokens of the batch] → place in the row
    tokens = np.zeros(total, np.int64)
    tokens[place] = batch.tokens
    source = np.full(total, -1, np.int64)
    last = np.cumsum(batch.lengths) - 1
    predicts = np.ones(len(batch.tokens), bool)
    predicts[last] = False
    here = np.flatnonzero(predicts)
    source[place[here]] = here + 1

    answer_of_token, answers = _answers(batch)
    local = _zigzag(starts, padded, context, context_rank)
    mine = source[local]
    known = mine >= 0
    targets = np.where(known, batch.tokens[mine], 0) if len(batch.tokens) else np.zeros(len(local), np.int64)
    sequence = np.repeat(np.arange(len(padded)), padded)
    position = np.arange(total) - np.repeat(starts, padded)

    def tensor_of(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    cu = torch.from_numpy(np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)).to(device)
    longest = int(padded.max())
    order = None
    if context > 1:
        gathered = np.concatenate([_zigzag(starts, padded, context, r) for r in range(context)])
        order = np.empty(total, np.int64)
        order[gathered] = np.arange(total)
    row = PackedRow(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        sequence_L=tensor_of(sequence[local]),
        position_L=tensor_of(position[local]),
        global_L=None if order is None else tensor_of(order),
        sequences=len(padded),
    )
    return MicroBatch(
        tokens=tensor_of(tokens[local])[None],
        positions=tensor_of(position[local])[None],
        targets=tensor_of(targets),
        fields={k: tensor_of(np.where(known, v[mine], 0).astype(np.float32)) for k, v in batch.fields.items()}
        if len(batch.tokens)
        else {k: torch.zeros(len(local), device=device) for k in batch.fields},
        row=row,
        answer=tensor_of(np.where(known, answer_of_token[mine], 0) if len(batch.tokens) else np.zeros_like(local)),
        answers=answers,
        source=tensor_of(mine),
    )


def _answers(batch: Sequences) -> tuple[np.ndarray, int]:
    """For each token that counts the number of its answer, [T], and how many answers there are.

    An answer is a run of tokens with a weight within one sequence: between two turns lies what the environment said.
    It does not depend on how a trajectory is cut into sequences.
    """
    counts = batch.fields["weights"] != 0 if "weights" in batch.fields else np.zeros(len(batch.tokens), bool)
    begins = counts.copy()
    begins[1:] &= ~counts[:-1]
    first = batch.starts[batch.lengths > 0]
    begins[first] = counts[first]
    return np.where(counts, np.cumsum(begins) - 1, 0), int(begins.sum())


def _zigzag(starts: np.ndarray, padded: np.ndarray, context: int, rank: int) -> np.ndarray:
    """Places in the row that context rank `rank` holds, sequence after sequence."""
    if context == 1:
        return ragged_arange(starts, padded)
    width = padded // (2 * context)
    first = starts + rank * width
    second = starts + (2 * context - 1 - rank) * width
    pairs = np.stack([first, second], 1).ravel()
    return ragged_arange(pairs, np.repeat(width, 2))
