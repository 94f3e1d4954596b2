"""The session of a trajectory: answers an agent's requests with the policy, and keeps every exchange as tokens.

The policy's text is never tokenised again: a request repeating an earlier conversation continues the conversation's
tokens (`graph.RequestTree`), and only the new messages are rendered.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.base import Message
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.agent.seeds import stream_seed
from skyrl_mega.rollout.endpoint import contexts
from skyrl_mega.rollout.endpoint.contexts import Context
from skyrl_mega.rollout.endpoint.graph import AgentExchange, RequestTree
from skyrl_mega.rollout.endpoint.replies import cut_at_stop, parse_reply, thoughts_are_open
from skyrl_mega.rollout.endpoint.requests import (
    BadRequest,
    ChatRequest,
    ContextTooLong,
    PolicyReply,
    RequestError,
    SessionEnded,
    TokenRequest,
    TurnLimit,
)
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.trajectories.trajectory import Status

MOST_REPLIES = 16
"""Most replies to a request."""
MOST_REFUSALS = 100
"""Most refused requests of a session: an agent that goes on is not listening, and each refusal costs time."""


class OutOfTime(SessionEnded):
    """The time of the trajectory is over."""

    def __init__(self) -> None:
        super().__init__("the time of the trajectory is over (rollout.trajectory_timeout_s)")


LIMITS: dict[type[RequestError], Status] = {
    ContextTooLong: Status.TRUNCATED_TOKENS,
    TurnLimit: Status.TRUNCATED_TURNS,
    OutOfTime: Status.TRUNCATED_TIME,
}
"""Refusal → status of a trajectory ending with this refusal."""


@dataclass(frozen=True)
class Answer:
    """The engines' completions of a request."""

    completions: list[Completion]
    names: list[str]
    """Name of each completion, without the trajectory's; a completion's `id` may have an ending of a router."""
    at_s: float
    """Seconds from the trajectory's opening to the request."""
    generate_s: float
    """Seconds from the request to the last completion."""


@dataclass(frozen=True)
class Asked:
    """The properties by which two requests are the same."""

    context: bytes
    """The tokens of the context."""
    most: int
    """Most tokens of a reply."""
    stop: tuple[str, ...]
    n: int


class AgentSession:
    """The requests of a trajectory (`requests.EndpointSession`). Lives in the event loop of the rollouts.

    Args:
        name: Name of the trajectory, the source of the requests' names and random streams.
        router: Sends requests to the engines.
        renderer: Tokenizer and chat template.
        limits: Limits of the trajectory.
        opened_at: `time.perf_counter()` at the trajectory's opening.
        until: `time.perf_counter()` at the end of the trajectory's time; None sets no limit.
    """

    def __init__(
        self,
        name: str,
        router: Router,
        renderer: Renderer,
        limits: TrajectoryLimits,
        *,
        opened_at: float,
        until: float | None = None,
    ) -> None:
        self.name, self.router, self.renderer, self.limits = name, router, renderer, limits
        self.opened_at, self.until = opened_at, until
        self.tree = RequestTree()
        self.requests = 0
        """Number of requests sent to the engines; several replies to a request count once."""
        self.ignored = 0
        """Number of parameters given by the agent and not followed by the run."""
        self.dropped: Counter[str] = Counter()
        """Reason → number of sampled tokens outside the tree: `after_stop` (after a stop string), `client_gone` (the
        client did not wait for the reply), `after_end` (the agent had ended), `out_of_time`."""
        self.limit: Status | None = None
        """Status of the limit met by the latest request; None if the latest request was answered in full."""
        self.refused_by_limit = False
        """True if the limit refused the latest request, rather than cutting the reply."""
        self.refusal = ""
        """Text of the latest refused request."""
        self.refused = 0
        """Number of refused requests."""
        self.retokenised = 0
        """Number of assistant messages rendered as text, as no exchange is their reply: few-shot examples, a rewritten
        history, a reply that came back changed."""
        self.generating_s = 0.0
        """Seconds with at least one request waiting for the policy."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises the first fault of the run rather than of the agent, such as a missing engine; pending without one."""
        self._ended = False
        self._named: Counter[str] = Counter()
        """Digest of a context → number of replies named after the context."""
        self._tasks: dict[asyncio.Task[Answer], Asked] = {}
        """Requests with tokens neither in the tree nor dropped yet."""
        self._abandoned: list[asyncio.Task[Answer]] = []
        """The requests of `_tasks` without a waiting client, in order."""
        self._working, self._working_since = 0, 0.0

    async def reply(self, request: ChatRequest | TokenRequest) -> list[PolicyReply]:
        """Answers a request with `request.n` replies and adds the exchanges to `tree`. If the caller is cancelled, the
        tokens are dropped, unless the same request comes again.

        Raises:
            RequestError: The request cannot be answered: `BadRequest`, `ContextTooLong`, `TurnLimit`, or
                `SessionEnded`, also after a fault of the run (`failed`).
        """
        try:
            return await self._replies(request)
        except RequestError as error:
            self.refusal = str(error)
            self.refused += 1
            if (limit := LIMITS.get(type(error))) is not None and not self._ended:
                self.limit, self.refused_by_limit = limit, True
            raise
        except Exception as error:  # no fault of the agent: raised again by `failed`, and ends the trajectory
            self._fail(error)
            raise SessionEnded("the run cannot answer any more") from error

    async def count(self, request: ChatRequest) -> int:
        """Returns the number of tokens that the policy would read for a chat request. Neither counts as a request nor
        ends at a limit of the trajectory.

        Raises:
            RequestError: The context cannot be made (`BadRequest`, `ContextTooLong`), or the session ended
                (`SessionEnded`).
            UserError: The chat template leaves out the assistant's words.
        """
        self._check_open()
        try:
            context = await self._context(request)
        except RequestError as error:
            self.refusal, self.refused = str(error), self.refused + 1
            raise
        return len(context.between) + (context.parent.length if context.parent else 0)

    def end(self) -> None:
        """Refuses further requests, and drops the tokens of all requests not answered yet."""
        self._ended = True

    async def finish(self) -> None:
        """Ends the session, waits without limit for the engines' answers to all earlier requests, and counts the tokens
        of replies that no client received as dropped.

        Raises:
            Exception: A fault of the run rather than of the agent, as in `failed`.
        """
        self.end()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for task in [*self._tasks]:
            self._drop(task, "client_gone" if task in self._abandoned else "after_end")
        if self.failed.done():
            self.failed.result()

    def abort(self) -> None:
        """Ends the session and cancels its requests under way without waiting for the engines, because the trajectory
        is abandoned."""
        self.end()
        for task in self._tasks:
            task.cancel()

    async def _replies(self, request: ChatRequest | TokenRequest) -> list[PolicyReply]:
        n = request.n
        self._check_open()
        if not 1 <= n <= MOST_REPLIES:
            raise BadRequest(f"n is {n}; allowed is 1 to {MOST_REPLIES}")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise BadRequest(f"the most tokens of a reply are {request.max_tokens}; allowed is at least 1")
        self.ignored += len(request.ignored)
        context = await self._context(request)
        self._check_open()
        room, tokens = self._room(context), context.tokens()
        most = room if request.max_tokens is None else min(room, request.max_tokens)
        asked = Asked(tokens.tobytes(), most, tuple(request.stop), n)
        task = self._abandoned_task(asked) or self._start(context, tokens, asked)
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task in self._tasks and not task.cancelled() and not self._ended:
                self._abandoned.append(task)
            raise
        if self._ended:
            self._drop(task, "after_end")
            self._check_open()
        if any(completion.finish == "timeout" for completion in answer.completions):
            self._drop(task, "out_of_time")
            raise OutOfTime
        self._tasks.pop(task)
        replies = [self._reply(context, tokens, answer, place, request.stop) for place in range(n)]
        cut_by_run = most == room and any(reply.finish == "length" for reply in replies)
        self.limit, self.refused_by_limit = (Status.TRUNCATED_TOKENS if cut_by_run else None), False
        return replies

    def _check_open(self) -> None:
        """Raises SessionEnded after the end of the session, after too many refusals, or after the trajectory's time."""
        if self._ended:
            raise SessionEnded("the trajectory has ended")
        if self.refused >= MOST_REFUSALS:
            raise SessionEnded(f"the trajectory has had {MOST_REFUSALS} requests refused, the last: {self.refusal}")
        if self._seconds_left() == 0:
            raise OutOfTime

    def _seconds_left(self) -> float | None:
        return None if self.until is None else max(0.0, self.until - time.perf_counter())

    async def _context(self, request: ChatRequest | TokenRequest) -> Context:
        if isinstance(request, TokenRequest):
            return await contexts.of_tokens(request, self.tree, self.renderer)
        # The samples of a prompt often begin with the same messages; later requests hardly repeat.
        return await contexts.of_messages(request, self.tree, self.renderer, cached=not self.requests)

    def _room(self, context: Context) -> int:
        """Returns the most tokens of a reply under the limits of a turn, of the sequence, and of the conversation's
        tokens after its first context.

        Raises:
            ContextTooLong: The context leaves no room, or exceeds `rollout.max_input_tokens` after a first reply.
        """
        parent, limits = context.parent, self.limits
        length = len(context.between) + (parent.length if parent else 0)
        opening = parent.opening if parent else length
        if self.tree.exchanges and limits.input is not None and length > limits.input:
            raise ContextTooLong(length, limits.input)
        most = min(limits.length, opening + limits.response)
        if length >= most:
            raise ContextTooLong(length, most)
        return min(limits.turn, most - length)

    def _abandoned_task(self, asked: Asked) -> asyncio.Task[Answer] | None:
        """Returns the earliest of the same requests without a waiting client, for a client trying again; None without
        such a request."""
        for task in self._abandoned:
            if self._tasks[task] == asked:
                self._abandoned.remove(task)
                return task
        return None

    def _start(self, context: Context, tokens: array[int], asked: Asked) -> asyncio.Task[Answer]:
        """Sends a request to the engines, once for each of its replies, and returns the task of the answer.

        Raises:
            TurnLimit: The trajectory has used all of its requests.
        """
        if self.requests >= self.limits.turns:
            raise TurnLimit(f"the trajectory has used its {self.limits.turns} requests (rollout.max_turns)")
        self.requests += 1
        self.retokenised += sum(message["role"] == "assistant" for message in context.messages)
        digest = hashlib.blake2b(asked.context, digest_size=8).hexdigest()
        left, routes_from, requests = self._seconds_left(), context.routes_from(), []
        for _ in range(asked.n):
            name = f"{self.name}/{digest}-{self._named[digest]}"
            self._named[digest] += 1
            requests.append(Request(name, tokens, asked.most, stream_seed(name), left, routes_from))
        task = asyncio.create_task(self._generate(requests))
        self._tasks[task] = asked
        task.add_done_callback(self._note_fault)
        return task

    async def _generate(self, requests: list[Request]) -> Answer:
        began = time.perf_counter()
        if not self._working:
            self._working_since = began
        self._working += 1
        try:
            completions = await asyncio.gather(*map(self.router.generate, requests))
        finally:
            now = time.perf_counter()
            self._working -= 1
            if not self._working:
                self.generating_s += now - self._working_since
        names = [request.id.rpartition("/")[2] for request in requests]
        return Answer(completions, names, began - self.opened_at, now - began)

    def _note_fault(self, task: asyncio.Task[Answer]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._ended = True
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # marks the exception as retrieved: an abandoned trajectory never raises it

    def _drop(self, task: asyncio.Task[Answer], reason: str) -> None:
        """Counts the tokens of an ended request as dropped, unless counted before."""
        if self._tasks.pop(task, None) is not None and not task.cancelled() and task.exception() is None:
            self.dropped[reason] += sum(len(completion.tokens) for completion in task.result().completions)

    def _reply(
        self, context: Context, tokens: array[int], answer: Answer, place: int, stop: Sequence[str]
    ) -> PolicyReply:
        """Adds the answer's completion at an index to the tree and returns the reply for the agent."""
        completion, id = answer.completions[place], answer.names[place]
        kept, text, stop_string = cut_at_stop(completion.tokens, stop, self.renderer)
        self.dropped["after_stop"] += len(completion.tokens) - kept
        digest, _, number = id.partition("-")
        thinking = thoughts_are_open(tokens, self.renderer)
        reasoning, message = parse_reply(text, self.renderer, int(digest, 16) * 1000 + int(number), thinking=thinking)
        parent = context.parent
        exchange = AgentExchange(
            parent,
            context.messages,
            context.between,
            array("i", completion.tokens[:kept]),
            array("f", completion.logprobs[:kept]),
            versions=[(version, first) for version, first in completion.versions if first < kept],
            reply={"role": "assistant", "content": text},
            finish=completion.finish if stop_string is None else "stop",
            routes=context.routes(completion, kept),
            tools=context.tools,
            tool_calls=[{"name": call.name, "arguments": call.arguments} for call in message.tool_calls],
            at_s=answer.at_s,
            generate_s=answer.generate_s,
        )
        reply = PolicyReply(
            id=id,
            text=text,
            reasoning=reasoning,
            content=message.content,
            tool_calls=message.tool_calls,
            tokens=exchange.tokens,
            logprobs=exchange.logprobs,
            finish=completion.finish if stop_string is None else "stop_string",
            stop_string=stop_string,
            prompt_tokens=len(tokens),
            cached_tokens=parent.length if parent else 0,
        )
        self.tree.add(exchange, context.request, shown(reply))
        return reply


def shown(reply: PolicyReply) -> Message:
    """Returns a reply as an assistant message, as the agent sees and repeats it; `reasoning_content` is the thoughts,
    which an agent may leave out."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in reply.visible_calls]
    thoughts = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    return {"role": "assistant", "content": reply.visible_text, "tool_calls": calls, **thoughts}
