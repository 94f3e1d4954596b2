"""Which parts of an engine are on its device, and whether its weights are any: what it may be asked for."""

from __future__ import annotations

from collections.abc import Collection

from skyrl_mega.config.residency import ENGINE

WEIGHTS, CACHE = ENGINE


class NotReady(RuntimeError):
    """An engine was asked while a part of it is asleep, or before its weights have come back."""


class Presence:
    """An engine's parts. At first all of them are there.

    Args:
        sleeps: Parts that may be dropped; the others stay.
    """

    def __init__(self, sleeps: Collection[str]) -> None:
        self.sleeps = frozenset(sleeps)
        self.asleep: set[str] = set()
        self.defined = True
        """Whether the weights are those of one version: not once they have been dropped, or half of an update has
        come, until a whole one has."""

    @property
    def ready(self) -> bool:
        """Whether it can compute."""
        return self.defined and not self.asleep

    def check(self) -> None:
        """Raises NotReady where it cannot compute."""
        if self.asleep:
            raise NotReady(f"asleep: {', '.join(sorted(self.asleep))}; `wake` comes before a request")
        if not self.defined:
            raise NotReady("its weights are undefined: a weight sync comes before a request")

    def check_weights(self) -> None:
        """Raises NotReady where there is no memory for weights."""
        if WEIGHTS in self.asleep:
            raise NotReady(f"asleep: {WEIGHTS}; `wake` comes before a weight sync")

    def drop(self, parts: Collection[str]) -> list[str]:
        """These are dropped from now on; those of them that are there as yet.

        Raises:
            ValueError: One of them is kept.
        """
        kept = [part for part in parts if part not in self.sleeps]
        if kept:
            raise ValueError(f"{', '.join(kept)}: kept, this engine was started to drop {sorted(self.sleeps)}")
        new = sorted(set(parts) - self.asleep)
        self.asleep.update(new)
        if WEIGHTS in new:
            self.defined = False
        return new
