"""Which engine a turn goes to: the one whose cache has what comes before it, unless that one is too busy.

A trajectory's next turn begins with all that it has read and written so far, and all samples of a prompt begin with the
prompt. An engine that has computed that need not read it again, until other tokens need its place or a sync changes the
weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping

from skyrl_mega.engines.base import Request

KNOWN = 2**16
"""Trajectories and prompts that are remembered, some megabytes; the one longest unused is forgotten first."""
LONG = 1024
"""Tokens of a prompt that its samples go to one engine for. They tend to be long together, so short prompts are better
read several times than answered in one place."""
FEW, SHARE = 8, 0.25
"""An engine is too busy for what it knows where it has more than so many requests, and so large a share, above the
least busy one: reading costs a turn a fraction of a second, running beside more others costs it a share of its time."""


class Homes:
    """The engines of the last turns. Lives in one event loop, as its router."""

    def __init__(self) -> None:
        self.engines: OrderedDict[Hashable, int] = OrderedDict()
        """Of trajectories by name, and of prompts by uid."""

    def choose(self, request: Request, requests: Mapping[int, int]) -> int:
        """The engine that a request goes to.

        Args:
            request: One turn of a trajectory.
            requests: What each engine has that may take it, at least one.
        """
        keys = _keys(request)
        least = min(requests, key=requests.__getitem__)
        known = (self.engines[key] for key in keys if key in self.engines)
        home = next((engine for engine in known if engine in requests), least)
        if requests[home] > requests[least] + max(FEW, SHARE * requests[least]):
            home = least
        for key in keys:
            self.engines[key] = home
            self.engines.move_to_end(key)
        while len(self.engines) > KNOWN:
            self.engines.popitem(last=False)
        return home


def _keys(request: Request) -> list[Hashable]:
    """What an engine may know of it, the most first."""
    shared = request.prompt is not None and len(request.tokens) >= LONG
    return [request.trajectory, *([request.prompt] if shared else [])]
