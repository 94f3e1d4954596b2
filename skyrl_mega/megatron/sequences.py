"""Token sequences as flat arrays: what travels between the trainer and the policy's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np


@dataclass
class Sequences:
    """N sequences, one after another. Every array of `fields` is aligned with `tokens`: entry t belongs to token t.

    Legend: N sequences, T tokens of all of them.
    """

    lengths: np.ndarray
    """int64 [N]."""
    tokens: np.ndarray
    """int64 [T]."""
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 [T] each: mask, advantages, old_logprobs, …"""

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]]) -> Self:
        """From one list of token ids per sequence."""
        lengths = np.array([len(t) for t in tokens], dtype=np.int64)
        flat = np.concatenate([np.asarray(t, dtype=np.int64) for t in tokens]) if tokens else np.zeros(0, np.int64)
        return cls(lengths, flat)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """int64 [N]: where each sequence begins in `tokens`."""
        return np.cumsum(self.lengths) - self.lengths

    def index(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Positions in `tokens` of the sequences `rows`, in that order."""
        return ragged_arange(self.starts[rows], self.lengths[rows])

    def take(self, rows: Sequence[int] | np.ndarray) -> Sequences:
        """The sequences `rows`, in that order."""
        rows = np.asarray(rows, dtype=np.int64)
        at = self.index(rows)
        return Sequences(self.lengths[rows], self.tokens[at], {k: v[at] for k, v in self.fields.items()})

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """Repeats one value per sequence [N] over its tokens [T]."""
        return np.repeat(values, self.lengths)


def ragged_arange(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenation of `arange(start, start + length)` for every pair."""
    ends = np.cumsum(lengths)
    offsets = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) + offsets
