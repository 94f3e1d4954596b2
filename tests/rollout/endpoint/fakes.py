"""Sessions with scripted answers, and an event loop in place of the rollouts'."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from skyrl_mega.envs.tool_calls import ToolCall
from skyrl_mega.rollout.endpoint.requests import ChatRequest, PolicyReply, TokenRequest

PLAIN = PolicyReply("r1", "Hello, Ada.", "", "Hello, Ada.", (), [11, 12, 2], [-0.25, -1.5, -0.125], "stop", None, 40, 8)
CALLS = replace(
    PLAIN,
    text='I look.\n<tool_call>{"name": "look", "arguments": {"at": "ü"}}</tool_call>',
    content="I look.",
    tool_calls=(ToolCall("call_1_1", "look", {"at": "ü"}), ToolCall("call_1_2", "count", {"to": [1, 2.5]})),
)
THOUGHT = replace(PLAIN, text="<think>\nHm.\n</think>\n\nYes.", reasoning="Hm.", content="Yes.")
CUT = replace(PLAIN, finish="length")
STOPPED = replace(PLAIN, finish="stop_string", stop_string="Ada")
UNREADABLE = replace(
    PLAIN,
    text="<think>\nHm.\n</think>\n\nSo: <tool_call>{oops</tool_call>",
    reasoning="Hm.",
    content="So:",
    tool_calls=(ToolCall("call_1_1", error="the call is not JSON"),),
)
REPLIES = {
    "plain": PLAIN,
    "calls": CALLS,
    "only_calls": replace(CALLS, content=""),
    "thought": THOUGHT,
    "cut": CUT,
    "stopped": STOPPED,
    "unreadable": UNREADABLE,
}


class ScriptedSession:
    """A session with the same answer to every request: a reply, or an exception.

    Args:
        answer: The answer.
        held: True if requests wait for `release`.
    """

    def __init__(self, answer: PolicyReply | Exception = PLAIN, held: bool = False) -> None:
        self.answer = answer
        self.requests: list[ChatRequest | TokenRequest] = []
        self.cancelled = 0
        self.started, self.ended = threading.Semaphore(0), threading.Semaphore(0)
        self._held = held
        self._released: asyncio.Event | None = None

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets all waiting requests go on."""
        self._held = False
        if self._released is not None:
            loop.call_soon_threadsafe(self._released.set)

    async def reply(self, request: ChatRequest | TokenRequest) -> list[PolicyReply]:
        """Returns `request.n` replies, or raises the exception."""
        return [await self._answer(request)] * request.n

    async def count(self, request: ChatRequest) -> int:
        """Returns the number of messages, or raises the exception."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return len(request.messages)

    async def _answer(self, request: ChatRequest | TokenRequest) -> PolicyReply:
        self.requests.append(request)
        if self._released is None:
            self._released = asyncio.Event()
        self.started.release()
        try:
            if self._held:
                await self._released.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.ended.release()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yields an event loop of another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()
