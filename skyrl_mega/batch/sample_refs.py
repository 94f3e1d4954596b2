"""Samples with tokens in Ray's object store: the driver sends references, and the ranks read the tokens.

A trajectory is stored once, on the node of the rollout, as a `Sequences` with the columns `mask` and
`rollout_logprobs`. A rank receives references, plus a few numbers per sample shared by all of the sample's tokens.

Legend: S samples, T tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyrl_mega.trajectories.remote_arrays import StoredTrajectory
from skyrl_mega.trajectories.sequences import Column, Sequences, ragged_arange

DRIVER_COLUMNS = frozenset({"mask", "token_rewards"})
"""Columns of a trajectory used by the driver for weights and advantages, and not sent to ranks."""
WEIGHT_COLUMNS = frozenset({"weights", "kl_weights"})
"""Columns with 0 for every token not written by the policy."""


class SampleRef(NamedTuple):
    """A sample: tokens `start … end - 1` of a stored trajectory."""

    ref: Any
    """Ray's reference to a `StoredTrajectory`."""
    start: int
    first_trained: int
    """Index of the first token with a weight; another sample trains on earlier tokens."""
    end: int


@dataclass
class SampleRefs:
    """References to S samples; samples of the same trajectory are adjacent."""

    parts: list[SampleRef]
    counts: Tensor
    """int64 [S]: number of tokens counted in the loss."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[S] each, float32 except `sequences.TRAJECTORY`: a value for every token of a sample, or in `WEIGHT_COLUMNS` for
    every token written by the policy."""

    @property
    def lengths(self) -> Tensor:
        """int64 [S]: tokens of each sample."""
        return torch.tensor([part.end - part.start for part in self.parts], dtype=torch.int64)

    def take(self, rows: Tensor) -> tuple[list[SampleRef], dict[str, Tensor]]:
        """Returns some samples as arguments of `read_samples`: their references, and their values of each column.

        Args:
            rows: int64: indices of the samples.
        """
        return [self.parts[row] for row in rows.tolist()], {k: v[rows] for k, v in self.columns.items()}


def fetch_stored(parts: Iterable[SampleRef]) -> dict[Any, StoredTrajectory]:
    """Returns Ray reference → stored trajectory. Arrays stay in the object store shared by a node's processes.

    Raises:
        RayError: A trajectory is lost.
    """
    import ray

    refs = list(dict.fromkeys(part.ref for part in parts))
    return dict(zip(refs, ray.get(refs), strict=True))


def read_samples(
    parts: Sequence[SampleRef],
    columns: Mapping[str, Tensor],
    stored: Mapping[Any, StoredTrajectory],
    *,
    drawn: bool = False,
) -> Sequences:
    """Returns the samples as sequences for training, with `rollout_logprobs`, the trajectories' columns, and `columns`.

    Args:
        parts: The samples.
        columns: See `SampleRefs.columns`.
        stored: The stored trajectories by reference.
        drawn: Adds the column `drawn`, bool: False for end tokens not sampled by an engine, with log-prob NaN.
    """
    cut = [stored[part.ref].tokens for part in parts]
    at = [slice(part.start, part.end) for part in parts]
    lengths = torch.tensor([part.end - part.start for part in parts], dtype=torch.int64)
    samples = Sequences(lengths, torch.cat([s.tokens[where] for s, where in zip(cut, at, strict=True)]))
    mask = torch.cat([s["mask"][where] for s, where in zip(cut, at, strict=True)])
    before = torch.tensor([part.first_trained - part.start for part in parts], dtype=torch.int64)
    mask[ragged_arange(samples.starts, before)] = 0
    for name in sorted({name for s in cut for name in s.columns} - DRIVER_COLUMNS):
        samples.add(name, _column(name, cut, at))
    if drawn:
        ends = samples.lengths.cumsum(0) - 1
        samples["drawn"] = torch.ones(len(samples.tokens), dtype=torch.bool)
        samples["drawn"][ends] = ~samples["rollout_logprobs"][ends].isnan()
    for name, values in columns.items():
        of_tokens = samples.per_token(values)
        samples[name] = of_tokens * mask if name in WEIGHT_COLUMNS else of_tokens
    return samples


def _column(name: str, cut: Sequence[Sequences], at: Sequence[slice]) -> Column:
    """Joins a column of several trajectories, with 0 for trajectories without the column (failed ones, for example)."""
    like = next(s.columns[name] for s in cut if name in s)
    absent = like.values.new_zeros(1, *like.values.shape[1:])
    values = [
        s[name][where] if name in s else absent.expand(where.stop - where.start, *absent.shape[1:])
        for s, where in zip(cut, at, strict=True)
    ]
    return Column(torch.cat(values), like.aligned)
