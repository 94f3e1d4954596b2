"""Requests spread over engines: the least loaded takes the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.rollout.engine import Completion, Request, Sampling

if TYPE_CHECKING:
    from skyrl_mega.cluster.group import ActorGroup

IN_FLIGHT = 4
"""An engine is given so many times the sequences that it runs at once: it is never idle, and the rest goes where room
is first."""


@dataclass
class _Waiting:
    request: Request
    answer: asyncio.Future[Completion]


class Router:
    """Routes the requests of one generation phase. Lives in one event loop.

    Requests that are submitted in the same turn of the event loop travel in one message per engine, so that a batch
    of short requests costs few calls.

    Args:
        engines: A group of `Engine` actors.
        sampling: How all requests are drawn.
        concurrency: Sequences that one engine runs at once.
        timeout_s: Seconds for one request, from when an engine has it.
    """

    def __init__(self, engines: ActorGroup, sampling: Sampling, concurrency: int, timeout_s: float) -> None:
        self.engines, self.sampling, self.timeout_s = engines, sampling, timeout_s
        self.limit = IN_FLIGHT * concurrency
        self.load = [0] * len(engines)
        self.queue: deque[_Waiting] = deque()
        self.tasks: set[asyncio.Task[None]] = set()
        self.scheduled = False

    async def generate(self, request: Request) -> Completion:
        """Continues one prompt.

        Raises:
            ActorFailed: The engine died, or raised; TimeoutError inside it names the request.
        """
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self.queue.append(waiting)
        self._schedule()
        return await waiting.answer

    def _schedule(self) -> None:
        if not self.scheduled:
            self.scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Hands out what fits."""
        self.scheduled = False
        parts: list[dict[str, _Waiting]] = [{} for _ in self.load]
        while self.queue and min(self.load) < self.limit:
            engine = self.load.index(min(self.load))
            waiting = self.queue.popleft()
            parts[engine][waiting.request.id] = waiting
            self.load[engine] += 1
        for engine, part in enumerate(parts):
            if part:
                task = asyncio.create_task(self._run(engine, part))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    async def _run(self, engine: int, part: dict[str, _Waiting]) -> None:
        import ray

        from skyrl_mega.cluster.group import describe

        # The engine bounds each request; the margin is for a process that does not answer at all.
        silence = self.timeout_s + 30.0
        name = f"{self.engines.name}-{engine}"
        try:
            method = self.engines.actors[engine].generate_many.options(num_returns="streaming")
            stream = method.remote([w.request for w in part.values()], self.sampling, self.timeout_s)
            while part:
                reference = await asyncio.wait_for(anext(stream), silence)
                for completion in await asyncio.wait_for(reference, silence):
                    self.load[engine] -= 1
                    waiting = part.pop(completion.id)
                    if not waiting.answer.done():
                        waiting.answer.set_result(completion)
                if self.queue:
                    self._schedule()
        except (ray.exceptions.RayError, TimeoutError, StopAsyncIteration) as error:
            what = f"no answer within {silence:g} s" if isinstance(error, TimeoutError) else describe(error)
            failure = ActorFailed(name, engine, "generate_many", what, max(0, len(part) - 1))
            for waiting in part.values():
                if not waiting.answer.done():
                    waiting.answer.set_exception(failure)


Progress = Callable[[int, int], None]
"""Called with (trajectories done, trajectories in all)."""
