"""The number of concurrent environment calls follows the setting."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.config.schema import Config, EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.evaluate.endpoint import MessageAgent
from skyrl_mega.rollout.agent import env_pool
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import Call, EnvPool
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generator import Generator

NOTHING: Any = None


def at_once(threads: EnvPool, calls: int) -> int:
    """Returns the largest number of calls running at the same time."""
    lock, running, most = threading.Lock(), 0, 0

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.2)
        with lock:
            running -= 1

    async def all_of_them() -> None:
        await asyncio.gather(*(threads.run(Call(work), 600) for _ in range(calls)))

    asyncio.run(all_of_them())
    return most


def of_engines(chat: Renderer, environments: EnvironmentConfig) -> Agent:
    fleet: Any = SimpleNamespace(serving=[])
    return Generator(fleet, chat, RolloutConfig(), environments).player(SamplingConfig())  # type: ignore[return-value]


def of_an_endpoint(chat: Renderer, environments: EnvironmentConfig) -> Agent:
    client: Any = SimpleNamespace(sampling=SimpleNamespace(max_tokens=8))
    return MessageAgent(client, Config(environment=environments))


@pytest.mark.parametrize("agent", [of_engines, of_an_endpoint])
@pytest.mark.parametrize("workers", [1, 3])
def test_as_many_as_the_setting_says(agent: Any, workers: int, characters_chat: Renderer) -> None:
    assert at_once(agent(characters_chat, EnvironmentConfig(workers=workers)).threads, 3 * workers) == workers


def test_after_a_slow_inline_call_environments_run_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_pool, "INLINE_S", 0.05)

    async def threads() -> list[int]:
        pool = EnvPool(4)
        used = [await pool.run(Call(threading.get_ident), 60, inline=True)]
        await pool.run(Call(time.sleep, 0.06), 60, inline=True)
        return [*used, await pool.run(Call(threading.get_ident), 60, inline=True)]

    first, later = asyncio.run(threads())
    assert first == threading.get_ident() != later
