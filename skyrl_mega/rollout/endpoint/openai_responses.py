"""OpenAI's responses: `POST /v1/responses`.

An assistant message of a chat template is a sequence of items here: thoughts, text, calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.envs.base import Message
from skyrl_mega.rollout.endpoint import fields, openai_chat
from skyrl_mega.rollout.endpoint.dialect import Dialect, ReplyHead, event
from skyrl_mega.rollout.endpoint.openai_chat import arguments_text, error, token_logprobs
from skyrl_mega.rollout.endpoint.requests import BadRequest, ChatRequest, ContextTooLong, PolicyReply, RequestError

FOLLOWED = (
    *fields.OPENAI,
    *("input", "instructions", "max_output_tokens", "include", "previous_response_id", "prompt_cache_options"),
)
"""Parameters with their usual effect, or without any effect at all."""
FIXED = {
    **fields.OPENAI_FIXED,
    "truncation": ("disabled",),
    "background": (False,),
    "text": ({"format": {"type": "text"}},),
}
"""Parameter → values equal to the fixed behaviour."""
UNSUPPORTED = ("conversation", "prompt", "background")
"""Parameters of a store on the server."""
LOGPROBS = "message.output_text.logprobs"
"""Entry of `include` for log-probs."""


class ResponseHistory:
    """The earlier responses of a trajectory, continued by `previous_response_id`."""

    def __init__(self) -> None:
        self._messages: dict[str, list[Message]] = {}
        """Response id → all messages of the conversation without instructions, up to the response. Lists share their
        messages."""

    def whole(self, body: Mapping[str, Any], request: ChatRequest) -> ChatRequest:
        """Returns a request with the messages of the previous responses between instructions and its own messages; the
        request itself if it continues no response.

        Args:
            body: The JSON body of the request.
            request: The request read from the body.

        Raises:
            BadRequest: `previous_response_id` is no response of this trajectory.
        """
        previous = body.get("previous_response_id")
        if previous is None:
            return request
        if not isinstance(previous, str) or previous not in self._messages:
            raise BadRequest(f"previous_response_id: no response {shown(previous)} in this trajectory")
        first = _instructions(body)
        messages = [*request.messages[:first], *self._messages[previous], *request.messages[first:]]
        return replace(request, messages=fields.in_order_of_calls(messages))

    def keep(self, head: ReplyHead, request: ChatRequest, reply: PolicyReply) -> None:
        """Stores the conversation of a request with its reply, so that a later request can continue the response. With
        `store: false` in the request, nothing is stored.

        Args:
            head: Id and body of the request.
            request: The whole request (`whole`).
            reply: The policy's reply.
        """
        if head.body.get("store") is False:
            return
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in reply.visible_calls
        ]
        spoken = fields.assistant(reply.visible_text, calls, reply.reasoning)
        self._messages[_id(head)] = [*request.messages[_instructions(head.body) :], spoken]


def _instructions(body: Mapping[str, Any]) -> int:
    """Returns the number of messages made from `instructions`."""
    return 1 if body.get("instructions") else 0


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Returns the request in the body of a POST to `/v1/responses`, without earlier responses
    (`ResponseHistory.whole`).

    Raises:
        BadRequest: A field is missing, not supported, or has an unusable value; names the field.
    """
    for name in UNSUPPORTED:
        if body.get(name):
            raise BadRequest(f"{name}: not supported; send the whole conversation as input")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": fields.string(body["instructions"], "instructions")})
    for index, item in enumerate(fields.items(_items(body.get("input")), "input")):
        _append(messages, item, f"input[{index}]")
    if not messages or messages[-1]["role"] == "system":
        raise BadRequest("input: give at least one message")
    tools, unknown = fields.tools(
        body.get("tools"), ("function",), lambda entry, place: fields.tool(entry, "parameters", place)
    )
    return ChatRequest(
        fields.in_order_of_calls(messages),
        tools,
        fields.number(body.get("max_output_tokens"), "max_output_tokens"),
        ignored=fields.ignored(body, FOLLOWED, unknown, FIXED),
    )


def _items(input: Any) -> list[Any]:
    if isinstance(input, str):
        return [{"type": "message", "role": "user", "content": input}]
    return input if isinstance(input, list) else fields.items(input, "input")


def _append(messages: list[Message], item: Mapping[str, Any], place: str) -> None:
    """Adds an item to the messages. Items of the same assistant message are merged: thoughts, text, calls."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        content = fields.text_of(item.get("output"), f"{place}.output")
        id = fields.string(item.get("call_id"), f"{place}.call_id")
        messages.append({"role": "tool", "content": content, "tool_call_id": id})
    elif kind == "message" and item.get("role") != "assistant":
        messages.append(openai_chat.message(item, place))
    elif kind == "message":
        content = fields.text_of(item.get("content"), f"{place}.content")
        last = _open_message(messages, ("content", "tool_calls"))
        last["content"] = content
    elif kind == "function_call":
        call = fields.call(item.get("call_id"), item.get("name"), item.get("arguments"), place)
        _open_message(messages, ()).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        thoughts = fields.text_of([_as_text(part) for part in fields.items(item.get("content"), place)], place)
        if thoughts:
            _open_message(messages, ("content", "tool_calls", "reasoning_content"))["reasoning_content"] = thoughts
    else:
        raise BadRequest(f"{place}.type: {shown(kind)} is not supported")


def _as_text(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "text", "text": part.get("text")} if part.get("type") == "reasoning_text" else part


def _open_message(messages: list[Message], taken: tuple[str, ...]) -> Message:
    """Returns the last message if the role is assistant and all of the keys are empty, else a new assistant message."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(last.get(key) for key in taken):
        last = fields.assistant("", [])
        messages.append(last)
    return last


def write(head: ReplyHead, replies: list[PolicyReply]) -> dict[str, Any]:
    """Returns the JSON body of the reply to a request that is not streamed. `replies` has one entry."""
    reply = replies[0]
    cut = reply.finish == "length"
    return {
        **_frame(head, "incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [item for item, _ in _output(head, reply)],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(reply.tokens),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + len(reply.tokens),
        },
    }


def opening(head: ReplyHead, replies: list[PolicyReply] | None) -> str:
    """Returns the first two server-sent events, `response.created` and `response.in_progress`, as text; neither needs
    the reply."""
    response = _frame(head, "in_progress")
    return _numbered([{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")], 0)


def events(head: ReplyHead, replies: list[PolicyReply]) -> str:
    """Returns the server-sent events of a whole reply after `response.created` and `response.in_progress`: all items
    and the end. `replies` has one entry."""
    response = write(head, replies)
    stream: list[dict[str, Any]] = []
    for index, (item, inner) in enumerate(_output(head, replies[0])):
        empty = {**item, "status": "in_progress"} | {
            name: type(value)() for name, value in item.items() if name in ("content", "arguments")
        }
        stream.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        stream += ({"output_index": index, "item_id": item["id"], **entry} for entry in inner)
        stream.append({"type": "response.output_item.done", "output_index": index, "item": item})
    stream.append({"type": f"response.{response['status']}", "response": response})
    return _numbered(stream, 2)


def failure(head: ReplyHead, reason: RequestError, status: int) -> str:
    """Returns the server-sent event that ends a failed stream, as text. `status` is the HTTP status of a reply without
    a stream."""
    problem = error(reason, status)["error"]
    code = "context_length_exceeded" if isinstance(reason, ContextTooLong) else problem["code"] or "invalid_prompt"
    response = {**_frame(head, "failed"), "error": {"code": code, "message": problem["message"]}}
    return _numbered([{"type": "response.failed", "response": response}], 2)


def _numbered(entries: list[dict[str, Any]], first: int) -> str:
    numbered = ({**entry, "sequence_number": first + index} for index, entry in enumerate(entries))
    return "".join(event(entry, entry["type"]) for entry in numbered)


def _id(head: ReplyHead) -> str:
    return f"resp_{head.id}"


def _frame(head: ReplyHead, status: str) -> dict[str, Any]:
    """Returns a response without output; the settings repeat the request's."""
    body = head.body
    return {
        "id": _id(head),
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": body.get("store") is not False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None,
    }


def _output(head: ReplyHead, reply: PolicyReply) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yields every item of a reply with the events of the item's content."""
    text = reply.visible_text
    part: dict[str, Any]
    if reply.reasoning:
        part = {"type": "reasoning_text", "text": reply.reasoning}
        item = {"id": f"rs_{head.id}", "type": "reasoning", "summary": [], "content": [part], "status": "completed"}
        yield item, _part_events("response.reasoning_text", part, {})
    if text or not reply.visible_calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(head, reply)}
        status = "incomplete" if reply.finish == "length" else "completed"
        content = {"role": "assistant", "content": [part], "status": status}
        further = {"logprobs": part["logprobs"]}
        yield (
            {"id": f"msg_{head.id}", "type": "message", **content},
            _part_events("response.output_text", part, further),
        )
    for index, call in enumerate(reply.visible_calls):
        arguments = arguments_text(call)
        function = {"call_id": call.id, "name": call.name, "arguments": arguments, "status": "completed"}
        name = "response.function_call_arguments"
        yield (
            {"id": f"fc_{head.id}_{index}", "type": "function_call", **function},
            [{"type": f"{name}.delta", "delta": arguments}, {"type": f"{name}.done", "arguments": arguments}],
        )


def _part_events(name: str, part: dict[str, Any], further: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a part with text."""
    text = part["text"]
    entries = [
        {"type": "response.content_part.added", "part": part | {"text": ""} | {key: [] for key in further}},
        {"type": f"{name}.delta", "delta": text, **further},
        {"type": f"{name}.done", "text": text, **further},
        {"type": "response.content_part.done", "part": part},
    ]
    return [{"content_index": 0, **entry} for entry in entries]


def _logprobs(head: ReplyHead, reply: PolicyReply) -> list[dict[str, Any]]:
    include = head.body.get("include")
    if not isinstance(include, list) or LOGPROBS not in include:
        return []
    entries = token_logprobs(reply.tokens, reply.logprobs, bool(head.body.get("top_logprobs")))
    return [
        {**entry, "bytes": [], "top_logprobs": [top | {"bytes": []} for top in entry["top_logprobs"]]}
        for entry in entries
    ]


RESPONSES = Dialect(read=read, write=write, opening=opening, events=events, error=error, failure=failure)
