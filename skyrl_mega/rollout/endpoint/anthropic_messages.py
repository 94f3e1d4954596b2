"""Anthropic's messages: `POST /v1/messages`.

Thoughts are shown as a `thinking` block if the request enables `thinking`; the run decides if the policy thinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.envs.base import Message
from skyrl_mega.rollout.endpoint import fields
from skyrl_mega.rollout.endpoint.dialect import Dialect, ReplyHead, event
from skyrl_mega.rollout.endpoint.openai_chat import arguments_text
from skyrl_mega.rollout.endpoint.requests import BadRequest, ChatRequest, ContextTooLong, PolicyReply, RequestError

FOLLOWED = (
    *("messages", "model", "system", "tools", "max_tokens", "stop_sequences", "stream", "thinking", "metadata"),
    *("service_tier", "cache_control"),
)
"""Parameters with their usual effect, or without any effect at all."""
BILLING = "x-anthropic-billing-header"
"""Beginning of a line of Claude Code's system prompt. The line changes with every request; with the line, every request
would begin a new conversation. The line is left out."""
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}
"""HTTP status → type of an error; `invalid_request_error` for all others."""
PING = event({"type": "ping"}, "ping")


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Returns the request in the body of a POST to `/v1/messages`.

    Raises:
        BadRequest: A field is missing or has an unusable value; names the field.
    """
    messages = _system(body.get("system"), "system")
    entries = fields.items(body.get("messages"), "messages")
    if not entries:
        raise BadRequest("messages: give at least one message")
    for index, entry in enumerate(entries):
        messages += _messages(entry, f"messages[{index}]")
    tools, unknown = fields.tools(
        body.get("tools"), (None, "custom"), lambda entry, place: fields.tool(entry, "input_schema", place)
    )
    return ChatRequest(
        fields.in_order_of_calls(messages),
        tools,
        fields.number(body.get("max_tokens"), "max_tokens"),
        fields.stops(body.get("stop_sequences"), "stop_sequences"),
        ignored=fields.ignored(body, FOLLOWED, unknown, {"tool_choice": ({"type": "auto"},)}),
    )


def _system(content: Any, place: str) -> list[Message]:
    blocks = [{"text": content}] if isinstance(content, str) else fields.items(content, place)
    texts = [fields.string(block.get("text"), f"{place}[{index}].text") for index, block in enumerate(blocks)]
    text = "".join(text.partition("\n")[2] if text.startswith(BILLING) else text for text in texts)
    return [{"role": "system", "content": text}] if text else []


def _messages(entry: Mapping[str, Any], place: str) -> list[Message]:
    """Returns the messages of an entry: results of tools are messages of their own, in front of the user's text."""
    role, content = entry.get("role"), entry.get("content")
    if role == "system":
        return _system(content, f"{place}.content")
    if role not in ("user", "assistant"):
        raise BadRequest(f"{place}.role: {shown(role)}, allowed are user, assistant, system")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [
        (block, f"{place}.content[{index}]")
        for index, block in enumerate(fields.items(content, f"{place}.content"))
        if block.get("type") != "redacted_thinking"
    ]
    if role == "assistant":
        return [_assistant(blocks)]
    results: list[Message] = [
        {
            "role": "tool",
            "content": fields.text_of(block.get("content"), f"{at}.content"),
            "tool_call_id": fields.string(block.get("tool_use_id"), f"{at}.tool_use_id"),
        }
        for block, at in blocks
        if block.get("type") == "tool_result"
    ]
    texts = [_text(block, at) for block, at in blocks if block.get("type") != "tool_result"]
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])


def _assistant(blocks: list[tuple[Mapping[str, Any], str]]) -> Message:
    texts, thoughts, calls = [], [], []
    for block, at in blocks:
        if block.get("type") == "tool_use":
            calls.append(fields.call(block.get("id"), block.get("name"), block.get("input"), at))
        elif block.get("type") == "thinking":
            thoughts.append(fields.string(block.get("thinking"), f"{at}.thinking"))
        else:
            texts.append(_text(block, at))
    return fields.assistant("\n".join(texts), calls, "".join(thoughts))


def _text(block: Mapping[str, Any], place: str) -> str:
    return fields.text_of([block], place)


def write(head: ReplyHead, replies: list[PolicyReply]) -> dict[str, Any]:
    """Returns the JSON body of the reply to a request that is not streamed. `replies` has one entry."""
    reply = replies[0]
    return {
        **_start(head),
        "content": [block for block, _ in _blocks(head, reply)],
        **_stop(reply),
        "usage": {**_prompt_usage(reply), "output_tokens": len(reply.tokens)},
    }


def opening(head: ReplyHead, replies: list[PolicyReply] | None) -> str:
    """Returns the server-sent event `message_start` as text. With `replies` None, the reply is not known yet and the
    event counts 0 tokens; `message_delta` repeats the numbers."""
    usage = _prompt_usage(replies[0]) if replies else {"input_tokens": 0}
    message = {**_start(head), "content": [], "stop_reason": None, "stop_sequence": None}
    start = message | {"usage": {**usage, "output_tokens": 0}}
    return event({"type": "message_start", "message": start}, "message_start")


def events(head: ReplyHead, replies: list[PolicyReply]) -> str:
    """Returns the server-sent events of a whole reply after `message_start`: the blocks and the end. `replies` has one
    entry."""
    reply = replies[0]
    stream: list[dict[str, Any]] = []
    for index, (block, deltas) in enumerate(_blocks(head, reply)):
        empty = block | {name: type(value)() for name, value in block.items() if name in ("text", "thinking", "input")}
        stream.append({"type": "content_block_start", "index": index, "content_block": empty})
        stream += ({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas)
        stream.append({"type": "content_block_stop", "index": index})
    usage = {**_prompt_usage(reply), "output_tokens": len(reply.tokens)}
    stream.append({"type": "message_delta", "delta": _stop(reply), "usage": usage})
    stream.append({"type": "message_stop"})
    return "".join(event(entry, entry["type"]) for entry in stream)


def error(error: RequestError, status: int) -> dict[str, Any]:
    """Returns the JSON body of a refused request.

    Args:
        error: Reason for the refusal.
        status: HTTP status of the reply.
    """
    text = str(error)
    if isinstance(error, ContextTooLong):
        text = f"prompt is too long: {error.tokens} tokens > {error.most} maximum, the reply included"
    return {"type": "error", "error": {"type": KINDS.get(status, "invalid_request_error"), "message": text}}


def failure(head: ReplyHead, reason: RequestError, status: int) -> str:
    """Returns the server-sent event that ends a failed stream, as text. `status` is the HTTP status of a reply without
    a stream."""
    return event(error(reason, status), "error")


def _start(head: ReplyHead) -> dict[str, Any]:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": head.model}


def _blocks(head: ReplyHead, reply: PolicyReply) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Returns every block of a reply with the deltas of the block."""
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    thinking, text = head.body.get("thinking"), reply.visible_text
    block: dict[str, Any]
    if reply.reasoning and isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive"):
        block = {"type": "thinking", "thinking": reply.reasoning, "signature": ""}
        deltas = [
            {"type": "thinking_delta", "thinking": reply.reasoning},
            {"type": "signature_delta", "signature": ""},
        ]
        blocks.append((block, deltas))
    if text or not reply.visible_calls:
        blocks.append(({"type": "text", "text": text}, [{"type": "text_delta", "text": text}]))
    for call in reply.visible_calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        blocks.append((block, [{"type": "input_json_delta", "partial_json": arguments_text(call)}]))
    return blocks


def _stop(reply: PolicyReply) -> dict[str, Any]:
    if reply.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.visible_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reply.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_string}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _prompt_usage(reply: PolicyReply) -> dict[str, Any]:
    """Returns the tokens of the context. In this dialect, `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
    }


MESSAGES = Dialect(
    read=read, write=write, opening=opening, events=events, keep_alive=PING, error=error, failure=failure
)
