"""Dialects as pure functions: what is read from a body, and what is written, in the types of the SDKs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import anthropic.types
import openai.types.chat
import openai.types.responses
import pydantic
import pytest

from skyrl_mega.rollout.endpoint import anthropic_messages, openai_chat, openai_responses, token_route
from skyrl_mega.rollout.endpoint.dialect import STATUSES, Dialect, ReplyHead, UnknownKey, status_of
from skyrl_mega.rollout.endpoint.requests import BadRequest, ContextTooLong, PolicyReply, RequestError, TurnLimit
from tests.rollout.endpoint.fakes import CALLS, CUT, PLAIN, REPLIES, STOPPED, THOUGHT, UNREADABLE

CHAT, RESPONSES = openai_chat.CHAT, openai_responses.RESPONSES
MESSAGES, TOKENS = anthropic_messages.MESSAGES, token_route.TOKENS
ALL = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES, "tokens": TOKENS}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}


def head(**body: Any) -> ReplyHead:
    return ReplyHead("0a", 7, {"model": "m", **body})


def sse(text: str) -> list[tuple[str | None, Any]]:
    """Returns the events of a stream: name and JSON."""
    entries = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        entries.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
    return entries


def test_chat_is_read() -> None:
    body = {
        "model": "any",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [CALL | {"function": {"name": "look", "arguments": '{"at": "x"}'}}],
                "refusal": None,
                "reasoning_content": "Hm.",
            },
            {"role": "tool", "tool_call_id": "c1", "content": "y"},
        ],
        "tools": [LOOK | {"function": LOOK["function"] | {"strict": True}}, {"type": "web_search"}],
        "max_tokens": 9,
        "max_completion_tokens": 5,
        "stop": "END",
        "n": 3,
        "temperature": 0.5,
        "seed": None,
        "tool_choice": "auto",
        "user": "u",
    }
    request = CHAT.read(body)
    assert request.messages == [
        {"role": "system", "content": "a\nb"},
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "content": "y", "tool_call_id": "c1"},
    ]
    assert (request.tools, request.max_tokens, request.stop, request.n) == ([LOOK], 5, ("END",), 3)
    assert request.ignored == ("temperature", "tools.web_search")
    assert CHAT.read({"messages": [USER], "tool_choice": "required"}).ignored == ("tool_choice",)


def test_messages_are_read() -> None:
    body = {
        "model": "any",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "y"}]},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}, {"type": "bash_20250124"}],
        "stop_sequences": ["END"],
        "top_k": 4,
        "metadata": {"user_id": "u"},
    }
    request = MESSAGES.read(body)
    assert request.messages == [
        {"role": "system", "content": "a"},
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "content": "y", "tool_call_id": "c1"},
        {"role": "user", "content": "go on"},
    ]
    assert (request.tools, request.max_tokens, request.stop, request.n) == ([LOOK], 5, ("END",), 1)
    assert request.ignored == ("tools.bash_20250124", "top_k")


def test_responses_are_read() -> None:
    body = {
        "model": "any",
        "instructions": "a",
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "x"}'},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "y"},
            {"type": "function_call", "call_id": "c3", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "z"}]},
        ],
        "tools": [{"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}],
        "max_output_tokens": 5,
        "reasoning": {"effort": "low"},
        "store": False,
    }
    request = RESPONSES.read(body)

    def called(*ids: str) -> list[Mapping[str, Any]]:
        function = {"name": "look", "arguments": {}}
        return [CALL if id == "c1" else {"id": id, "type": "function", "function": function} for id in ids]

    assert request.messages == [
        {"role": "system", "content": "a"},
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": called("c1", "c2")},
        {"role": "tool", "content": "y", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": called("c3")},
        {"role": "tool", "content": "z", "tool_call_id": "c3"},
    ]
    assert (request.tools, request.max_tokens, request.ignored) == ([LOOK], 5, ("reasoning",))
    assert RESPONSES.read({"input": "hi"}).messages == [USER]


def test_results_of_parallel_calls_have_the_order_of_the_calls() -> None:
    calls = [CALL | {"id": id} for id in ("a", "b", "c")]
    results = [{"role": "tool", "content": id.upper(), "tool_call_id": id} for id in "abc"]
    spoken = {"role": "assistant", "content": "", "tool_calls": calls}
    expected = [USER, spoken, *results, USER, spoken, *results]
    mixed = [results[1], {"role": "tool", "content": "?", "tool_call_id": "x"}, results[2], results[0]]
    given = [USER, spoken, results[2], results[0], results[1], USER, spoken, *mixed]
    assert CHAT.read({"messages": given}).messages == [*expected, mixed[1]]
    blocks = [{"type": "tool_use", "id": call["id"], "name": "look", "input": {"at": "x"}} for call in calls]
    answers = [{"type": "tool_result", "tool_use_id": id, "content": id.upper()} for id in "bca"]
    entries = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": answers}]
    assert MESSAGES.read({"messages": entries}).messages == expected[:5]
    items = [{"type": "function_call", "call_id": id, "name": "look", "arguments": '{"at": "x"}'} for id in "abc"]
    outputs = [{"type": "function_call_output", "call_id": id, "output": id.upper()} for id in "cab"]
    assert RESPONSES.read({"input": [USER, *items, *outputs]}).messages == expected[:5]


def test_only_the_billing_line_is_left_out_of_a_system_prompt() -> None:
    for system in (
        "x-anthropic-billing-header: 1\nbe brief",
        [{"text": "x-anthropic-billing-header: 2"}, {"text": "be brief"}],
    ):
        assert MESSAGES.read({"system": system, "messages": [USER]}).messages[0]["content"] == "be brief"


def test_instructions_of_a_developer_are_the_systems() -> None:
    told = {"role": "developer", "content": "be brief"}
    expected = [{"role": "system", "content": "be brief"}, USER]
    assert CHAT.read({"messages": [told, USER]}).messages == expected
    assert RESPONSES.read({"input": [told, USER]}).messages == expected


def test_tokens_are_read() -> None:
    sampling = {"max_tokens": 4, "stop": ["END"], "temperature": 1.0, "logprobs": 0}
    request = TOKENS.read({"token_ids": [5, 6], "sampling_params": sampling, "priority": 3})
    assert (request.tokens, request.max_tokens, request.stop) == ([5, 6], 4, ("END",))
    assert request.ignored == ("priority", "temperature")


WRONG = [
    (CHAT, {}, "messages: give"),
    (CHAT, {"messages": "x"}, "messages: x is not a list"),
    (CHAT, {"messages": [1]}, "messages[0]: 1 is not an object"),
    (CHAT, {"messages": [{"role": "robot"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]: the policy"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "[0].",
    ),
    (CHAT, {"messages": [USER], "n": 17}, "n: 17"),
    (CHAT, {"messages": [USER], "n": True}, "n: true"),
    (CHAT, {"messages": [USER], "max_tokens": 0}, "max_tokens: 0"),
    (CHAT, {"messages": [USER], "stop": [""]}, "stop: "),
    (CHAT, {"messages": [USER], "stop": ["a"] * 17}, "stop: at most 16"),
    (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": [USER], "functions": []}, "functions: use tools"),
    (MESSAGES, {"messages": []}, "messages: give"),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    (MESSAGES, {"messages": [USER], "tools": [{"input_schema": {}}]}, "tools[0].name"),
    (RESPONSES, {"input": []}, "input: give"),
    (RESPONSES, {"input": 5}, "input: 5 is not a list"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (RESPONSES, {"input": "x", "conversation": "c"}, "conversation: not supported"),
    (TOKENS, {"token_ids": []}, "token_ids"),
    (TOKENS, {"token_ids": [True]}, "token_ids"),
    (TOKENS, {"token_ids": [-1]}, "token_ids"),
    (TOKENS, {"token_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n"),
    (TOKENS, {"token_ids": [1], "features": {"mm_hashes": {}}}, "features"),
    (TOKENS, {"token_ids": [1], "output_mode": "sound"}, "output_mode"),
]


@pytest.mark.parametrize("dialect, body, text", WRONG, ids=[f"{i}-{text[:20]}" for i, (_, _, text) in enumerate(WRONG)])
def test_wrong_bodies_are_refused(dialect: Dialect, body: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        dialect.read(body)
    assert text in str(caught.value)


TYPES: Mapping[str, type[pydantic.BaseModel]] = {
    "chat": openai.types.chat.ChatCompletion,
    "responses": openai.types.responses.Response,
    "messages": anthropic.types.Message,
}


@pytest.mark.parametrize("name, kind", itertools.product(TYPES, REPLIES))
def test_replies_have_the_types_of_the_sdk(name: str, kind: str) -> None:
    asked = {"logprobs": True, "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    body = ALL[name].write(head(**asked, thinking={"type": "enabled"}), [REPLIES[kind]])
    TYPES[name].model_validate(json.loads(json.dumps(body)))


@pytest.mark.parametrize("kind", REPLIES)
def test_events_have_the_types_of_the_sdk(kind: str) -> None:
    reply = REPLIES[kind]
    for name, adapter in (
        ("responses", pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)),
        ("messages", pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)),
    ):
        begun = head(thinking={"type": "enabled"})
        dialect = ALL[name]
        stream = sse(dialect.opening(begun, None) + dialect.events(begun, [reply]))
        assert [event_name for event_name, _ in stream] == [data["type"] for _, data in stream]
        for _, data in stream:
            adapter.validate_python(data)
    *chunks, done = sse(CHAT.events(head(logprobs=True, stream_options={"include_usage": True}), [reply, PLAIN]))
    assert done == (None, "[DONE]")
    for _, chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)


def test_the_numbers_of_responses_events_have_no_gap() -> None:
    for opened in (None, [CALLS]):
        stream = sse(RESPONSES.opening(head(), opened) + RESPONSES.events(head(), [CALLS]))
        assert [data["sequence_number"] for _, data in stream] == list(range(len(stream)))


FINISH = {
    "plain": ("stop", "completed", "end_turn", "stop"),
    "calls": ("tool_calls", "completed", "tool_use", "stop"),
    "cut": ("length", "incomplete", "max_tokens", "length"),
    "stopped": ("stop", "completed", "stop_sequence", "stop"),
    "unreadable": ("stop", "completed", "end_turn", "stop"),
}


@pytest.mark.parametrize("kind", FINISH)
def test_the_reason_of_the_end(kind: str) -> None:
    replies = [REPLIES[kind]]
    assert (
        CHAT.write(head(), replies)["choices"][0]["finish_reason"],
        RESPONSES.write(head(), replies)["status"],
        MESSAGES.write(head(), replies)["stop_reason"],
        TOKENS.write(head(token_ids=[1]), replies)["choices"][0]["finish_reason"],
    ) == FINISH[kind]
    assert MESSAGES.write(head(), [STOPPED])["stop_sequence"] == "Ada"
    assert TOKENS.write(head(token_ids=[1]), [STOPPED])["choices"][0]["stop_reason"] == "Ada"


def test_thoughts_are_shown_where_the_dialect_has_a_place() -> None:
    assert CHAT.write(head(), [THOUGHT])["choices"][0]["message"]["reasoning_content"] == "Hm."
    assert [item["type"] for item in RESPONSES.write(head(), [THOUGHT])["output"]] == ["reasoning", "message"]
    assert [block["type"] for block in MESSAGES.write(head(), [THOUGHT])["content"]] == ["text"]
    shown = MESSAGES.write(head(thinking={"type": "adaptive"}), [THOUGHT])["content"]
    assert [block["type"] for block in shown] == ["thinking", "text"]


def test_an_unreadable_call_is_shown_as_written() -> None:
    message = CHAT.write(head(), [UNREADABLE])["choices"][0]["message"]
    assert message["content"] == "So: <tool_call>{oops</tool_call>" and "tool_calls" not in message


def test_tokens_and_logprobs_are_exact() -> None:
    content = CHAT.write(head(logprobs=True, return_token_ids=True), [PLAIN])["choices"][0]
    assert content["token_ids"] == PLAIN.tokens
    assert [entry["logprob"] for entry in content["logprobs"]["content"]] == PLAIN.logprobs
    assert [entry["token"] for entry in content["logprobs"]["content"]] == ["token_id:11", "token_id:12", "token_id:2"]
    wanted = head(token_ids=[1], sampling_params={"logprobs": 0})
    for body in (TOKENS.write(wanted, [PLAIN]), sse(TOKENS.events(wanted, [PLAIN]))[0][1]):
        choice = body["choices"][0]
        assert choice["token_ids"] == PLAIN.tokens
        assert [(entry["token_id"], entry["logprob"]) for entry in choice["logprobs"]["content"]] == list(
            zip(PLAIN.tokens, PLAIN.logprobs, strict=True)
        )


@pytest.mark.nightly
def test_the_token_route_has_the_types_of_vllm() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out import protocol

    reply: PolicyReply = CUT
    for mode, whole, chunk in (
        ("tokens", protocol.GenerateTokensResponse, protocol.GenerateTokensStreamResponse),
        ("text", protocol.GenerateTextResponse, protocol.GenerateTextStreamResponse),
    ):
        body = {"token_ids": [1], "sampling_params": {"logprobs": 1}, "output_mode": mode, "return_token_ids": True}
        parsed = whole.model_validate(TOKENS.write(head(**body), [reply]))
        assert parsed.choices[0].token_ids == reply.tokens and parsed.prompt_token_ids == [1]
        *events, _ = sse(TOKENS.events(head(**body, stream_options={"include_usage": True}), [reply]))
        assert [len(chunk.model_validate(data).choices) for _, data in events] == [1, 0]


def test_errors_in_the_form_of_each_dialect() -> None:
    too_long, turns = ContextTooLong(90, 64), TurnLimit("no request is left")
    assert [status_of(error) for error in (too_long, turns, UnknownKey("x"))] == [400, 403, 401]
    error = CHAT.error(too_long, 400)["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert "maximum context length is 64 tokens" in error["message"]
    error = MESSAGES.error(too_long, 400)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: 90 tokens > 64 maximum")
    assert MESSAGES.error(turns, 403)["error"] == {"type": "permission_error", "message": "no request is left"}
    assert CHAT.error(turns, 403)["error"]["code"] == "turn_limit_reached"
    assert TOKENS.error(turns, 403)["error"]["code"] == 403


@pytest.mark.parametrize("name, kind", itertools.product(ALL, STATUSES))
def test_every_error_has_a_body(name: str, kind: type[RequestError]) -> None:
    reason = ContextTooLong(2, 1) if kind is ContextTooLong else kind("why")
    body = ALL[name].error(reason, status_of(reason))
    assert body["error"]["message"] and body["error"]["type"]
    assert sse(ALL[name].failure(head(), reason, 400))
