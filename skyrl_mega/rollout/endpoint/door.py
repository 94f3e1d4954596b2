"""The way from the server's thread to the session of a trajectory in the event loop of the rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from skyrl_mega.rollout.endpoint.dialect import PolicyFault, TooManyRequests
from skyrl_mega.rollout.endpoint.openai_responses import ResponseHistory
from skyrl_mega.rollout.endpoint.requests import (
    ChatRequest,
    EndpointSession,
    PolicyReply,
    RequestError,
    SessionEnded,
    TokenRequest,
)

Answer = TypeVar("Answer")
AT_ONCE = 64
"""Most requests of a trajectory under way at once."""
BYTES_AT_ONCE = 32 * 2**20
"""Most bytes of the bodies of these requests."""
ENDED = "the trajectory has ended; its key is no longer valid"


class AgentDoor:
    """The requests of a trajectory, from any thread.

    Args:
        session: Answers the requests.
        loop: Event loop in which the session's methods run.
    """

    def __init__(self, session: EndpointSession, loop: asyncio.AbstractEventLoop) -> None:
        self._session, self._loop = session, loop
        self._ended = False
        self._under_way: set[Future[Any]] = set()
        self._at_close: list[Callable[[], object]] = []
        self.history = ResponseHistory()
        self._entered, self._bytes = 0, 0

    @contextmanager
    def enter(self) -> Iterator[Callable[[int], None]]:
        """Counts a request as under way while the `with` block runs. Yields a function that takes the size in bytes of
        each received part of the request's body and counts the part until the block ends.

        Raises:
            TooManyRequests: `AT_ONCE` requests are under way. The yielded function raises this error if the bodies of
                the requests under way exceed `BYTES_AT_ONCE`.
        """
        if self._entered >= AT_ONCE:
            raise TooManyRequests(f"{AT_ONCE} requests of this trajectory are under way; send fewer at once")
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._bytes + size > BYTES_AT_ONCE:
                raise TooManyRequests(f"requests of {BYTES_AT_ONCE} bytes are under way; send fewer at once")
            taken += size
            self._bytes += size

        self._entered += 1
        try:
            yield take
        finally:
            self._entered -= 1
            self._bytes -= taken

    def submit(self, request: ChatRequest | TokenRequest) -> Future[list[PolicyReply]]:
        """Starts a request in the loop of the rollouts and returns the future of its replies; does not wait. Cancelling
        the future cancels the session's method. After `close`, the future is cancelled.

        Raises:
            SessionEnded: The loop is closed.
        """
        return self._start(self._answer(request))

    def count(self, request: ChatRequest) -> Future[int]:
        """Starts counting the tokens of a request's context in the loop of the rollouts and returns the future of the
        number; does not wait. After `close`, the future is cancelled. Raises SessionEnded if the loop is closed."""
        return self._start(self._count(request))

    def _start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:  # the loop is closed
            work.close()
            raise SessionEnded(ENDED) from error
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        if self._ended:
            future.cancel()
        return future

    async def _answer(self, request: ChatRequest | TokenRequest) -> list[PolicyReply]:
        if self._ended:
            raise SessionEnded(ENDED)
        return await self._session.reply(request)

    async def _count(self, request: ChatRequest) -> int:
        if self._ended:
            raise SessionEnded(ENDED)
        return await self._session.count(request)

    def at_close(self, function: Callable[[], object]) -> None:
        """Calls the function when the door is closed; calls it at once if the door is already closed."""
        self._at_close.append(function)
        if self._ended:
            function()

    def close(self) -> None:
        """Refuses further requests, cancels the requests under way, and calls the functions of `at_close`. Called in
        the loop of the rollouts, `close` also keeps submitted requests from starting."""
        self._ended = True
        for future in list(self._under_way):
            future.cancel()
        for function in list(self._at_close):
            function()


def result_of(future: asyncio.Future[Answer]) -> Answer:
    """Returns the result of a finished request: its replies, or its number of tokens.

    Raises:
        RequestError: The session refuses the request; `SessionEnded` after the end of the door, `PolicyFault` for any
            other exception.
    """
    try:
        return future.result()
    except RequestError:
        raise
    except asyncio.CancelledError as error:
        raise SessionEnded(ENDED) from error
    except Exception as error:  # the session reports it with the trajectory
        raise PolicyFault("the policy cannot answer; the run reports why") from error
