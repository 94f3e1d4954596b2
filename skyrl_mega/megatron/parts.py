"""Samples whose tokens lie in Ray's object store: the driver names them, ranks read them.

A trajectory is stored once, where it was made, as a `Sequences` of its own with the columns `mask` and
`rollout_logprobs`. A rank gets references and what every token of a sample has in common, a few numbers each.

Legend: S samples, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skyrl_mega.megatron.sequences import Column, Sequences, ragged_arange

OF_THE_DRIVER = frozenset({"mask", "token_rewards"})
"""Columns of a trajectory that weights and advantages are made from, and ranks do not have."""
WEIGHTS = frozenset({"weights", "kl_weights"})
"""Columns that are 0 wherever the policy did not write."""


class Part(NamedTuple):
    """One sample: tokens `start … end - 1` of a stored trajectory."""

    ref: Any
    """Ray's reference to a `Stored`."""
    start: int
    own: int
    """Tokens from here on have weights: another sample trains on those before."""
    end: int


class Stored(NamedTuple):
    """What is stored of a trajectory. Processes of one node share its memory."""

    tokens: Sequences
    """One sequence, with `mask` int8 and `rollout_logprobs` float32, and the trajectory's further columns."""
    messages: bytes
    """JSON: the conversation, for people."""


@dataclass
class Referred:
    """S samples, those of a trajectory one after another."""

    parts: list[Part]
    counts: Tensor
    """int64 [S]: tokens that count in the loss."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[S] each, float32 but for `sequences.TRAJECTORY`: what every token of a sample has; of `WEIGHTS`, every one that
    the policy wrote."""

    @property
    def lengths(self) -> Tensor:
        """int64 [S]."""
        return torch.tensor([part.end - part.start for part in self.parts], dtype=torch.int64)

    def take(self, rows: Tensor) -> tuple[list[Part], dict[str, Tensor]]:
        """Some samples, as `read` takes them."""
        return [self.parts[row] for row in rows.tolist()], {k: v[rows] for k, v in self.columns.items()}


def fetched(parts: Iterable[Part]) -> dict[Any, Stored]:
    """What the references lead to. Arrays stay in the object store, which the processes of a node share."""
    import ray

    refs = list(dict.fromkeys(part.ref for part in parts))
    return dict(zip(refs, ray.get(refs), strict=True))


def read(
    parts: Sequence[Part], columns: Mapping[str, Tensor], stored: Mapping[Any, Stored], *, drawn: bool = False
) -> Sequences:
    """The samples as they are trained on.

    Args:
        parts: The samples.
        columns: As `Referred.columns`.
        stored: What their references lead to.
        drawn: Adds the column `drawn`, bool: all but the end tokens that no engine drew, whose log-prob is NaN.

    Returns:
        With `rollout_logprobs`, the trajectories' columns, and these.
    """
    cut = [stored[part.ref].tokens for part in parts]
    at = [slice(part.start, part.end) for part in parts]
    lengths = torch.tensor([part.end - part.start for part in parts], dtype=torch.int64)
    found = Sequences(lengths, torch.cat([s.tokens[where] for s, where in zip(cut, at, strict=True)]))
    mask = torch.cat([s["mask"][where] for s, where in zip(cut, at, strict=True)])
    before = torch.tensor([part.own - part.start for part in parts], dtype=torch.int64)
    mask[ragged_arange(found.starts, before)] = 0
    for name in sorted({name for s in cut for name in s.columns} - OF_THE_DRIVER):
        found.add(name, _column(name, cut, at))
    if drawn:
        ends = found.lengths.cumsum(0) - 1
        found["drawn"] = torch.ones(len(found.tokens), dtype=torch.bool)
        found["drawn"][ends] = ~found["rollout_logprobs"][ends].isnan()
    for name, values in columns.items():
        of_tokens = found.per_token(values)
        found[name] = of_tokens * mask if name in WEIGHTS else of_tokens
    return found


def _column(name: str, cut: Sequence[Sequences], at: Sequence[slice]) -> Column:
    """A column of several trajectories, 0 for those without it: a failed one may have none."""
    like = next(s.columns[name] for s in cut if name in s)
    absent = like.values.new_zeros(1, *like.values.shape[1:])
    values = [
        s[name][where] if name in s else absent.expand(where.stop - where.start, *absent.shape[1:])
        for s, where in zip(cut, at, strict=True)
    ]
    return Column(torch.cat(values), like.aligned)
