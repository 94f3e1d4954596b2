"""Prefix affinity: a turn goes to the engine with the prefix in the cache, unless the engine is too busy.

The next turn of a trajectory begins with everything read and written so far, and all samples of a prompt begin with the
prompt. An engine reuses a computed prefix until eviction or a weight sync.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping

from skyrl_mega.engines.base import Request

MOST_REMEMBERED = 2**16
"""Most trajectories and prompts remembered, a few megabytes; the least recently used is forgotten first."""
LONG_PROMPT = 1024
"""Prompt tokens from which all samples go to the same engine. The samples of a prompt tend to be long together, so
computing a short prompt several times is better than generating all answers in a single engine."""
FEW, SHARE = 8, 0.25
"""Limits of affinity: an engine is too busy if the excess of requests over the least busy engine is above this number
and above this share. Computing a prefix costs a turn a fraction of a second; sharing an engine with more requests slows
the whole turn."""


class PrefixAffinity:
    """Engine of the latest turn of each trajectory and prompt. Lives in the event loop of the router."""

    def __init__(self) -> None:
        self.engines: OrderedDict[Hashable, int] = OrderedDict()
        """Trajectory name or prompt uid → engine."""

    def choose(self, request: Request, requests: Mapping[int, int]) -> int:
        """Returns the number of the engine for a request and remembers it: the engine of the trajectory's last turn or,
        for a long prompt, of another sample of the prompt. If this engine is unknown or too busy (`FEW`, `SHARE`),
        returns the engine with the fewest requests.

        Args:
            request: A turn of a trajectory.
            requests: Engine → number of requests, for each engine allowed to take the request; not empty.
        """
        keys = _keys(request)
        least = min(requests, key=requests.__getitem__)
        cached = (self.engines[key] for key in keys if key in self.engines)
        engine = next((engine for engine in cached if engine in requests), least)
        if requests[engine] > requests[least] + max(FEW, SHARE * requests[least]):
            engine = least
        for key in keys:
            self.engines[key] = engine
            self.engines.move_to_end(key)
        while len(self.engines) > MOST_REMEMBERED:
            self.engines.popitem(last=False)
        return engine


def _keys(request: Request) -> list[Hashable]:
    """Returns the keys of prefixes that an engine may have cached for the request, the longest first."""
    shared = request.prompt is not None and len(request.tokens) >= LONG_PROMPT
    return [request.trajectory, *([request.prompt] if shared else [])]
