"""Reading of the fields of a request's JSON. Every function raises `BadRequest`, naming the field."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from skyrl_mega.common.safe_read import Malformed
from skyrl_mega.common.values import shown
from skyrl_mega.envs.base import ROLES, Message
from skyrl_mega.envs.tool_calls import calls_of
from skyrl_mega.rollout.endpoint.requests import BadRequest

OPENAI = (
    *("model", "tools", "stream", "stream_options", "user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
"""Parameters of OpenAI's APIs with their usual effect, or without any effect at all."""
OPENAI_FIXED: Mapping[str, tuple[Any, ...]] = {"tool_choice": ("auto",), "parallel_tool_calls": (True,)}
"""Parameter of OpenAI's APIs → values equal to the fixed behaviour."""
MOST_REPLIES = 16
"""Most replies of a request (`n`)."""
MOST_STOPS = 16
"""Most strings of `stop`."""
MOST_IGNORED, LONGEST_NAME = 32, 64
"""Most reported names of ignored parameters, and most characters of a name: both come from the agent."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part with text → field with the text."""
ALLOWED_ROLES = ", ".join(ROLES)


def mapping(value: Any, place: str) -> Mapping[str, Any]:
    """Returns a JSON object unchanged. Raises BadRequest for any other value, with `place`, the value's place in the
    request, such as `tools[0]`."""
    if not isinstance(value, Mapping):
        raise BadRequest(f"{place}: {shown(value)} is not an object")
    return value


def items(value: Any, place: str) -> list[Mapping[str, Any]]:
    """Returns the objects in a list, [] for None. Raises BadRequest, with `place`, the value's place in the request,
    unless the value is a list of objects."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"{place}: {shown(value)} is not a list")
    return [mapping(item, f"{place}[{index}]") for index, item in enumerate(value)]


def string(value: Any, place: str) -> str:
    """Returns a text unchanged. Raises BadRequest for any other value, with `place`, the value's place in the
    request."""
    if not isinstance(value, str):
        raise BadRequest(f"{place}: {shown(value)} is not a string")
    return value


def number(value: Any, place: str, most: int | None = None) -> int | None:
    """Returns a whole number from 1 to `most` (None: no limit); None for None. Raises BadRequest for any other value,
    with `place`, the value's place in the request."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
        raise BadRequest(f"{place}: {shown(value)} is not a whole number from 1{f' to {most}' if most else ''}")
    return value


def stops(value: Any, place: str = "stop") -> tuple[str, ...]:
    """Returns the stop strings of a request, given as a string, a list or None; () for None.

    Raises:
        BadRequest: The value is something else, contains an empty string, or has more than `MOST_STOPS` strings.
    """
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(isinstance(text, str) and text for text in strings):
        raise BadRequest(f"{place}: {shown(value)} is not a list of strings that are not empty")
    if len(strings) > MOST_STOPS:
        raise BadRequest(f"{place}: at most {MOST_STOPS} strings")
    return tuple(strings)


def text_of(content: Any, place: str) -> str:
    """Returns the text of a message's content: a string, None ("" then), or a list of text parts. Parts are joined by a
    line end, as by vLLM.

    Raises:
        BadRequest: The content is something else, or has a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(items(content, place)):
        kind = part.get("type", "text")
        if kind not in TEXT_PARTS:
            raise BadRequest(f"{place}[{index}]: the policy reads only text, not {shown(kind)}")
        texts.append(string(part.get(TEXT_PARTS[kind]), f"{place}[{index}].{TEXT_PARTS[kind]}"))
    return "\n".join(texts)


def tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Returns tool calls in the form of chat templates, with arguments as mappings. Raises BadRequest, with `place`, if
    `calls` is no list of calls."""
    try:
        return calls_of({"tool_calls": calls})
    except Malformed as error:
        raise BadRequest(f"{place}.tool_calls: {error}") from error


def assistant(content: str, calls: list[dict[str, Any]], reasoning: str = "") -> Message:
    """Returns an assistant message in the form of chat templates, without keys for empty `calls` or `reasoning`."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def in_order_of_calls(messages: list[Message]) -> list[Message]:
    """Returns the messages with the results of parallel calls in the order of the calls. Agents send the results in any
    order, and chat templates do not show the ids of calls. Results of unknown calls follow."""
    ordered: list[Message] = []
    places: dict[Any, int] = {}
    results: list[Message] = []
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            results.append(message)
            continue
        ordered += sorted(results, key=lambda result: places.get(result.get("tool_call_id"), len(places)))
        results = []
        places = {call.get("id"): place for place, call in enumerate(message.get("tool_calls") or ())}
        ordered.append(message)
    return ordered[:-1]


def call(id: Any, name: Any, arguments: Any, place: str) -> dict[str, Any]:
    """Returns a tool call in the form of chat templates, from the arguments as mapping or JSON text. Raises BadRequest,
    with `place`, if the name or the arguments are invalid."""
    return tool_calls([{"id": id, "function": {"name": name, "arguments": arguments}}], place)[0]


def tool(entry: Mapping[str, Any], schema: str, place: str) -> dict[str, Any]:
    """Returns an offered tool in the form of chat templates.

    Args:
        entry: Object with `name`, `description` and the parameters' schema.
        schema: Key of the schema.
        place: Place of the object in the request, for errors.

    Raises:
        BadRequest: The name is missing, or a value has another type.
    """
    function: dict[str, Any] = {"name": string(entry.get("name"), f"{place}.name")}
    if entry.get("description") is not None:
        function["description"] = string(entry["description"], f"{place}.description")
    if entry.get(schema) is not None:
        function["parameters"] = dict(mapping(entry[schema], f"{place}.{schema}"))
    return {"type": "function", "function": function}


def tools(
    entries: Any, kinds: Collection[str | None], read: Callable[[Mapping[str, Any], str], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the offered functions in the form of chat templates, and a name for every tool of another type: the
    policy is not offered these.

    Args:
        entries: The tools of a request; None: no tools.
        kinds: Types of the tools that are functions; None: a tool without a type.
        read: Reads a function from its entry and the entry's place.
    """
    functions, unknown = [], []
    for index, entry in enumerate(items(entries, "tools")):
        if entry.get("type") in kinds:
            functions.append(read(entry, f"tools[{index}]"))
        else:
            unknown.append(f"tools.{entry.get('type')}")
    return functions, unknown


def ignored(
    body: Mapping[str, Any],
    followed: Collection[str],
    further: Iterable[str] = (),
    fixed: Mapping[str, tuple[Any, ...]] | None = None,
) -> tuple[str, ...]:
    """Returns the names of the given parameters without effect on the run, sorted: at most `MOST_IGNORED`, each cut to
    `LONGEST_NAME` characters.

    Args:
        body: The request's parameters; a value of None counts as not given.
        followed: Names not to report: parameters with their usual effect, and parameters without an effect anywhere.
        further: Names to report in any case.
        fixed: Parameter → values equal to the fixed behaviour, which are not reported.
    """
    given = {name for name, value in body.items() if value is not None and value not in (fixed or {}).get(name, ())}
    return tuple(name[:LONGEST_NAME] for name in sorted((given - {*followed}).union(further))[:MOST_IGNORED])
