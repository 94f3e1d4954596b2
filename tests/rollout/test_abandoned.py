"""A generation that is abandoned in the middle, because the run is to end."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from skyrl_mega.rollout import generator
from skyrl_mega.rollout.generator import Generator


class Ending(BaseException):
    """The run is to end."""


def test_it_ends_soon_and_nobody_complains_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "LOOK_EVERY_S", 0.01)
    nothing: Any = None
    looks = iter([False, False, True])
    complaints: list[dict[str, Any]] = []

    def look() -> None:
        if next(looks):
            raise Ending

    playing = Generator(nothing, nothing, nothing, nothing, look=look)

    async def phase() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        tasks = [asyncio.create_task(asyncio.sleep(600)) for _ in range(3)]
        try:
            await playing._looking(asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    with pytest.raises(Ending):
        asyncio.run(phase())
    gc.collect()
    assert complaints == []
