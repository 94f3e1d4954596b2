"""Token sequences as flat tensors, exchanged between the trainer and the policy's ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

TRAJECTORY = "trajectory"
"""Column of `algorithm.sequence_unit: trajectory`, int32: index of a token's trajectory in the mini-batch."""


@dataclass(frozen=True)
class Column:
    """A value per token, with the alignment to inputs after packing (`packing.pack`)."""

    values: Tensor
    """[T, …], of any dtype supported by numpy, or bfloat16."""
    aligned: Literal["target", "input"] = "target"
    """Alignment of the entries to inputs.

    - target: entry t belongs to the input before token t, which predicts token t: weights, log-probs, advantages.
    - input: entry t belongs to token t as an input: expert routes, values.
    """

    def take(self, index: Tensor | slice) -> Column:
        """Returns a new column with the values at `index` (token positions, or a slice) and the same alignment: a copy
        for positions, a view for a slice."""
        return Column(self.values[index], self.aligned)


@dataclass
class Sequences:
    """N sequences, one after another, in host memory. Entry t of every column belongs to token t.

    `sequences["weights"]` returns a column's values; `sequences["weights"] = values` sets a column aligned to the
    target.

    Legend: N sequences, T tokens of all sequences.
    """

    lengths: Tensor
    """int64 [N]."""
    tokens: Tensor
    """int32 [T]."""
    columns: dict[str, Column] = field(default_factory=dict)
    """Columns by name: mask, weights, advantages, old_logprobs, …"""

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int] | np.ndarray]) -> Self:
        """Returns sequences without columns, from the token ids of each sequence."""
        lengths = np.array([len(t) for t in tokens], np.int64)  # a tenth of torch.tensor's time, for one trajectory
        return cls(torch.from_numpy(lengths), flat(tokens, np.int32))

    def __len__(self) -> int:
        return len(self.lengths)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name].values

    def __setitem__(self, name: str, values: Tensor) -> None:
        self.add(name, Column(values))

    def add(self, name: str, column: Column) -> None:
        """Adds or replaces a column.

        Raises:
            ValueError: The number of values differs from the number of tokens.
        """
        if len(column.values) != len(self.tokens):
            raise ValueError(f"column {name}: {len(column.values)} values for {len(self.tokens)} tokens")
        self.columns[name] = column

    @property
    def starts(self) -> Tensor:
        """int64 [N]: index of each sequence's first token in `tokens`."""
        return self.lengths.cumsum(0) - self.lengths

    def index(self, rows: Sequence[int] | Tensor) -> Tensor:
        """Returns the positions in `tokens` of all tokens of the sequences with the numbers `rows`, in that order,
        int64."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        return ragged_arange(self.starts[rows], self.lengths[rows])

    def take(self, rows: Sequence[int] | Tensor) -> Sequences:
        """Returns a copy of the sequences with the numbers `rows`, in that order, with all columns; a number may
        repeat."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        at = self.index(rows)
        return Sequences(self.lengths[rows], self.tokens[at], {k: c.take(at) for k, c in self.columns.items()})

    def part(self, first: int, last: int) -> Sequences:
        """Returns the sequences `first … last - 1` with all columns; the tensors are views of this object's tensors."""
        ends = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))
        at = slice(int(ends[first]), int(ends[last]))
        return Sequences(self.lengths[first:last], self.tokens[at], {k: c.take(at) for k, c in self.columns.items()})

    def answers(self) -> tuple[Tensor, int]:
        """Returns the index of each token's answer, int64 [T], counted from 0, and the number of answers.

        An answer is a run of tokens with nonzero weight (column `weights`) within one sequence; the environment's
        tokens separate two turns. Answers do not depend on the cut of a trajectory into sequences. With the column
        `TRAJECTORY` all answers of a trajectory share one index. Tokens without weight have index 0 too. Without the
        column `weights` there are no answers.
        """
        if "weights" not in self:
            return torch.zeros(len(self.tokens), dtype=torch.int64), 0
        counts = self["weights"] != 0
        if TRAJECTORY in self:
            trajectories, number = torch.unique(self[TRAJECTORY][counts], return_inverse=True)
            answer = torch.zeros(len(self.tokens), dtype=torch.int64).masked_scatter(counts, number)
            return answer, len(trajectories)
        begins = counts.clone()
        begins[1:] &= ~counts[:-1]
        first = self.starts[self.lengths > 0]
        begins[first] = counts[first]
        return torch.where(counts, begins.cumsum(0) - 1, 0), int(begins.sum())

    def per_token(self, values: Tensor) -> Tensor:
        """Returns the values [N, …] of sequences repeated for every token of the sequence: [T, …]."""
        return values.repeat_interleave(self.lengths, dim=0)

    def __getstate__(self) -> dict[str, Any]:
        """Returns numpy arrays, which Ray shares between processes without copying."""
        columns = {name: (_array(c.values), c.values.dtype, c.aligned) for name, c in self.columns.items()}
        return {"lengths": self.lengths.numpy(), "tokens": self.tokens.numpy(), "columns": columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.lengths, self.tokens = _shared(state["lengths"]), _shared(state["tokens"])
        columns = state["columns"].items()
        self.columns = {
            name: Column(_shared(values).view(dtype), aligned) for name, (values, dtype, aligned) in columns
        }


def flat(parts: Sequence[Any], dtype: Any) -> Tensor:
    """Concatenates sequences of numbers, or arrays, and returns a tensor [T]; `dtype` is a numpy dtype. No parts give
    an empty tensor."""
    arrays = [np.asarray(part, dtype) for part in parts]
    return torch.from_numpy(np.concatenate(arrays) if arrays else np.zeros(0, dtype))


def ragged_arange(starts: Tensor, lengths: Tensor) -> Tensor:
    """Returns the concatenation of `arange(start, start + length)` over all pairs of `starts` and `lengths`, int64 on
    the CPU; empty without pairs."""
    before = lengths.cumsum(0) - lengths
    offsets = (starts - before).repeat_interleave(lengths)
    return torch.arange(len(offsets)) + offsets


def _array(values: Tensor) -> np.ndarray:
    """Returns the tensor's memory as an array; bfloat16 as int16 bits, because numpy lacks bfloat16."""
    bits = values.view(torch.int16) if values.dtype is torch.bfloat16 else values
    array: np.ndarray = bits.numpy()
    return array


def _shared(array: np.ndarray) -> Tensor:
    """Returns the array's memory as a tensor. Arrays from Ray are read-only, and columns are never written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)
