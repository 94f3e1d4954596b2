"""Token sequences as flat tensors: what travels between the trainer and the policy's ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

TRAJECTORY = "trajectory"
"""The column of `algorithm.sequence_unit: trajectory`, int32: the number of a token's trajectory in the mini-batch."""


@dataclass(frozen=True)
class Column:
    """A value of every token, and the input that it goes with once sequences are packed (`packing.pack`)."""

    values: Tensor
    """[T, …], of any dtype that numpy has too, or bfloat16."""
    aligned: Literal["target", "input"] = "target"
    """target: entry t goes with the input before token t, which predicts it: weights, log-probs, advantages.
    input: entry t goes with token t itself as it is read: the experts that it was routed to, values."""

    def take(self, index: Tensor | slice) -> Column:
        """The same of some tokens."""
        return Column(self.values[index], self.aligned)


@dataclass
class Sequences:
    """N sequences, one after another. Entry t of every column belongs to token t. All of it is in host memory.

    `sequences["weights"]` is a column's values, and `sequences["weights"] = values` sets one that is aligned to the
    target.

    Legend: N sequences, T tokens of all of them.
    """

    lengths: Tensor
    """int64 [N]."""
    tokens: Tensor
    """int32 [T]."""
    columns: dict[str, Column] = field(default_factory=dict)
    """By name: mask, weights, advantages, old_logprobs, …"""

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int] | np.ndarray]) -> Self:
        """From the token ids of each sequence."""
        lengths = torch.tensor([len(t) for t in tokens], dtype=torch.int64)
        return cls(lengths, flat(tokens, np.int32))

    def __len__(self) -> int:
        return len(self.lengths)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name].values

    def __setitem__(self, name: str, values: Tensor) -> None:
        self.add(name, Column(values))

    def add(self, name: str, column: Column) -> None:
        """Adds a column, or puts it in the place of the one of this name.

        Raises:
            ValueError: It has another length than `tokens`.
        """
        if len(column.values) != len(self.tokens):
            raise ValueError(f"column {name}: {len(column.values)} values for {len(self.tokens)} tokens")
        self.columns[name] = column

    @property
    def starts(self) -> Tensor:
        """int64 [N]: where each sequence begins in `tokens`."""
        return self.lengths.cumsum(0) - self.lengths

    def index(self, rows: Sequence[int] | Tensor) -> Tensor:
        """int64: positions in `tokens` of the sequences `rows`, in that order."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        return ragged_arange(self.starts[rows], self.lengths[rows])

    def take(self, rows: Sequence[int] | Tensor) -> Sequences:
        """A copy of the sequences `rows`, in that order."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        at = self.index(rows)
        return Sequences(self.lengths[rows], self.tokens[at], {k: c.take(at) for k, c in self.columns.items()})

    def part(self, first: int, last: int) -> Sequences:
        """Sequences `first … last - 1`, as views."""
        ends = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))
        at = slice(int(ends[first]), int(ends[last]))
        return Sequences(self.lengths[first:last], self.tokens[at], {k: c.take(at) for k, c in self.columns.items()})

    def answers(self) -> tuple[Tensor, int]:
        """Returns for each token that counts the number of its answer, int64 [T], and how many answers there are.

        An answer is a run of tokens with a weight within one sequence: between two turns lies what the environment
        said. It does not depend on how a trajectory is cut into sequences. With the column `TRAJECTORY` all answers of
        a trajectory have one number.
        """
        if "weights" not in self:
            return torch.zeros(len(self.tokens), dtype=torch.int64), 0
        counts = self["weights"] != 0
        if TRAJECTORY in self:
            trajectories, number = torch.unique(self[TRAJECTORY][counts], return_inverse=True)
            found = torch.zeros(len(self.tokens), dtype=torch.int64).masked_scatter(counts, number)
            return found, len(trajectories)
        begins = counts.clone()
        begins[1:] &= ~counts[:-1]
        first = self.starts[self.lengths > 0]
        begins[first] = counts[first]
        return torch.where(counts, begins.cumsum(0) - 1, 0), int(begins.sum())

    def per_token(self, values: Tensor) -> Tensor:
        """Repeats one value per sequence [N, …] over its tokens [T, …]."""
        return values.repeat_interleave(self.lengths, dim=0)

    def __getstate__(self) -> dict[str, Any]:
        """Arrays of numpy, which Ray hands on in shared memory without a copy for each process."""
        columns = {name: (_array(c.values), c.values.dtype, c.aligned) for name, c in self.columns.items()}
        return {"lengths": self.lengths.numpy(), "tokens": self.tokens.numpy(), "columns": columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.lengths, self.tokens = _shared(state["lengths"]), _shared(state["tokens"])
        columns = state["columns"].items()
        self.columns = {
            name: Column(_shared(values).view(dtype), aligned) for name, (values, dtype, aligned) in columns
        }


def flat(parts: Sequence[Any], dtype: Any) -> Tensor:
    """Sequences of numbers, arrays among them, one after another in one tensor [T]."""
    arrays = [np.asarray(part, dtype) for part in parts]
    return torch.from_numpy(np.concatenate(arrays) if arrays else np.zeros(0, dtype))


def ragged_arange(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenation of `arange(start, start + length)` for every pair: int64."""
    before = lengths.cumsum(0) - lengths
    offsets = (starts - before).repeat_interleave(lengths)
    return torch.arange(len(offsets)) + offsets


def _array(values: Tensor) -> np.ndarray:
    """The tensor's memory as an array; numpy has no bfloat16, and gets its bits."""
    bits = values.view(torch.int16) if values.dtype is torch.bfloat16 else values
    array: np.ndarray = bits.numpy()
    return array


def _shared(array: np.ndarray) -> Tensor:
    """The array's memory as a tensor. What came through Ray is read-only: nothing here writes into a column."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)
