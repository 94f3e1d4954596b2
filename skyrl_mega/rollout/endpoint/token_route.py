"""vLLM's route for tokens: `POST /inference/v1/generate`. Tokens in, tokens out, without a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.rollout.endpoint import fields
from skyrl_mega.rollout.endpoint.dialect import Dialect, ReplyHead, event
from skyrl_mega.rollout.endpoint.openai_chat import token_logprobs
from skyrl_mega.rollout.endpoint.requests import BadRequest, PolicyReply, RequestError, TokenRequest

FOLLOWED = (
    *("request_id", "token_ids", "token_offsets", "sampling_params", "model", "return_token_ids", "output_mode"),
    *("stream", "stream_options", "cache_salt"),
)
"""Parameters with their usual effect, or without any effect at all."""
FOLLOWED_SAMPLING = ("max_tokens", "stop", "n", "logprobs", "detokenize", "output_kind", "skip_special_tokens")
"""The same, of `sampling_params`."""
LARGEST_TOKEN = 2**31 - 1
KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
}
"""HTTP status → type of an error; `BadRequestError` for all others."""


def read(body: Mapping[str, Any]) -> TokenRequest:
    """Returns the request in the body of a POST with tokens in place of messages.

    Raises:
        BadRequest: A field is missing or has an unusable value; names the field.
    """
    tokens = body.get("token_ids")
    if not isinstance(tokens, list) or not tokens or not all(_is_token(token) for token in tokens):
        raise BadRequest("token_ids: give a list of tokens, whole numbers from 0")
    for name in ("features", "content_parts"):
        if body.get(name):
            raise BadRequest(f"{name}: the policy reads only text")
    if (mode := body.get("output_mode", "tokens")) not in ("tokens", "text"):
        raise BadRequest(f"output_mode: {shown(mode)}, allowed are tokens, text")
    sampling = fields.mapping(body.get("sampling_params") or {}, "sampling_params")
    fields.number(sampling.get("n"), "sampling_params.n", 1)
    return TokenRequest(
        tokens,
        fields.number(sampling.get("max_tokens"), "sampling_params.max_tokens"),
        fields.stops(sampling.get("stop"), "sampling_params.stop"),
        fields.ignored(body, FOLLOWED, fields.ignored(sampling, FOLLOWED_SAMPLING)),
    )


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_TOKEN


def write(head: ReplyHead, replies: list[PolicyReply]) -> dict[str, Any]:
    """Returns the JSON body of the reply to a request that is not streamed. `replies` has one entry."""
    return {
        **_frame(head),
        "model": head.model,
        "created": head.created,
        "choices": [_choice(head, replies[0])],
        "usage": _usage(replies[0]),
        "prompt_logprobs": None,
        "prompt_token_ids": _prompt(head),
    }


def events(head: ReplyHead, replies: list[PolicyReply]) -> str:
    """Returns the server-sent events of a reply as text: a chunk with the whole reply, a chunk with the numbers of
    tokens if the request asks for them, and `[DONE]`. `replies` has one entry."""
    options = head.body.get("stream_options")
    chunk = {**_frame(head), "choices": [_choice(head, replies[0])], "usage": None, "prompt_token_ids": _prompt(head)}
    stream = event(chunk)
    if isinstance(options, Mapping) and options.get("include_usage"):
        stream += event({**_frame(head), "choices": [], "usage": _usage(replies[0])})
    return stream + "data: [DONE]\n\n"


def error(error: RequestError, status: int) -> dict[str, Any]:
    """Returns the JSON body of a refused request.

    Args:
        error: Reason for the refusal.
        status: HTTP status of the reply.
    """
    kind = KINDS.get(status, "BadRequestError")
    return {"error": {"message": str(error), "type": kind, "param": None, "code": status}}


def failure(head: ReplyHead, reason: RequestError, status: int) -> str:
    """Returns the server-sent events that end a failed stream, as text. `status` is the HTTP status of a reply without
    a stream."""
    return event(error(reason, status)) + "data: [DONE]\n\n"


def _frame(head: ReplyHead) -> dict[str, Any]:
    id = head.body.get("request_id")
    return {"request_id": id if isinstance(id, str) else head.id, "output_mode": _mode(head)}


def _mode(head: ReplyHead) -> str:
    return str(head.body.get("output_mode", "tokens"))


def _prompt(head: ReplyHead) -> list[int] | None:
    return head.body["token_ids"] if head.body.get("return_token_ids") else None


def _choice(head: ReplyHead, reply: PolicyReply) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "length" if reply.finish == "length" else "stop",
        "stop_reason": reply.stop_string,
        "token_ids": list(reply.tokens),
        "routed_experts": None,
        "logprobs": None,
    }
    as_text = _mode(head) == "text"
    if as_text:
        choice["text"] = reply.text
    wanted = (head.body.get("sampling_params") or {}).get("logprobs")
    if wanted is not None and as_text:
        choice["logprobs"] = {"content": token_logprobs(reply.tokens, reply.logprobs, bool(wanted))}
    elif wanted is not None:
        content: list[dict[str, Any]] = [
            {"token_id": token, "logprob": float(value), "rank": None, "top_logprobs": []}
            for token, value in zip(reply.tokens, reply.logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": content}
    return choice


def _usage(reply: PolicyReply) -> dict[str, Any]:
    prompt, completion = reply.prompt_tokens, len(reply.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


TOKENS = Dialect(read=read, write=write, events=events, error=error, failure=failure)
