"""The parts of an engine present on the device, and the validity of the weights: when an engine can serve."""

from __future__ import annotations

from collections.abc import Collection

from skyrl_mega.config.residency import ENGINE

WEIGHTS, CACHE = ENGINE


class NotReady(RuntimeError):
    """A request to an engine with a part asleep or with undefined weights."""


class Presence:
    """The presence of an engine's parts. At first all parts are present.

    Args:
        sleeps: Parts that may be dropped; the others stay.
    """

    def __init__(self, sleeps: Collection[str]) -> None:
        self.sleeps = frozenset(sleeps)
        self.asleep: set[str] = set()
        self.defined = True
        """True if all weights are of one version: not after a drop or a partial update, until a complete update."""

    @property
    def ready(self) -> bool:
        """True if the engine can compute: no part is asleep, and the weights are defined."""
        return self.defined and not self.asleep

    def check(self) -> None:
        """Raises NotReady if a part is asleep, or the weights are undefined; else does nothing."""
        if self.asleep:
            raise NotReady(f"the engine is asleep: {', '.join(sorted(self.asleep))}; call `wake` before a request")
        if not self.defined:
            raise NotReady("the engine's weights are undefined; sync the weights before a request")

    def check_weights(self) -> None:
        """Raises NotReady if the weights are asleep, so that there is no memory to receive weights."""
        if WEIGHTS in self.asleep:
            raise NotReady(f"the engine is asleep: {WEIGHTS}; call `wake` before a weight sync")

    def drop(self, parts: Collection[str]) -> list[str]:
        """Marks parts as asleep and returns the parts among them that were present until now, sorted. Frees no memory.
        Weights become undefined when dropped.

        Args:
            parts: "engine_weights", "kv_cache" (`config.residency.ENGINE`).

        Raises:
            ValueError: The engine was started to keep one of the parts.
        """
        kept = [part for part in parts if part not in self.sleeps]
        if kept:
            raise ValueError(
                f"{', '.join(kept)}: cannot sleep, as the engine was started to drop only {sorted(self.sleeps)}"
            )
        new = sorted(set(parts) - self.asleep)
        self.asleep.update(new)
        if WEIGHTS in new:
            self.defined = False
        return new
