"""Rows for the next tool call of an agent, from recorded conversations in the form of NeMo-Gym."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, parse_json, read_lines
from skyrl_mega.common.values import shown
from skyrl_mega.config.command import ROWS, integer, path_of
from skyrl_mega.envs.base import Message
from skyrl_mega.envs.row import row

ITEMS = ("message", "reasoning", "function_call", "function_call_output")
"""Allowed types of an item of a conversation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data tool_choice`."""
    parser.add_argument(
        "--source",
        type=path_of,
        required=True,
        help="lines of JSON: responses_create_params (input, tools) and expected_action, such as swe1.jsonl of "
        "Nemotron-RL-Super-Training-Blends",
    )
    parser.add_argument("--test", type=integer(0, ROWS), default=100, help="held-out rows, the last (default: 100)")
    parser.add_argument("--name", default="tool_choice", help="the rows' data_source (default: %(default)s)")


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name (`train.parquet`, `test.parquet`) → rows, in the order of the file: the last `--test` lines are
    the test rows. Without test rows, `test.parquet` is left out.

    Raises:
        UserError: The file has no more lines than held-out rows, or a line is too long; while rows are read, a line has
            another form.
        OSError: The file cannot be read.
    """
    count = sum(1 for _ in read_lines(args.source))
    if count <= args.test:
        raise UserError(f"{args.source} has {count} lines", key="--test", value=args.test, fix="give a smaller number")
    split = count - args.test
    files = {"train.parquet": _rows(args.source, args.name, 0, split)}
    return files | ({"test.parquet": _rows(args.source, args.name, split, count)} if args.test else {})


def _rows(file: Path, name: str, first: int, end: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of the lines from `first` to `end`, counted from 0 without empty lines."""
    for index, (offset, data) in enumerate(read_lines(file)):
        if not first <= index < end:
            continue
        try:
            record = parse_json(data)
            asked = _field(record, "responses_create_params", dict)
            truth = _expected(_field(record, "expected_action", dict))
            yield row(
                data_source=name,
                prompt=_messages(asked),
                env_class="tool_choice",
                ground_truth=json.dumps(truth),
                extra_info={"tools": json.dumps(_functions(asked)), "index": index},
            )
        except Malformed as error:
            raise UserError(f"{file}, the line at byte {offset}: {error}") from error


def _field(record: Any, key: str, kind: type) -> Any:
    """Returns a value of an object. Raises Malformed without such a value."""
    value = record.get(key) if isinstance(record, Mapping) else None
    if not isinstance(value, kind):
        raise Malformed(f"{key} = {shown(value)}: allowed is a value of JSON's type {kind.__name__}")
    return value


def _expected(action: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the calls of an expected action; [] for a message."""
    kind = action.get("type")
    if kind == "message":
        return []
    calls = _field(action, "calls", list) if kind == "function_call_batch" else [action]
    if kind not in ("function_call", "function_call_batch"):
        raise Malformed(f"expected_action.type = {shown(kind)}: allowed: message, function_call, function_call_batch")
    return [{"name": _field(call, "name", str), "arguments": _arguments(call)} for call in calls]


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments")
    value = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(value, dict):
        raise Malformed(f"arguments = {shown(arguments)}: allowed is a JSON object")
    return value


def _functions(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns name, description and parameters of the offered functions."""
    functions = []
    for tool in _field(asked, "tools", list):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
        name = _field(function, "name", str)
        parameters = function.get("parameters") or {"type": "object"}
        functions.append({"name": name, "description": function.get("description") or "", "parameters": parameters})
    return functions


def _messages(asked: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of a request of OpenAI's responses; items of one assistant message are merged.

    Every message has the same keys, with calls as JSON text, so that all rows have the same columns.
    """
    messages: list[Message] = []
    if instructions := asked.get("instructions"):
        messages.append(_message("system", str(instructions)))
    for item in _field(asked, "input", list):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            _append(messages, _message(_field(item, "role", str), _text(item.get("content"))))
        elif kind == "reasoning":
            thoughts = _text(item.get("content") or item.get("summary") or "")
            _append(messages, _message("assistant", "", reasoning_content=thoughts))
        elif kind == "function_call":
            function = {"name": _field(item, "name", str), "arguments": _arguments(item)}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            _append(messages, _message("assistant", "", tool_calls=[call]))
        elif kind == "function_call_output":
            result = _text(item.get("output"))
            messages.append(_message("tool", result, tool_call_id=str(item.get("call_id"))))
        else:
            raise Malformed(f"input: an item of type {shown(kind)}; allowed: {', '.join(ITEMS)}")
    return [{**message, "tool_calls": json.dumps(message["tool_calls"])} for message in messages]


def _message(role: str, content: str, **more: Any) -> Message:
    empty = {"tool_calls": [], "tool_call_id": "", "reasoning_content": ""}
    return {"role": role, "content": content, **empty, **more}


def _append(messages: list[Message], message: Message) -> None:
    """Adds a message, or merges the message with the last if both are the assistant's and fill different keys."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or message["role"] != "assistant":
        messages.append(message)
    elif message["tool_calls"]:
        last["tool_calls"] += message["tool_calls"]
    elif message["content"] and not last["content"] and not last["tool_calls"]:
        last["content"] = message["content"]
    else:
        messages.append(message)


def _text(content: Any) -> str:
    """Returns the text of a message's content: a text, or parts with texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise Malformed(f"content = {shown(content)}: allowed is a text, or a list of parts with a text")
    return "".join(_field(part, "text", str) for part in content)
