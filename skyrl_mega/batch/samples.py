"""Training samples by reference: the driver holds a few numbers per sample, and the ranks read the tokens.

A sample is a span of a trajectory. A trajectory of a rollout worker is stored once, on the node of the rollout, and the
sample holds Ray's reference. A sample of a trajectory in this process holds the arrays themselves.

Legend: S samples, T tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyrl_mega.trajectories.by_reference import stored_tokens
from skyrl_mega.trajectories.sequences import Column, Sequences, ragged_arange
from skyrl_mega.trajectories.trajectory import TOKEN_REWARDS, Group, Kind, Trajectory

DRIVER_COLUMNS = frozenset({"mask", TOKEN_REWARDS})
"""Columns of a trajectory used by the driver for weights and advantages, and not sent to ranks."""
WEIGHT_COLUMNS = frozenset({"weights", "kl_weights"})
"""Columns with 0 for every token not written by the policy."""


class Sample(NamedTuple):
    """A training sequence: tokens `start … end - 1` of a trajectory."""

    ref: Any
    """The trajectory's tokens as `Sequences`, or Ray's reference to a `StoredTrajectory`."""
    start: int
    """First token of the sample, as a position in the trajectory."""
    trained_from: int
    """First position trained on in this sample; another sample trains on earlier policy tokens."""
    end: int
    """Position after the last token of the sample."""


@dataclass
class Samples:
    """S samples; samples of the same trajectory are adjacent."""

    parts: list[Sample]
    counts: Tensor
    """int64 [S]: number of tokens counted in the loss."""
    common: Tensor
    """int64 [S]: first tokens that a sample has in common with the sample before it and that predict no counted token
    of the sample (`common_tokens`)."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[S] each, float32 except `sequences.TRAJECTORY`: a value for every token of a sample, or in `WEIGHT_COLUMNS` for
    every token written by the policy."""
    drawn: bool = False
    """True to add the column `drawn`, bool: False for end tokens not sampled by an engine, with log-prob NaN
    (`rollout.conversation: one_message`)."""
    bare: bool = False
    """True to leave out the trajectories' own columns, such as log-probs and routes."""

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [S]: tokens of each sample."""
        return torch.tensor([part.end - part.start for part in self.parts], dtype=torch.int64)

    @property
    def total_weight(self) -> float:
        """Sum of the weights in the loss over all tokens: Σ `counts` · column `weights`."""
        return float((self.counts * self.columns["weights"].double()).sum())

    def take(self, rows: Tensor) -> Samples:
        """Returns the samples at the indices `rows`, int64, in this order, with their counts and columns, as a new
        object; `rows` may repeat an index."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        parts, common = [self.parts[row] for row in rows.tolist()], self.common[rows]
        common[:1] = 0
        common[1:] *= rows[1:] == rows[:-1] + 1
        return Samples(parts, self.counts[rows], common, columns, self.drawn, self.bare)

    def with_weights_only(self) -> Samples:
        """Returns the same samples, with tokens, for a critic or a reference: of the columns, only `weights` is kept.
        Raises KeyError without `weights`."""
        return Samples(self.parts, self.counts, self.common, {"weights": self.columns["weights"]}, bare=True)


def common_tokens(groups: Iterable[Group], cut: Iterable[Sequence[Sample]]) -> Tensor:
    """Returns int64 [S]: the number of first tokens that each sample has in common with the sample before it and that
    predict no token trained on in the sample; 0 if unknown.

    Known are the prompt of a group's trajectories, taken to be one prompt if its lengths are equal, and the earlier
    turns of a trajectory.

    Args:
        groups: The groups of a step.
        cut: The samples of each of the groups' trajectories.
    """
    common: list[int] = []
    samples = iter(cut)
    for group in groups:
        before: Sample | None = None
        length = 0
        for t in group.trajectories:
            former, length = length, t.steps[0].end if t.steps else 0
            prompt = length if length == former else 0
            for number, sample in enumerate(next(samples)):
                if before is None or before.start != sample.start:
                    common.append(0)
                elif number == 0:
                    common.append(max(0, min(prompt, before.end) - sample.start - 1))
                else:
                    common.append(max(0, min(before.end, sample.trained_from - 1) - sample.start))
                before = sample
    return torch.tensor(common, dtype=torch.int64)


def samples_of(t: Trajectory, step_wise: str) -> list[Sample]:
    """Returns the training samples of a trajectory, at least one (the whole trajectory if the policy wrote nothing), in
    order.

    Args:
        t: A finished trajectory.
        step_wise: `rollout.step_wise`. off: the whole trajectory. turns: for each answer, the context and the answer.
            merged: for each conversation (a rewrite starts a new conversation), everything up to the last response.
            Responses with nothing in between (an empty observation inside one message) count as a single answer, as in
            the whole trajectory.

    Raises:
        ValueError: The number of a column's values differs from the number of tokens, in a trajectory of this process.
    """
    ref = stored_tokens(t) if t.remote_arrays is None else t.remote_arrays.ref
    whole = [Sample(ref, 0, 0, t.length)]
    if step_wise == "off":
        return whole
    ends: dict[tuple[int, int], int] = {}
    """(start, trained_from) → end of a sample; the last entry wins."""
    start = trained_from = end = 0
    for step in t.steps:
        if step.kind is Kind.PROMPT:
            start = end = step.start
        elif step.kind is Kind.RESPONSE and step.start < step.end:
            trained_from = trained_from if step.start == end else step.start
            end = step.end
            ends[start, trained_from if step_wise == "turns" else start] = end
    return [Sample(ref, start, trained_from, end) for (start, trained_from), end in ends.items()] or whole


def trained_tokens(t: Trajectory, sample: Sample) -> int:
    """Returns the number of policy tokens trained on in a sample of the trajectory `t`, even if `t` is filtered or
    failed."""
    if (sample.trained_from, sample.end) == (0, t.length):
        return t.written
    spans = [(max(s.start, sample.trained_from), min(s.end, sample.end)) for s in t.steps if s.kind is Kind.RESPONSE]
    return sum(max(0, end - start) for start, end in spans)


def read_samples(batches: Sequence[Samples | Sequences], *, driver_columns: bool = False) -> list[Sequences]:
    """Reads the tokens of samples. Arrays stay in the object store shared by a node's processes until copied here.

    Args:
        batches: Samples; sequences are returned unchanged.
        driver_columns: True to include the trajectories' `DRIVER_COLUMNS`, which only the driver needs.

    Returns:
        For each of `batches`, in order, the sequences with the trajectories' columns (unless `bare`), `drawn` (if set),
            and `Samples.columns`. A column absent from some trajectories is 0 there.

    Raises:
        RayError: A trajectory in the object store is lost.
    """
    stored = _fetch(part.ref for samples in batches if isinstance(samples, Samples) for part in samples.parts)
    left_out = frozenset() if driver_columns else DRIVER_COLUMNS
    return [b if isinstance(b, Sequences) else _read(b, stored, left_out) for b in batches]


def read_local(batch: Samples | Sequences) -> Samples | Sequences:
    """Returns the tokens of samples as `read_samples`, if this process holds all their trajectories, and each has one
    sample; returns other samples, and sequences, unchanged.

    Sent to another process, a few arrays cost less than many samples. Samples of one trajectory repeat its tokens.
    """
    if not isinstance(batch, Samples) or not all(isinstance(part.ref, Sequences) for part in batch.parts):
        return batch
    alone = len({id(part.ref) for part in batch.parts}) == len(batch.parts)
    return read_samples([batch])[0] if alone else batch


def add_columns(sequences: Sequences, columns: dict[str, Tensor], mask_T: Tensor) -> None:
    """Adds columns to `sequences`, in place: each sequence's value is repeated for all tokens of the sequence. A column
    of the same name is replaced.

    Args:
        sequences: Receives the columns.
        columns: Name → a value per sequence.
        mask_T: 1 for the policy's tokens, else 0: multiplies the columns in `WEIGHT_COLUMNS`.
    """
    for name, values in columns.items():
        of_tokens = sequences.per_token(values)
        sequences[name] = of_tokens * mask_T if name in WEIGHT_COLUMNS else of_tokens


def _fetch(references: Iterable[Any]) -> dict[Any, Sequences]:
    """Returns the tokens of the stored trajectory of each of Ray's references."""
    references = list(dict.fromkeys(ref for ref in references if not isinstance(ref, Sequences)))
    if not references:
        return {}
    import ray

    return {ref: stored.tokens for ref, stored in zip(references, ray.get(references), strict=True)}


def _read(samples: Samples, stored: dict[Any, Sequences], left_out: frozenset[str]) -> Sequences:
    """Returns the samples with all columns except `left_out`, as `read_samples`."""
    cut = [part.ref if isinstance(part.ref, Sequences) else stored[part.ref] for part in samples.parts]
    at = [slice(part.start, part.end) for part in samples.parts]
    sequences = Sequences(
        samples.lengths, _join([s.tokens[where] for s, where in zip(cut, at, strict=True)], torch.int32)
    )
    mask = _join([s["mask"][where] for s, where in zip(cut, at, strict=True)], torch.int8)
    before = torch.tensor([part.trained_from - part.start for part in samples.parts], dtype=torch.int64)
    mask[ragged_arange(sequences.starts, before)] = 0
    if not samples.bare:
        for name in sorted({name for s in cut for name in s.columns} - left_out - {"mask"}):
            sequences.add(name, _column(name, cut, at))
        if not samples.parts:  # an empty micro-batch has the columns of all others: ranks sum their metrics
            sequences["rollout_logprobs"] = torch.zeros(0)
        if "mask" not in left_out:
            sequences["mask"] = mask
        if samples.drawn:
            sequences["drawn"] = sampled_by_engine(sequences)
    add_columns(sequences, samples.columns, mask)
    return sequences


def sampled_by_engine(sequences: Sequences) -> Tensor:
    """Returns bool [T]: False for end tokens appended without an engine (`rollout.conversation: one_message`), else
    True.

    Such a token ends a sample, with a NaN log-prob. Any other NaN is an engine fault and stays visible. Needs the
    column `rollout_logprobs`, and no empty sequence.
    """
    sampled = torch.ones(len(sequences.tokens), dtype=torch.bool)
    ends = sequences.lengths.cumsum(0) - 1
    sampled[ends] = ~sequences["rollout_logprobs"][ends].isnan()
    return sampled


def _join(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def _column(name: str, cut: Sequence[Sequences], at: Sequence[slice]) -> Column:
    """Joins a column of several trajectories, with 0 for trajectories without the column (failed ones, for example)."""
    like = next(s.columns[name] for s in cut if name in s)
    absent = like.values.new_zeros(1, *like.values.shape[1:])
    values = [
        s[name][where] if name in s else absent.expand(where.stop - where.start, *absent.shape[1:])
        for s, where in zip(cut, at, strict=True)
    ]
    return Column(torch.cat(values), like.aligned)
