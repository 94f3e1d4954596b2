"""The session of an agent: replies, limits, stop strings, vanished clients, faults."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.endpoint import contexts
from skyrl_mega.rollout.endpoint.contexts import PREFILL
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
from skyrl_mega.rollout.endpoint.session import MOST_REFUSALS, AgentSession, shown
from skyrl_mega.rollout.journal import Journal
from skyrl_mega.trajectories.trajectory import Status
from tests.support.agents import LIMITS, FakeEngine, pieces_chat
from tests.support.tokenizers import byte_level, directory

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
MORE: dict[str, Any] = {"role": "user", "content": "more"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def run(
    chat: Renderer,
    work: Callable[[AgentSession, FakeEngine], Awaitable[Any]],
    *texts: str,
    limits: TrajectoryLimits = LIMITS,
    seconds: float | None = None,
) -> tuple[AgentSession, FakeEngine]:
    """Runs a coroutine with a session, ends the session and returns session and engine. The policy replies with `texts`
    in order, and then at random."""
    lines = iter(texts)
    random = FakeEngine(chat)

    def text(request: Request, rng: Any) -> str:
        return next(lines, f"line {len(random.started)}")

    engine = replace(random, text=text, started=random.started)

    async def everything() -> AgentSession:
        now = time.perf_counter()
        until = None if seconds is None else now + seconds
        session = AgentSession("r/7", engine, chat, limits, opened_at=now, until=until)  # type: ignore[arg-type]
        await work(session, engine)
        await session.finish()
        return session

    return asyncio.run(everything()), engine


async def settle() -> None:
    """Lets all tasks run until they wait for the engine."""
    for _ in range(20):
        await asyncio.sleep(0)


async def says(session: AgentSession, messages: list[dict[str, Any]], **more: Any) -> PolicyReply:
    (reply,) = await session.reply(ChatRequest(messages, **more))
    return reply


def test_a_reply_is_reused_as_tokens_and_only_new_messages_are_rendered(chat: Renderer) -> None:
    async def work(session: AgentSession, engine: FakeEngine) -> None:
        first = await says(session, [HELLO])
        second = await says(session, [HELLO, shown(first), MORE])
        assert (first.text, first.finish, first.cached_tokens) == ("hello world 123", "stop", 0)
        assert chat.encode("hello world 123") != list(first.tokens[:-1]), "the test needs another tokenisation"
        (asked, completion), (again, _) = engine.asked
        template = chat.tokenizer.apply_chat_template
        assert chat.text(asked.tokens) == template([HELLO], tokenize=False, add_generation_prompt=True)
        context = [*asked.tokens, *completion.tokens]
        assert list(again.tokens[: len(context)]) == context
        messages = [HELLO, {"role": "assistant", "content": "hello world 123"}, MORE]
        assert chat.text(again.tokens) == template(messages, tokenize=False, add_generation_prompt=True)
        assert (second.prompt_tokens, second.cached_tokens) == (len(again.tokens), len(context))
        assert list(second.logprobs) == list(engine.asked[1][1].logprobs)

    session, _ = run(chat, work, "hello world 123")
    assert (session.requests, len(session.tree.conversations()), session.dropped.total()) == (2, 1, 0)


def test_counted_tokens_are_those_that_the_policy_would_read(chat: Renderer) -> None:
    async def work(session: AgentSession, engine: FakeEngine) -> None:
        first = await says(session, [HELLO])
        asked = ChatRequest([HELLO, shown(first), MORE])
        counted = await session.count(asked)
        assert (session.requests, len(engine.asked)) == (1, 1), "counting asks no engine"
        (second,) = await session.reply(asked)
        assert counted == second.prompt_tokens > first.prompt_tokens
        for _ in range(MOST_REFUSALS):
            with pytest.raises(BadRequest):
                await session.count(ChatRequest([]))
        with pytest.raises(SessionEnded):
            await session.count(asked)

    session, _ = run(chat, work)
    assert (session.requests, session.limit, session.dropped.total()) == (2, None, 0)


def test_names_depend_on_the_context_and_not_on_the_order(chat: Renderer) -> None:
    """Sends the same three contexts in two orders, one of them twice."""

    async def ask(session: AgentSession, order: list[str]) -> dict[str, list[tuple[str, int]]]:
        engine = session.router
        assert isinstance(engine, FakeEngine)
        for text in order:
            await says(session, [{"role": "user", "content": text}])
        names: dict[str, list[tuple[str, int]]] = {}
        for text, (request, _) in zip(order, engine.asked, strict=True):
            names.setdefault(text, []).append((request.id, request.seed))
        return names

    seen: list[dict[str, list[tuple[str, int]]]] = []

    async def work(order: list[str], session: AgentSession, engine: FakeEngine) -> None:
        seen.append(await ask(session, order))

    for order in (["a", "b", "a", "c"], ["c", "a", "a", "b"]):
        run(chat, lambda session, engine, order=order: work(order, session, engine))  # type: ignore[misc]
    assert seen[0] == seen[1] and len({name for names in seen[0].values() for name, _ in names}) == 4
    assert all(name.rpartition("/")[0] == "r/7" for names in seen[0].values() for name, _ in names)


def test_a_resumed_agent_gets_the_recorded_replies(chat: Renderer) -> None:
    """Repeats a session with two parallel requests in the other order; the journal knows all requests."""

    async def work(order: list[str], session: AgentSession, engine: FakeEngine) -> None:
        first = await says(session, [HELLO])
        history = [HELLO, shown(first)]
        await asyncio.gather(*(says(session, [*history, {"role": "user", "content": text}]) for text in order))

    _, before = run(chat, lambda session, engine: work(["a", "b"], session, engine), "hello world")
    _, after = run(chat, lambda session, engine: work(["b", "a"], session, engine), "hello world")
    journal = Journal()
    for request, completion in before.asked:
        journal.keep(request, completion)
    assert len(after.started) == 3
    assert all(journal.answer(request) is not None for request in after.started)


def test_a_stop_string_cuts_the_reply_at_the_token_that_completes_it(chat: Renderer) -> None:
    async def work(session: AgentSession, engine: FakeEngine) -> None:
        reply = await says(session, [HELLO], stop=("Observation:", "never"))
        assert (reply.text, reply.finish, reply.stop_string) == ("Thought. ", "stop_string", "Observation:")
        sampled = list(engine.asked[0][1].tokens)
        assert list(reply.tokens) == sampled[: len(reply.tokens)]
        assert "Observation:" in chat.text(reply.tokens) and "Observation:" not in chat.text(reply.tokens[:-1])
        await says(session, [HELLO, shown(reply), MORE])
        context = [*engine.asked[0][0].tokens, *reply.tokens]
        assert list(engine.asked[1][0].tokens[: len(context)]) == context, "dropped tokens are no context"
        assert chat.text(engine.asked[1][0].tokens[len(context) :]).startswith("<|im_end|>\n<|im_start|>user\nmore")

        assert session.limit is None
        cut = await says(session, [MORE], stop=("Observation:",))
        assert (cut.finish, engine.asked[2][1].finish) == ("stop_string", "length")
        assert session.limit is None, "the reply is whole"

    texts = "Thought. Observation: the user said 42", "more", "Thought. Observation:" + " the user said 42" * 20
    session, engine = run(chat, work, *texts)
    kept = sum(len(exchange.tokens) for exchange in session.tree.exchanges)
    assert session.dropped == {"after_stop": sum(len(c.tokens) for _, c in engine.asked) - kept}
    assert session.dropped.total() > 3


def test_thoughts_and_calls_are_read_and_matched(chat: Renderer) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'

    async def work(session: AgentSession, engine: FakeEngine) -> None:
        first = await says(session, [HELLO], tools=[TOOL])
        assert (first.reasoning, first.content) == ("hm", "so:")
        assert [(c.name, c.arguments) for c in first.tool_calls] == [("look", {"at": 3})]
        result = {"role": "tool", "content": "7", "tool_call_id": first.tool_calls[0].id}
        broken = await says(session, [HELLO, shown(first), result], tools=[TOOL])
        assert broken.visible_calls == () and broken.visible_text == '<tool_call>\n{"name": 3}\n</tool_call>'
        await says(session, [HELLO, shown(first), result, shown(broken), MORE], tools=[TOOL])
        assert first.tool_calls[0].id != broken.tool_calls[0].id

    texts = f"<think>\nhm\n</think>\n\nso: {call}", '<tool_call>\n{"name": 3}\n</tool_call>'
    session, _ = run(chat, work, *texts, limits=replace(LIMITS, turn=300))
    assert [exchange.parent is None for exchange in session.tree.exchanges] == [True, False, False]


def test_thoughts_opened_by_the_template_are_thoughts(chat: Renderer, tmp_path: Path) -> None:
    thinker = pieces_chat(tmp_path / "thinker")
    source = thinker.tokenizer.chat_template
    thinker.tokenizer.chat_template = source.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

    async def work(session: AgentSession, engine: FakeEngine) -> None:
        whole, cut = await says(session, [HELLO]), await says(session, [HELLO])
        assert (whole.reasoning, whole.content) == ("hm", "yes")
        assert (cut.reasoning, cut.content) == ("hm, hm", "")

    run(thinker, work, "hm\n</think>\nyes", "hm, hm")


def test_of_replies_that_look_the_same_the_one_with_the_thoughts_is_continued(chat: Renderer) -> None:
    async def work(session: AgentSession, engine: FakeEngine) -> None:
        replies = await session.reply(ChatRequest([HELLO], n=2))
        assert [(reply.reasoning, reply.content) for reply in replies] == [("a", "4"), ("b", "4")]
        second = await says(session, [HELLO, shown(replies[0]), MORE])
        await says(session, [HELLO, shown(replies[0]), MORE, shown(second), MORE])
        await says(session, [HELLO, {"role": "assistant", "content": "4"}, MORE])
        await says(session, [HELLO, {"role": "assistant", "content": "4", "reasoning_content": "c"}, MORE])
        assert session.retokenised == 0
        await says(session, [HELLO, {"role": "assistant", "content": "5"}, MORE])
        assert session.retokenised == 1

    session, _ = run(chat, work, "<think>a</think>4", "<think>b</think>4", "more")
    first, second, *later = session.tree.exchanges
    assert [exchange.parent for exchange in later] == [first, later[0], second, second, None]


def test_several_replies_are_branches_and_the_agent_chooses(chat: Renderer) -> None:
    async def work(session: AgentSession, engine: FakeEngine) -> None:
        replies = await session.reply(ChatRequest([HELLO], n=3))
        assert [reply.text for reply in replies] == ["a", "b", "c"]
        await says(session, [HELLO, shown(replies[1]), MORE])

    session, engine = run(chat, work, "a", "b", "c", limits=replace(LIMITS, turns=2))
    assert (session.requests, len(engine.asked), len(session.tree.conversations())) == (2, 4, 3)
    assert session.tree.exchanges[3].parent is session.tree.exchanges[1]
    for n in (0, 17):
        with pytest.raises(BadRequest, match="allowed is 1 to 16"):
            run(chat, lambda session, engine, n=n: session.reply(ChatRequest([HELLO], n=n)))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "no messages"),
        ([HELLO, {"role": "assistant", "content": "I"}], PREFILL[:30]),
        ([{"role": "referee", "content": "x"}], "role 'referee'; allowed: system"),
        ([{"role": "user", "content": None}], "message 0 has no text"),
        ([{"role": "user", "content": "\ud800"}], "no valid Unicode"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": 3}]}, HELLO], "allowed is"),
    ],
)
def test_requests_that_no_policy_can_answer(chat: Renderer, messages: list[dict[str, Any]], why: str) -> None:
    async def work(session: AgentSession, engine: FakeEngine) -> None:
        with pytest.raises(BadRequest, match=why):
            await session.reply(ChatRequest(messages))
        assert why in session.refusal and session.limit is None

    session, engine = run(chat, work)
    assert (session.requests, engine.started) == (0, [])


def test_limits_bound_every_request(chat: Renderer) -> None:
    longest = len(chat.render([HELLO])) + 10

    async def work(session: AgentSession, engine: FakeEngine) -> None:
        reply = await says(session, [HELLO])
        assert (reply.finish, len(reply.tokens), session.limit) == ("length", 10, Status.TRUNCATED_TOKENS)
        assert not session.refused_by_limit
        with pytest.raises(ContextTooLong, match=f"a sequence has at most {longest}"):
            await says(session, [HELLO, shown(reply), MORE])
        assert session.refused_by_limit
        short = await says(session, [HELLO], max_tokens=3)
        assert (short.finish, len(short.tokens), session.limit) == ("length", 3, None), "the agent's own limit"
        with pytest.raises(TurnLimit, match="its 2 requests"):
            await says(session, [HELLO])
        assert session.limit is Status.TRUNCATED_TURNS
        with pytest.raises(BadRequest, match="allowed is at least 1"):
            await says(session, [HELLO], max_tokens=0)

    run(chat, work, "hello world" * 9, "hello world" * 9, limits=replace(LIMITS, length=longest, turns=2))
    tight = replace(LIMITS, input=len(chat.render([HELLO])) - 1)

    async def long_inputs(session: AgentSession, engine: FakeEngine) -> None:
        reply = await says(session, [HELLO])
        for messages in ([HELLO, shown(reply), MORE], [HELLO]):
            with pytest.raises(ContextTooLong, match=f"a sequence has at most {tight.input}"):
                await says(session, messages)

    run(chat, long_inputs, limits=tight)

    async def short_responses(session: AgentSession, engine: FakeEngine) -> None:
        reply = await says(session, [HELLO])
        assert len(reply.tokens) == 12
        with pytest.raises(ContextTooLong):
            await says(session, [HELLO, shown(reply), MORE])
        assert await says(session, [MORE]), "a new conversation has the whole budget"

    run(chat, short_responses, "hello world" * 9, limits=replace(LIMITS, response=12))


def test_a_client_that_has_gone_leaves_tokens_that_are_dropped_unless_it_asks_again(chat: Renderer) -> None:
    async def work(session: AgentSession, engine: FakeEngine) -> None:
        engine.gate = asyncio.Event()
        gone = [asyncio.create_task(says(session, [message])) for message in (HELLO, HELLO, MORE)]
        await settle()
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        again = asyncio.create_task(says(session, [HELLO]))
        other = asyncio.create_task(says(session, [HELLO], max_tokens=2))
        await settle()
        assert len(engine.started) == 4, "the first request's answer is taken over; another limit is another request"
        engine.gate.set()
        assert list((await again).tokens) == list(engine.asked[0][1].tokens)
        assert len((await other).tokens) == 2
        assert list((await says(session, [HELLO])).tokens) == list(engine.asked[1][1].tokens), "also a finished one"

    session, engine = run(chat, work)
    assert session.requests == len(engine.asked) == 4
    assert session.dropped == {"after_stop": 0, "client_gone": len(engine.asked[2][1].tokens)}


def test_the_end_of_a_session_waits_for_the_engine_and_drops_what_nobody_reads(chat: Renderer) -> None:
    refused: list[BaseException | PolicyReply] = []

    async def work(session: AgentSession, engine: FakeEngine) -> None:
        engine.gate = asyncio.Event()
        waiting = asyncio.create_task(says(session, [HELLO]))
        await settle()
        ending = asyncio.create_task(session.finish())
        await settle()
        assert not ending.done()
        with pytest.raises(SessionEnded):
            await says(session, [MORE])
        engine.gate.set()
        refused.extend(await asyncio.gather(waiting, return_exceptions=True))
        await ending

    session, engine = run(chat, work)
    assert isinstance(refused[0], SessionEnded) and session.tree.exchanges == []
    assert session.dropped == {"after_end": len(engine.asked[0][1].tokens)}


def test_time_ends_a_session(chat: Renderer) -> None:
    async def late(session: AgentSession, engine: FakeEngine) -> None:
        with pytest.raises(SessionEnded, match="trajectory_timeout_s"):
            await says(session, [HELLO])
        assert session.limit is Status.TRUNCATED_TIME and engine.started == []

    run(chat, late, seconds=0.0)

    async def cut(session: AgentSession, engine: FakeEngine) -> None:
        async def timeout(request: Request) -> Completion:
            assert request.seconds is not None and 0 < request.seconds <= 50
            return Completion(request.id, [1, 2], [0.0, 0.0], "timeout", ((0, 0),))

        engine.generate = timeout  # type: ignore[method-assign]
        with pytest.raises(SessionEnded):
            await says(session, [HELLO])

    session, _ = run(chat, cut, seconds=50.0)
    assert session.limit is Status.TRUNCATED_TIME and session.dropped == {"out_of_time": 2}


def test_a_fault_that_is_not_the_agents_is_raised_at_the_end(chat: Renderer) -> None:
    fault = ActorFailed("engine", 0, "generate_many", "out of memory")

    async def work(session: AgentSession, engine: FakeEngine) -> None:
        async def fail(request: Request) -> Completion:
            raise fault

        engine.generate = fail  # type: ignore[method-assign]
        with pytest.raises(SessionEnded):
            await says(session, [HELLO])
        with pytest.raises(SessionEnded):
            await says(session, [MORE])
        assert session.failed.done()

    with pytest.raises(ActorFailed) as raised:
        run(chat, work)
    assert raised.value is fault


def test_tokens_are_continued_as_they_are(chat: Renderer) -> None:
    async def work(session: AgentSession, engine: FakeEngine) -> None:
        (first,) = await session.reply(TokenRequest(chat.encode("hello")))
        tokens = [*chat.encode("hello"), *first.tokens, *chat.encode(" 42")]
        (second,) = await session.reply(TokenRequest(tokens, max_tokens=2))
        assert list(engine.asked[1][0].tokens) == tokens and len(second.tokens) == 2
        assert second.cached_tokens == len(chat.encode("hello")) + len(first.tokens)
        await session.reply(TokenRequest(tokens[:-3]))
        for wrong in ([], [-1], [10**6]):
            with pytest.raises(BadRequest, match="below"):
                await session.reply(TokenRequest(wrong))

    session, _ = run(chat, work)
    assert [exchange.parent is None for exchange in session.tree.exchanges] == [True, False, True]


def test_parallel_requests_count_their_time_once(chat: Renderer) -> None:
    async def work(session: AgentSession, engine: FakeEngine) -> None:
        engine.gate = asyncio.Event()
        asked = [asyncio.create_task(says(session, [message])) for message in (HELLO, MORE)]
        await asyncio.sleep(0.5)
        engine.gate.set()
        await asyncio.gather(*asked)

    session, _ = run(chat, work)
    both = sum(exchange.generate_s for exchange in session.tree.exchanges)
    assert 0.4 < session.generating_s < both - 0.2


def test_a_long_text_is_rendered_beside_the_event_loop(chat: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    render = chat.render

    def recorded(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return render(*args, **options)

    monkeypatch.setattr(chat, "render", recorded)
    long = {"role": "user", "content": "hello " * contexts.LONG_TEXT}

    async def work(session: AgentSession, engine: FakeEngine) -> None:
        await says(session, [HELLO])
        with pytest.raises(ContextTooLong):
            await says(session, [long])
        asked = asyncio.create_task(says(session, [long]))
        await settle()
        session.end()
        with pytest.raises(RequestError):
            await asked

    session, engine = run(chat, work)
    assert threads == [True, False, False] and session.requests == len(engine.started) == 1


def test_too_many_refused_requests_end_a_session(chat: Renderer) -> None:
    async def work(session: AgentSession, engine: FakeEngine) -> None:
        for _ in range(MOST_REFUSALS):
            with pytest.raises(BadRequest):
                await says(session, [])
        with pytest.raises(SessionEnded, match="there are no messages"):
            await says(session, [HELLO])

    session, engine = run(chat, work)
    assert engine.started == [] and session.limit is None


@pytest.mark.parametrize(("shows", "why"), [(False, "shows no tools"), (True, "in a form that is not known")])
def test_tools_that_the_template_cannot_offer_are_refused(tmp_path: Path, shows: bool, why: str) -> None:
    template = ("{{ tools | tojson }}" if shows else "") + (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = directory(tmp_path / "plain", byte_level(), template, eos_token="<|im_end|>", model={"eos_token_id": None})

    async def work(session: AgentSession, engine: FakeEngine) -> None:
        with pytest.raises(BadRequest, match=why):
            await says(session, [HELLO], tools=[TOOL])
        await says(session, [HELLO])

    run(Renderer(str(path)), work)


def test_every_refusal_is_a_request_error() -> None:
    for error in (BadRequest, ContextTooLong, TurnLimit, SessionEnded):
        assert issubclass(error, RequestError)
