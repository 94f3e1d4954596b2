"""Requests during a weight sync, as in asynchronous runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.engines.base import Completion, Request, Sampling
from tests.support.engines import spec_of
from tests.support.simulated_engine import SimulatedEngine


def test_a_request_in_a_sync_waits_for_its_end(tmp_path: Path) -> None:
    """Sends a request to an idle, paused engine: without the pause, the engine would compute with half-updated
    weights."""
    (tmp_path / "config.json").write_text("{}")

    async def asked_while_paused() -> tuple[int, list[Completion]]:
        engine = SimulatedEngine(spec_of(tmp_path, RolloutConfig()), places=4, token_s=0.001)
        await engine.start()
        await engine.pause()

        async def answers() -> list[Completion]:
            stream = engine.generate_many([Request("late", [1, 2], 3, seed=0)], Sampling())
            return [completion async for some in stream for completion in some]

        asking = asyncio.create_task(answers())
        await asyncio.sleep(0.1)
        assert not asking.done()
        simulated: Any = engine.llm
        computed: int = simulated.given
        await engine.resume()
        return computed, await asyncio.wait_for(asking, 5)

    computed, completions = asyncio.run(asked_while_paused())
    assert computed == 0, "it computed while weights were written"
    assert [len(completion.tokens) for completion in completions] == [3]
