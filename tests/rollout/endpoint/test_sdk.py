"""The unmodified SDKs of OpenAI and Anthropic at the endpoint, streamed and not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest

from skyrl_mega.envs.agent import AgentEndpoint
from skyrl_mega.rollout.endpoint import app
from skyrl_mega.rollout.endpoint.requests import (
    BadRequest,
    ContextTooLong,
    EndpointSession,
    RequestError,
    SessionEnded,
    TurnLimit,
)
from tests.rollout.endpoint.fakes import CALLS, PLAIN, REPLIES, ScriptedSession

Opened = Callable[[EndpointSession], AgentEndpoint]
USER: Any = {"role": "user", "content": "hi"}
PARAMETERS: Any = {"type": "object", "properties": {}}
TOOL: Any = {"type": "function", "function": {"name": "look", "description": "d", "parameters": PARAMETERS}}
EXPECTED_TOOL = [TOOL]


CLIENTS = openai.OpenAI(api_key="-"), anthropic.Anthropic(api_key="-")
"""Clients whose connections all tests share: a TLS context takes 0.1 s."""


def clients(endpoint: AgentEndpoint) -> tuple[openai.OpenAI, anthropic.Anthropic]:
    variables = endpoint.variables()
    return (
        CLIENTS[0].with_options(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"]),
        CLIENTS[1].with_options(base_url=variables["ANTHROPIC_BASE_URL"], api_key=variables["ANTHROPIC_API_KEY"]),
    )


@pytest.fixture(params=list(REPLIES))
def scripted(request: pytest.FixtureRequest) -> ScriptedSession:
    return ScriptedSession(REPLIES[request.param])


def check_turn(session: ScriptedSession) -> None:
    """Checks that a second request repeats the reply as shown, followed by tool results or a message."""
    first, second = session.requests
    reply = session.answer
    assert first.messages == [USER] and first.tools == EXPECTED_TOOL and first.ignored == ()
    spoken = second.messages[1]
    assert spoken["role"] == "assistant" and spoken["content"] == reply.visible_text
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in spoken.get("tool_calls", [])
    ]
    assert calls == [(call.id, call.name, call.arguments) for call in reply.visible_calls]
    results = [{"role": "tool", "content": "ok", "tool_call_id": call.id} for call in reply.visible_calls]
    assert second.messages[2:] == (results or [{"role": "user", "content": "ok"}])


@pytest.mark.parametrize("stream", [False, True])
def test_chat(opened: Opened, scripted: ScriptedSession, stream: bool) -> None:
    client, _ = clients(opened(scripted))
    reply = scripted.answer
    asked: Any = {"model": "any", "tools": [TOOL], "logprobs": True}
    if stream:
        usage = {"include_usage": True}
        with client.chat.completions.stream(messages=[USER], stream_options=usage, **asked) as events:
            for _ in events:
                pass
            completion: Any = (
                events.get_final_completion() if reply.finish != "length" else events.current_completion_snapshot
            )
    else:
        completion = client.chat.completions.create(messages=[USER], **asked)
    choice = completion.choices[0]
    assert (choice.message.content or "") == reply.visible_text
    assert getattr(choice.message, "reasoning_content", "") == reply.reasoning
    assert [entry.logprob for entry in choice.logprobs.content] == reply.logprobs
    assert completion.usage.prompt_tokens == 40 and completion.usage.completion_tokens == 3
    calls = choice.message.tool_calls or []
    repeated: Any = {"role": "assistant", "content": choice.message.content}
    if calls:
        repeated["tool_calls"] = [call.model_dump(exclude={"index"}) for call in calls]
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
    further = results or [{"role": "user", "content": "ok"}]
    client.chat.completions.create(model="any", messages=[USER, repeated, *further])
    check_turn(scripted)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(opened: Opened, scripted: ScriptedSession, stream: bool) -> None:
    client, _ = clients(opened(scripted))
    reply = scripted.answer
    asked: Any = {"model": "any", "tools": [{"type": "function", **TOOL["function"], "strict": False}]}
    if stream:
        with client.responses.stream(input=[USER], **asked) as events:
            seen: Any = list(events)
        response = seen[-1].response
    else:
        response = client.responses.create(input=[USER], **asked)
    assert response.output_text == reply.visible_text
    assert response.status == ("incomplete" if reply.finish == "length" else "completed")
    assert response.usage.total_tokens == 43
    calls = [item for item in response.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    further = results or [{"role": "user", "content": "ok"}]
    client.responses.create(model="any", input=[USER, *response.output, *further])
    check_turn(scripted)
    client.responses.create(model="any", previous_response_id=response.id, input=further)
    assert scripted.requests.pop().messages == scripted.requests[1].messages


@pytest.mark.parametrize("stream", [False, True])
def test_messages(opened: Opened, scripted: ScriptedSession, stream: bool) -> None:
    _, client = clients(opened(scripted))
    reply = scripted.answer
    tool: Any = {"name": "look", "description": "d", "input_schema": PARAMETERS}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    asked: Any = {"model": "any", "max_tokens": 2048, "tools": [tool], "thinking": thinking}
    if stream:
        with client.messages.stream(messages=[USER], **asked) as events:
            message: Any = events.get_final_message()
    else:
        message = client.messages.create(messages=[USER], **asked)
    by_type = {kind: [block for block in message.content if block.type == kind] for kind in ("thinking", "text")}
    assert "".join(block.text for block in by_type["text"]) == reply.visible_text
    assert "".join(block.thinking for block in by_type["thinking"]) == reply.reasoning
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (32, 8)
    assert message.usage.output_tokens == 3
    calls = [block for block in message.content if block.type == "tool_use"]
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in calls]
    answer: Any = {"role": "user", "content": results or "ok"}
    client.messages.create(model="any", max_tokens=9, messages=[USER, message.to_param(), answer])
    check_turn(scripted)


def test_tokens_are_counted_without_a_request(opened: Opened) -> None:
    session = ScriptedSession()
    _, client = clients(opened(session))
    counted = client.messages.count_tokens(model="any", system="Short.", messages=[USER])
    assert counted.input_tokens == 2 and session.requests == []
    _, client = clients(opened(ScriptedSession(SessionEnded("the time is over"))))
    with pytest.raises(anthropic.AuthenticationError, match="the time is over"):
        client.messages.count_tokens(model="any", messages=[USER])


def test_several_replies(opened: Opened) -> None:
    client, _ = clients(opened(ScriptedSession()))
    completion = client.chat.completions.create(model="any", messages=[USER], n=3)
    assert [choice.message.content for choice in completion.choices] == ["Hello, Ada."] * 3
    assert completion.usage is not None and completion.usage.completion_tokens == 9
    stream = client.chat.completions.create(model="any", messages=[USER], n=2, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "Hello, Ada.", 1: "Hello, Ada."}


def test_models(opened: Opened) -> None:
    openai_client, anthropic_client = clients(opened(ScriptedSession()))
    assert [model.id for model in openai_client.models.list()] == ["policy"]
    assert [model.id for model in anthropic_client.models.list()] == ["policy"]
    assert openai_client.models.retrieve("any").id == "any"


ERRORS: dict[str, tuple[Exception, type[Exception], type[Exception]]] = {
    "wrong": (BadRequest("an unknown role"), openai.BadRequestError, anthropic.BadRequestError),
    "long": (ContextTooLong(90, 64), openai.BadRequestError, anthropic.BadRequestError),
    "turns": (TurnLimit("no request is left"), openai.PermissionDeniedError, anthropic.PermissionDeniedError),
    "ended": (SessionEnded("the time is over"), openai.AuthenticationError, anthropic.AuthenticationError),
    "fault": (RuntimeError("an engine died"), openai.InternalServerError, anthropic.InternalServerError),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_end_the_call_at_once(opened: Opened, kind: str, stream: bool) -> None:
    error, of_openai, of_anthropic = ERRORS[kind]
    session = ScriptedSession(error)
    openai_client, anthropic_client = clients(opened(session))
    with pytest.raises(of_openai) as caught:
        openai_client.chat.completions.create(model="any", messages=[USER], stream=stream)
    if kind == "long":
        assert caught.value.code == "context_length_exceeded"  # type: ignore[attr-defined]
    with pytest.raises(of_openai):
        openai_client.responses.create(model="any", input="hi", stream=stream)
    with pytest.raises(of_anthropic) as caught:
        anthropic_client.messages.create(model="any", max_tokens=5, messages=[USER], stream=stream)
    assert len(session.requests) == 3, "an SDK tried again"
    assert isinstance(error, RequestError) is (kind != "fault")
    assert "an engine died" not in str(caught.value)


def test_a_late_error_ends_a_stream(
    opened: Opened, rollouts: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.01)
    session = ScriptedSession(ContextTooLong(90, 64), held=True)
    openai_client, anthropic_client = clients(opened(session))
    held: Any = openai_client.chat.completions.create(model="any", messages=[USER], stream=True)
    session.release(rollouts)
    with pytest.raises(openai.APIError) as from_openai:
        list(held)
    assert from_openai.value.code == "context_length_exceeded"
    session = ScriptedSession(ContextTooLong(90, 64), held=True)
    openai_client, anthropic_client = clients(opened(session))
    held = openai_client.responses.create(model="any", input="hi", stream=True)
    session.release(rollouts)
    assert list(held)[-1].response.error.code == "context_length_exceeded"
    session = ScriptedSession(ContextTooLong(90, 64), held=True)
    openai_client, anthropic_client = clients(opened(session))
    held = anthropic_client.messages.create(model="any", max_tokens=5, messages=[USER], stream=True)
    session.release(rollouts)
    with pytest.raises(anthropic.APIStatusError, match="prompt is too long"):
        list(held)


def test_waiting_streams_show_signs_of_life(
    opened: Opened, rollouts: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.01)
    for path, body, sign in (
        ("/v1/chat/completions", {"messages": [USER]}, ": keep-alive"),
        ("/v1/responses", {"input": "hi"}, ": keep-alive"),
        ("/v1/messages", {"messages": [USER]}, "event: ping"),
        ("/inference/v1/generate", {"token_ids": [1]}, ": keep-alive"),
    ):
        session = ScriptedSession(held=True)
        endpoint = opened(session)
        headers = {"authorization": f"Bearer {endpoint.key}"}
        signs, last = 0, ""
        with httpx.stream("POST", endpoint.url + path, json={**body, "stream": True}, headers=headers) as stream:
            for line in stream.iter_lines():
                signs += line == sign
                last = line or last
                if signs == 3:
                    session.release(rollouts)
        assert (signs >= 3 and last in ("data: [DONE]", 'data: {"type":"message_stop"}')) or "completed" in last, path


def test_the_sdks_skip_signs_of_life(
    opened: Opened, rollouts: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.01)

    def held() -> tuple[ScriptedSession, openai.OpenAI, anthropic.Anthropic]:
        session = ScriptedSession(replace(CALLS), held=True)
        return session, *clients(opened(session))

    session, client, _ = held()
    with client.chat.completions.stream(model="any", messages=[USER], tools=[TOOL]) as events:
        session.release(rollouts)
        calls = events.get_final_completion().choices[0].message.tool_calls
    assert calls is not None and len(calls) == 2
    session, client, _ = held()
    with client.responses.stream(model="any", input="hi") as responses:
        session.release(rollouts)
        assert responses.get_final_response().output_text == "I look."
    session, _, messages_client = held()
    with messages_client.messages.stream(model="any", max_tokens=9, messages=[USER]) as messages:
        session.release(rollouts)
        final = messages.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert final.usage.input_tokens == 32


def test_asynchronous_clients_side_by_side(opened: Opened) -> None:
    endpoints = [opened(ScriptedSession(replace(PLAIN, content=f"agent {index}"))) for index in range(8)]

    async def ask(endpoint: AgentEndpoint) -> str | None:
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key) as client:
            completion = await client.chat.completions.create(model="any", messages=[USER])
            return completion.choices[0].message.content

    async def ask_all() -> list[str | None]:
        return await asyncio.gather(*map(ask, endpoints))

    assert asyncio.run(ask_all()) == [f"agent {index}" for index in range(8)]
