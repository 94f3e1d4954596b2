"""The order of prompts: decided by the seed, and resumed at the exact position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from skyrl_mega.common.errors import UserError


class PromptStream:
    """Stream of the indices 0 … count-1, once per epoch; (seed, epoch) decides the order of each epoch.

    The stream continues from one epoch to the next, so no row is dropped if the batch size does not divide the data,
    and a step may draw several batches (dynamic sampling). A batch across the end of an epoch may contain a prompt
    twice, so identify groups by their position in the batch, not by `Prompt.uid`.
    """

    def __init__(
        self, count: int, *, batch: int, seed: int = 0, shuffle: bool = True, epochs: int = 1, rows: str = ""
    ) -> None:
        """Starts at the first prompt of the first epoch.

        Args:
            count: Number of prompts in the data.
            batch: Prompts per step.
            seed: Seed of every epoch's order.
            shuffle: True for random order; False for the order of the data.
            epochs: Number of passes over the data.
            rows: Fingerprint of the data, saved in checkpoints; empty: not saved.

        Raises:
            ValueError: `count`, `batch` or `epochs` is below 1.
        """
        if count < 1 or batch < 1 or epochs < 1:
            raise ValueError(f"count={count}, batch={batch}, epochs={epochs} must all be at least 1")
        self.count, self.batch, self.seed, self.shuffle, self.epochs = count, batch, seed, shuffle, epochs
        self.rows = rows
        self.position = 0
        """Number of prompts drawn so far in all epochs, including prompts put back."""
        self.returned: list[int] = []
        """Drawn prompts put back; drawn again before all others."""
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def remaining(self) -> int:
        """Number of prompts left to draw in all epochs: count · epochs - position, plus prompts put back."""
        return self.count * self.epochs - self.position + len(self.returned)

    @property
    def steps(self) -> int:
        """Number of whole batches in all epochs from the start, count · epochs // batch: the steps of a run with one
        batch per step."""
        return self.count * self.epochs // self.batch

    @property
    def epoch(self) -> int:
        """Epoch of the next new prompt, counted from 0: `position // count`."""
        return self.position // self.count

    def take(self, count: int | None = None) -> list[int]:
        """Draws the next `count` indices (None: a batch), prompts put back first. Returns [] and draws nothing if fewer
        remain."""
        count = self.batch if count is None else count
        if count > self.remaining:
            return []
        drawn, self.returned = self.returned[:count], self.returned[count:]
        while len(drawn) < count:
            epoch, start = divmod(self.position, self.count)
            part = self._order_of(epoch)[start : start + count - len(drawn)]
            drawn += part.tolist()
            self.position += len(part)
        return drawn

    def put_back(self, indices: Sequence[int]) -> None:
        """Puts back drawn but unused prompts: the next `take` returns these indices before all others."""
        self.returned = [*indices, *self.returned]

    def state(self) -> dict[str, Any]:
        """Returns the position and the identity of the data as JSON values, for a checkpoint and `restore`: `position`,
        `count`, `seed` and `shuffle`, and unless empty `rows` and `returned`."""
        state: dict[str, Any] = {
            "position": self.position,
            "count": self.count,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        if self.rows:
            state["rows"] = self.rows
        if self.returned:
            state["returned"] = list(self.returned)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Resumes at the position saved in `state`; batch size, epochs and row contents may have changed since.

        Raises:
            UserError: The number of rows, the seed or the shuffling differs, so the position is meaningless.
        """
        for name, setting in (("count", "data.train rows"), ("seed", "run.seed"), ("shuffle", "data.shuffle")):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the checkpoint was written with {state[name]}, so its position in the data has no meaning",
                    key=setting,
                    value=getattr(self, name),
                    fix=f"restore {state[name]}, or start a new run under another run.name",
                )
        self.position, self.returned = state["position"], [*state.get("returned", [])]

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            order = np.arange(self.count)
            if self.shuffle:
                np.random.default_rng([self.seed, epoch]).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
