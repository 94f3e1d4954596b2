"""Batching of queries: a bounded queue for the queries of many requests, and a loop that searches a batch at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from skyrl_mega.retriever.client import Hit

Search = Callable[[Sequence[str], int, str], list[list[Hit]]]
"""(queries, topk, method) → the hits of each query."""


class QueueFull(Exception):
    """The queue has no room for these queries."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits of batching: queries per search, seconds of waiting, waiting queries."""

    batch: int = 64
    """Maximum number of queries per search."""
    wait_s: float = 0.003
    """Seconds to wait for more queries if a batch is not full; during a search the next batch fills up anyway."""
    waiting: int = 8192
    """Maximum number of waiting queries; further requests are rejected."""


@dataclass(frozen=True)
class _PendingQuery:
    query: str
    topk: int
    method: str
    answer: asyncio.Future[list[Hit]]


class Batcher:
    """Queue for the queries of concurrent callers, searched a batch at a time in a thread. Belongs to a single event
    loop.

    Queries are answered only while `run` runs.

    Args:
        search: Answers a batch.
        limits: Limits of batching.
    """

    def __init__(self, search: Search, limits: BatchLimits) -> None:
        self.search, self.limits = search, limits
        self._queue: asyncio.Queue[_PendingQuery] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")

    @property
    def waiting(self) -> int:
        """Number of queries in the queue, without the batch in search."""
        return self._queue.qsize()

    async def ask(self, queries: Sequence[str], topk: int, method: str) -> list[list[Hit]]:
        """Queues the queries, waits until all are answered, and returns the hits of each query: at most `topk`, best
        first. Waits without limit while `run` does not run. `method` is the search method, such as `bm25`.

        Raises:
            QueueFull: There is no room for all queries; none was accepted.
            ValueError: `search` returned a wrong number of results for a batch with any of these queries.
            Exception: The error of `search`, if the search of a batch with any of these queries failed.
        """
        if self.waiting + len(queries) > self.limits.waiting:
            raise QueueFull
        loop = asyncio.get_running_loop()
        pending = [_PendingQuery(query, topk, method, loop.create_future()) for query in queries]
        for entry in pending:
            self._queue.put_nowait(entry)
        return list(await asyncio.gather(*(entry.answer for entry in pending)))

    async def run(self) -> None:
        """Answers queued queries until cancelled; an error of `search` goes to the callers of `ask`.

        After a cancellation the thread is gone, so `run` cannot be called again, and callers of `ask` get no answer:
        cancel them too.
        """
        try:
            while True:
                await self._answer(await self._gather())
        finally:
            self._thread.shutdown(wait=False)

    async def _gather(self) -> list[_PendingQuery]:
        batch = [await self._queue.get()]
        end = asyncio.get_running_loop().time() + self.limits.wait_s
        while len(batch) < self.limits.batch:
            remaining = end - asyncio.get_running_loop().time()
            try:
                batch.append(
                    self._queue.get_nowait() if remaining <= 0 else await asyncio.wait_for(self._queue.get(), remaining)
                )
            except (asyncio.QueueEmpty, TimeoutError):
                break
        return batch

    async def _answer(self, batch: list[_PendingQuery]) -> None:
        for method in {entry.method for entry in batch}:
            group = [entry for entry in batch if entry.method == method and not entry.answer.done()]
            topk = max((entry.topk for entry in group), default=0)
            search = partial(self.search, [entry.query for entry in group], topk, method)
            try:
                results = await asyncio.get_running_loop().run_in_executor(self._thread, search)
                if len(results) != len(group):
                    raise ValueError(f"the search returned {len(results)} results for {len(group)} queries")
            except Exception as error:  # the requests receive the error, the loop continues
                for entry in group:
                    if not entry.answer.done():
                        entry.answer.set_exception(error)
                continue
            for entry, hits in zip(group, results, strict=True):
                if not entry.answer.done():
                    entry.answer.set_result(hits[: entry.topk])
