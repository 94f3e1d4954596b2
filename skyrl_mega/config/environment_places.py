"""Where the processes are that play trajectories, and what each has of what is the whole run's."""

from __future__ import annotations

from urllib.parse import urlsplit

from skyrl_mega.config.schema import EnvironmentConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def beside_driver(environment: EnvironmentConfig) -> bool:
    """Whether they are on the driver's node: the retrieval service answers there alone, as the run's own does."""
    url = environment.retriever.url
    return urlsplit(url).hostname in LOOPBACK if url else environment.retriever.index is not None


def share_of(total: int, among: int, place: int) -> int:
    """What one of several processes has of a number that is the whole run's, at least 1."""
    return max(1, total // among + (place < total % among))
