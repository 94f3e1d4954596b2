"""Batching of queries from many requests, and the limit of waiting queries."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from skyrl_mega.retriever.batcher import Batcher, BatchLimits, QueueFull
from skyrl_mega.retriever.client import Hit


class Searcher:
    """A searcher that returns `topk` hits named after the query, records the batches, and waits for `gate`."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, queries: Sequence[str], topk: int, method: str) -> list[list[Hit]]:
        assert self.gate.wait(60)
        self.batches.append(list(queries))
        if "bad" in queries:
            raise RuntimeError("bad query")
        return [[Hit(f"{method}:{query}:{rank}", "", 0.0) for rank in range(topk)] for query in queries]


def test_requests_share_batches_and_get_their_own_answers() -> None:
    async def scenario() -> None:
        searcher = Searcher()
        batcher = Batcher(searcher, BatchLimits(batch=8, wait_s=0.05))
        loop = asyncio.create_task(batcher.run())
        asked = [batcher.ask([f"a{i}", f"b{i}"], 1 + i % 3, "dense" if i % 2 else "bm25") for i in range(10)]
        for i, answer in enumerate(await asyncio.gather(*asked)):
            method = "dense" if i % 2 else "bm25"
            assert [[h.id for h in hits] for hits in answer] == [
                [f"{method}:{name}{i}:{rank}" for rank in range(1 + i % 3)] for name in "ab"
            ]
        assert sum(map(len, searcher.batches)) == 20 and len(searcher.batches) <= 6
        loop.cancel()

    asyncio.run(scenario())


def test_a_full_queue_takes_nothing_and_empties_again() -> None:
    async def scenario() -> None:
        searcher = Searcher()
        searcher.gate.clear()
        batcher = Batcher(searcher, BatchLimits(batch=1, wait_s=0, waiting=3))
        loop = asyncio.create_task(batcher.run())
        first = asyncio.create_task(batcher.ask(["in work"], 1, "dense"))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(batcher.ask(["1", "2"], 1, "dense"))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            await batcher.ask(["3", "4"], 1, "dense")
        assert batcher.waiting == 2
        searcher.gate.set()
        assert len(await first) == 1 and len(await waiting) == 2
        assert len(await batcher.ask(["3", "4"], 1, "dense")) == 2
        loop.cancel()

    asyncio.run(scenario())


def test_an_error_is_its_own_batch_s_answer() -> None:
    async def scenario() -> None:
        batcher = Batcher(Searcher(), BatchLimits(batch=1, wait_s=0))
        loop = asyncio.create_task(batcher.run())
        with pytest.raises(RuntimeError, match="bad query"):
            await batcher.ask(["bad"], 1, "dense")
        assert len(await batcher.ask(["good"], 2, "dense")) == 1
        loop.cancel()

    asyncio.run(scenario())


def test_a_wrong_number_of_results_is_an_error_of_its_own_batch() -> None:
    async def scenario() -> None:
        def search(queries: Sequence[str], topk: int, method: str) -> list[list[Hit]]:
            return [[] for query in queries if query != "lost"]

        batcher = Batcher(search, BatchLimits(batch=2, wait_s=0.05))
        loop = asyncio.create_task(batcher.run())
        with pytest.raises(ValueError, match="the search returned 1 results for 2 queries"):
            await asyncio.wait_for(batcher.ask(["lost", "good"], 1, "dense"), 60)
        assert await asyncio.wait_for(batcher.ask(["good"], 1, "dense"), 60) == [[]]
        loop.cancel()

    asyncio.run(scenario())
