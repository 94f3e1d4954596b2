"""The choice of a data-parallel replica of an engine for each request.

vLLM would choose by load figures that arrive every 100 ms, so two equal runs would form different batches. Here the
choice depends only on the requests and their order.
"""

from __future__ import annotations

from skyrl_mega.engines.base import Request
from skyrl_mega.engines.prefix_affinity import PrefixAffinity


class Replicas:
    """The replicas of an engine, with the number of requests in progress of each. Lives in the engine's event loop.

    Args:
        count: Number of replicas.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.requests = dict.fromkeys(range(count), 0)
        """Replica → number of requests in progress."""
        self.affinity = PrefixAffinity()

    def take(self, request: Request) -> int:
        """Returns the replica for a request and counts the request: the replica with the cached prefix, or the replica
        with the fewest requests, the first of several."""
        replica = self.affinity.choose(request, self.requests)
        self.requests[replica] += 1
        return replica

    def release(self, replica: int) -> None:
        """Counts the end of a request."""
        self.requests[replica] -= 1
