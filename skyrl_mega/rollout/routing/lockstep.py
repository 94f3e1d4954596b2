"""Lockstep routing, which makes the batches of the engines independent of timing (`run.deterministic`).

The last bits of a log-prob depend on the sequences computed in the same batch. If requests are sent as environments
answer, and go to the first engine with capacity, the batches differ from run to run. Here all trajectories wait for
each other before each turn. The requests then leave in name order, each to the engine of the trajectory's first turn.
A wave is as slow as the longest turn, and an engine receives its whole batch at once: a lockstep router has no limit on
requests (`concurrency=None`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from skyrl_mega.engines.base import Request
from skyrl_mega.rollout.routing.router import QueuedRequest


def in_lockstep(queue: deque[QueuedRequest], running: int, busy: bool) -> deque[QueuedRequest]:
    """Returns the requests to send now, as a new deque: all queued requests in name order once every running trajectory
    has a request and the engines have finished the requests sent before; otherwise none. Requests whose callers were
    cancelled are left out. Does not change `queue`.

    Args:
        queue: The queued requests.
        running: Number of running trajectories.
        busy: True while an engine works on a request.
    """
    wave = [waiting for waiting in queue if not waiting.answer.done()]  # without requests of an abandoned phase
    if busy or len(wave) < running:
        return deque()
    return deque(sorted(wave, key=lambda waiting: waiting.request.id))


class FixedEngines:
    """Engines of trajectories, fixed in turn by the order of the first wave: the engine has the cached prefix."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        """Trajectory → its number in the first wave."""

    def choose(self, request: Request, requests: Mapping[int, int]) -> int:
        """Returns the number of the engine for a request: the engine of the trajectory's first turn, as long as the
        same engines are in service. Trajectories get the engines in turn, in the order of their first call.

        Args:
            request: A turn of a trajectory.
            requests: Engine → number of requests, for each engine in service; not empty.
        """
        place = self.places.setdefault(request.trajectory, len(self.places))
        return sorted(requests)[place % len(requests)]
