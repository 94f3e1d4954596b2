"""The place of a version of the weights, as told to an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A version in a store. Plain values only, as in JSON."""

    folder: str
    """Address of the store (`store.open_store`)."""
    name: str
    """Name of the version (`manifest.Manifest.name`)."""
    timeout_s: float
    """Time limit of the download in seconds."""
    cache: str = ""
    """Folder on the engine's node where the downloaded weights survive the engine's process; "" for host memory."""
