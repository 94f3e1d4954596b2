"""The order in which prompts are drawn: decided by the seed, and resumed at the exact place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from skyrl_mega.config.errors import UserError


class PromptStream:
    """Indices 0 … count-1, once per epoch, each epoch in an order of its own that (seed, epoch) decides.

    The stream runs on from one epoch to the next, so that no row is dropped where a batch does not divide the data,
    and a step may draw more than one batch (dynamic sampling). A batch across an epoch's end may hold a prompt twice:
    tell a batch's groups apart by their place in it, not by `Prompt.uid`.
    """

    def __init__(
        self, count: int, *, batch: int, seed: int = 0, shuffle: bool = True, epochs: int = 1, rows: str = ""
    ) -> None:
        """Starts at the first epoch's first prompt.

        Args:
            count: Prompts in the data.
            batch: Prompts of one step.
            seed: Decides every epoch's order.
            shuffle: Whether the order is random; else it is the data's.
            epochs: Passes over the data.
            rows: Fingerprint of the data, which a checkpoint keeps.
        """
        if count < 1 or batch < 1 or epochs < 1:
            raise ValueError(f"count={count}, batch={batch}, epochs={epochs} must all be at least 1")
        self.count, self.batch, self.seed, self.shuffle, self.epochs = count, batch, seed, shuffle, epochs
        self.rows = rows
        self.position = 0
        """Prompts drawn so far."""
        self.returned: list[int] = []
        """Of these, what was put back, and comes first."""
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def remaining(self) -> int:
        """Prompts that can still be drawn."""
        return self.count * self.epochs - self.position + len(self.returned)

    @property
    def steps(self) -> int:
        """Whole batches in all epochs, where each step draws one."""
        return self.count * self.epochs // self.batch

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to."""
        return self.position // self.count

    def take(self, count: int | None = None) -> list[int]:
        """The next `count` indices (a batch by default), or [] once fewer than that remain."""
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
        """These were drawn, and nothing became of them: they come before all others."""
        self.returned = [*indices, *self.returned]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON values."""
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
        """Goes on where `state` was taken; batch size, epochs and what is in the rows may have changed since.

        Raises:
            UserError: The data or its order is another one, so the place means nothing.
        """
        for name, setting in (("count", "data.train rows"), ("seed", "run.seed"), ("shuffle", "data.shuffle")):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"{setting}={getattr(self, name)}: the checkpoint was taken with {state[name]}, so its place in "
                    "the data is lost; set it back, or start another run with run.name"
                )
        self.position, self.returned = state["position"], [*state.get("returned", [])]

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            order = np.arange(self.count)
            if self.shuffle:
                np.random.default_rng([self.seed, epoch]).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
