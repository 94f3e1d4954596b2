"""Actors of `benchmarks.elastic`: engines whose tokens take a fixed time, and policy ranks that send nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from skyrl_mega.engines.base import Completion, Facts, Request, Sampling
from skyrl_mega.engines.presence import NotReady

TOKEN = 7
PIECE = 8
"""Most tokens between two looks for a pause."""


class SleepEngine:
    """An engine whose sequences each get a token every `token_s`; at most `places` sequences run at once.

    Args:
        token_s: Seconds per token.
        places: Sequences that run at once.
        start_s: Seconds to start.
    """

    def __init__(self, token_s: float, places: int, start_s: float = 0.0) -> None:
        self.token_s, self.places, self.start_s = token_s, asyncio.Semaphore(places), start_s
        self.version, self.under_way, self.defined = 0, 0, False
        self.running = asyncio.Event()
        self.running.set()

    async def start(self, former: Facts | None = None) -> Facts:
        await asyncio.sleep(self.start_s)
        return Facts(cache_tokens=10**6, cache_bytes=1)

    async def generate_many(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[list[Completion]]:
        if not self.defined:
            raise NotReady("no weights yet")
        self.under_way += len(requests)
        tasks = {asyncio.create_task(self._generate(request)) for request in requests}
        try:
            while tasks:
                ended, tasks = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
                yield [task.result() for task in ended]
        finally:
            self.under_way -= len(requests)
            for task in tasks:
                task.cancel()

    async def _generate(self, request: Request) -> Completion:
        versions: list[tuple[int, int]] = []
        async with self.places:
            written = 0
            while written < request.max_tokens:
                await self.running.wait()
                if not versions or versions[-1][0] != self.version:
                    versions.append((self.version, written))
                piece = min(PIECE, request.max_tokens - written)
                await asyncio.sleep(piece * self.token_s)
                written += piece
        return Completion(request.id, [TOKEN] * written, [-1.0] * written, "stop", tuple(versions))

    async def forget(self) -> None:
        """Does nothing: there is no cache."""

    async def drain(self) -> None:
        while self.under_way:
            await asyncio.sleep(0.1)

    async def connect_weights(self, info: dict[str, Any]) -> None:
        await asyncio.sleep(0.05)

    async def begin_update(self) -> None:
        self.running.clear()

    async def update_weights(self, checksums: bool) -> None:
        self.defined = False
        await asyncio.sleep(0.05)

    async def end_update(self, version: int) -> list[dict[str, float]]:
        self.version, self.defined = version, True
        self.running.set()
        return [{}]

    async def abandon_update(self) -> None:
        self.defined = False

    async def probe(self) -> None:
        """Does nothing: the engine lives."""


class QuietPolicy:
    """A policy rank that sends no weights."""

    async def connect_weights(self, info: dict[str, Any]) -> None:
        await asyncio.sleep(0.05)

    async def send_weights(self, checksums: bool) -> Any:
        from skyrl_mega.weights.exchange.executor import ExchangeReport

        await asyncio.sleep(0.05)
        return ExchangeReport()

    async def disconnect_weights(self) -> None:
        """Does nothing: there is no connection."""
