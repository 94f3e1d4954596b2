"""OpenAI's chat completions: `POST /v1/chat/completions`.

A token of `logprobs` is named `token_id:<id>`, as by vLLM with `return_tokens_as_token_ids`: the text of a single token
need not be valid Unicode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.envs.base import Message
from skyrl_mega.envs.tool_calls import ToolCall
from skyrl_mega.rollout.endpoint import fields
from skyrl_mega.rollout.endpoint.dialect import Dialect, ReplyHead, event
from skyrl_mega.rollout.endpoint.requests import (
    BadRequest,
    ChatRequest,
    ContextTooLong,
    PolicyReply,
    RequestError,
    TurnLimit,
)

FOLLOWED = (
    *fields.OPENAI,
    *("messages", "max_tokens", "max_completion_tokens", "stop", "n", "logprobs", "top_logprobs", "return_token_ids"),
)
"""Parameters with their usual effect, or without any effect at all."""
FIXED = {**fields.OPENAI_FIXED, "response_format": ({"type": "text"},), "modalities": (["text"],)}
"""Parameter → values equal to the fixed behaviour."""
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error"}
"""HTTP status → type of an error; `invalid_request_error` for all others."""
CODES = {
    401: "invalid_api_key",
    404: "not_found",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    500: "server_error",
}


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Returns the request in the body of a POST to `/v1/chat/completions`.

    Raises:
        BadRequest: A field is missing or has an unusable value; names the field.
    """
    messages = [message(entry, f"messages[{index}]") for index, entry in enumerate(_messages(body))]
    if body.get("functions") is not None:
        raise BadRequest("functions: use tools")
    tools, unknown = fields.tools(body.get("tools"), (None, "function"), _function)
    limits = [fields.number(body.get(name), name) for name in ("max_completion_tokens", "max_tokens")]
    return ChatRequest(
        fields.in_order_of_calls(messages),
        tools,
        min((limit for limit in limits if limit is not None), default=None),
        fields.stops(body.get("stop")),
        fields.number(body.get("n"), "n", fields.MOST_REPLIES) or 1,
        fields.ignored(body, FOLLOWED, unknown, FIXED),
    )


def _messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = fields.items(body.get("messages"), "messages")
    if not messages:
        raise BadRequest("messages: give at least one message")
    return messages


def message(entry: Mapping[str, Any], place: str) -> Message:
    """Returns a message of a request in the form of chat templates. The role `developer` becomes `system`.

    Args:
        entry: The message.
        place: Place of the message in the request, for errors.

    Raises:
        BadRequest: The role is unknown, the content is not text, or the tool calls are invalid.
    """
    role = entry.get("role")
    if role not in fields.ROLES:
        raise BadRequest(f"{place}.role: {shown(role)}, allowed are {fields.ALLOWED_ROLES}")
    content = fields.text_of(entry.get("content"), f"{place}.content")
    if role == "assistant":
        reasoning = entry.get("reasoning_content") or entry.get("reasoning") or ""
        calls = fields.tool_calls(entry.get("tool_calls"), place)
        return fields.assistant(content, calls, reasoning if isinstance(reasoning, str) else "")
    if role == "tool":
        return {"role": role, "content": content} | {
            name: entry[name] for name in ("tool_call_id", "name") if isinstance(entry.get(name), str)
        }
    # many templates drop the role developer without a word
    return {"role": "system" if role == "developer" else role, "content": content}


def _function(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    return fields.tool(fields.mapping(entry.get("function"), f"{place}.function"), "parameters", f"{place}.function")


def write(head: ReplyHead, replies: list[PolicyReply]) -> dict[str, Any]:
    """Returns the JSON body of the reply to a request that is not streamed, with a choice for each of `replies`."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **_content(reply), **_calls(reply, False)},
            "logprobs": logprobs(head, reply),
            "finish_reason": _finish(reply),
            **_further(head, reply),
        }
        for index, reply in enumerate(replies)
    ]
    return {**_frame(head, "chat.completion"), "choices": choices, "usage": _usage(replies)}


def events(head: ReplyHead, replies: list[PolicyReply]) -> str:
    """Returns the server-sent events of a whole reply as text: for each choice a chunk with role, text and calls, and a
    chunk with the end; then the numbers of tokens if the request asks for them, and `[DONE]`."""
    options = head.body.get("stream_options")
    with_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
    frame = _frame(head, "chat.completion.chunk") | ({"usage": None} if with_usage else {})
    chunks: list[dict[str, Any]] = []
    for index, reply in enumerate(replies):
        delta = {"role": "assistant", **_content(reply), **_calls(reply, True)}
        first = {"index": index, "delta": delta, "logprobs": logprobs(head, reply), "finish_reason": None}
        last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": _finish(reply)}
        chunks += [{"choices": [first]}, {"choices": [last | _further(head, reply)]}]
    if with_usage:
        chunks.append({"choices": [], "usage": _usage(replies)})
    return "".join(event(frame | chunk) for chunk in chunks) + "data: [DONE]\n\n"


def error(error: RequestError, status: int) -> dict[str, Any]:
    """Returns the JSON body of a refused request.

    Args:
        error: The reason.
        status: HTTP status of the reply.
    """
    text, code = str(error), CODES.get(status)
    if isinstance(error, ContextTooLong):
        text = f"This model's maximum context length is {error.most} tokens: {error}"
        code = "context_length_exceeded"
    elif isinstance(error, TurnLimit):
        code = "turn_limit_reached"
    return {"error": {"message": text, "type": KINDS.get(status, "invalid_request_error"), "param": None, "code": code}}


def failure(head: ReplyHead, reason: RequestError, status: int) -> str:
    """Returns the server-sent event that ends a failed stream, as text. `status` is the HTTP status of a reply without
    a stream."""
    return event(error(reason, status))


def arguments_text(call: ToolCall) -> str:
    """Returns a call's arguments as JSON text."""
    return json.dumps(call.arguments, ensure_ascii=False)


def token_logprobs(tokens: Sequence[int], values: Sequence[float], alternatives: bool) -> list[dict[str, Any]]:
    """Returns the log-probs of sampled tokens in OpenAI's form, an entry for each token. With `alternatives`, each
    entry lists the sampled token itself as the only alternative. `tokens` and `values` are equally long: token ids, and
    their log-probs in nats."""
    entries: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "bytes": None, "logprob": float(value)}
        for token, value in zip(tokens, values, strict=True)
    ]
    return [{**entry, "top_logprobs": [entry] if alternatives else []} for entry in entries]


def logprobs(head: ReplyHead, reply: PolicyReply) -> dict[str, Any] | None:
    """Returns the log-probs of a reply's tokens in OpenAI's form if the request asks for log-probs, else None."""
    if not head.body.get("logprobs"):
        return None
    alternatives = bool(head.body.get("top_logprobs"))
    return {"content": token_logprobs(reply.tokens, reply.logprobs, alternatives), "refusal": None}


def _frame(head: ReplyHead, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}


def _content(reply: PolicyReply) -> dict[str, Any]:
    text: str | None = reply.visible_text
    if not text and reply.visible_calls:
        text = None
    # SGLang and older versions of vLLM call the thoughts reasoning_content, newer versions reasoning
    thoughts = {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning} if reply.reasoning else {}
    return {"content": text, **thoughts}


def _calls(reply: PolicyReply, with_index: bool) -> dict[str, Any]:
    calls: list[dict[str, Any]] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}
        for call in reply.visible_calls
    ]
    if with_index:
        calls = [{"index": index, **call} for index, call in enumerate(calls)]
    return {"tool_calls": calls} if calls else {}


def _finish(reply: PolicyReply) -> str:
    if reply.finish == "length":
        return "length"
    return "tool_calls" if reply.visible_calls else "stop"


def _further(head: ReplyHead, reply: PolicyReply) -> dict[str, Any]:
    """Returns vLLM's further fields of a choice."""
    tokens = {"token_ids": list(reply.tokens)} if head.body.get("return_token_ids") else {}
    return {"stop_reason": reply.stop_string, **tokens}


def _usage(replies: list[PolicyReply]) -> dict[str, Any]:
    prompt, completion = replies[0].prompt_tokens, sum(len(reply.tokens) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
    }


CHAT = Dialect(read=read, write=write, events=events, error=error, failure=failure)
