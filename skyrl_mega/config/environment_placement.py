"""Placement of rollout workers, and each worker's share of run-wide limits."""

from __future__ import annotations

from urllib.parse import urlsplit

from skyrl_mega.config.schema import EnvironmentConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def on_driver_node(environment: EnvironmentConfig) -> bool:
    """Returns True if rollout workers must run on the driver's node because the retrieval service listens only on
    loopback."""
    url = environment.retriever.url
    return urlsplit(url).hostname in LOOPBACK if url else environment.retriever.index is not None


def share_of(total: int, among: int, place: int) -> int:
    """Returns the share of process `place` of `among` processes in a run-wide total; at least 1."""
    return max(1, total // among + (place < total % among))
