"""The background loop of a run survives user code that ends the process."""

from __future__ import annotations

import asyncio
import sys

import pytest

from skyrl_mega.rollout.event_loop import BackgroundLoop


async def end_the_process() -> None:
    sys.exit(3)


async def await_a_task_that_ends_the_process() -> None:
    await asyncio.create_task(end_the_process())


async def answer() -> int:
    return 1


@pytest.mark.parametrize("work", [end_the_process, await_a_task_that_ends_the_process])
def test_a_loop_serves_after_user_code_called_sys_exit(work: object) -> None:
    assert callable(work)
    with BackgroundLoop() as loop:
        with pytest.raises(SystemExit):
            loop.start(work()).result(30)
        assert loop.start(answer()).result(30) == 1
