"""The choice of a data-parallel replica of an engine for each request.

vLLM would choose by load figures that arrive every 100 ms, so two equal runs would form different batches. Here the
choice depends only on the requests and their order.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        self.of: dict[str, tuple[Request, int]] = {}
        """Name of a request in progress → the request and its replica."""
        self.ended = dict.fromkeys(range(count), 0)
        """Replica → number of tokens of its ended requests."""
        self.affinity = PrefixAffinity()

    def take(self, request: Request) -> int:
        """Returns the replica for a request and counts the request: the replica with the cached prefix unless it is too
        busy (`PrefixAffinity.choose`), or the replica with the fewest requests, the first of several."""
        replica = self.affinity.choose(request, self.requests)
        self.requests[replica] += 1
        self.of[request.id] = request, replica
        return replica

    def release(self, request: Request, replica: int, tokens: int) -> None:
        """Counts the end of a request of this replica with this number of tokens."""
        if self.of.get(request.id, (None,))[0] is request:  # else a call took the name again while this one ended
            del self.of[request.id]
        self.requests[replica] -= 1
        self.ended[replica] += tokens

    def tokens(self, under_way: Iterable[tuple[str, int]]) -> dict[int, int]:
        """Returns for each replica the number of tokens generated so far.

        Args:
            under_way: Names of requests in progress and their numbers of tokens so far.
        """
        counts = {**self.ended}
        for name, tokens in under_way:
            if name in self.of:  # else its call has ended, and vLLM does not know yet
                counts[self.of[name][1]] += tokens
        return counts
