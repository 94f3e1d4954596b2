"""Reader of parquet files of prompts; every row is checked.

The schema is SkyRL's: `prompt: list<struct<role, content>>` is required; `env_class: string`, `data_source`,
`reward_spec`, `extra_info` and any further column depend on the environment. Rows are counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.records import bounded_batches
from skyrl_mega.common.safe_read import Malformed, check_regular
from skyrl_mega.common.values import shown
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.truths import WrongRows, judged_rows
from skyrl_mega.envs import registry
from skyrl_mega.envs.base import ROLES, BaseTextEnv, Message
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.reward_function import RewardFunctionEnv
from skyrl_mega.envs.tool_calls import calls_of

ROWS_AT_ONCE = 65_536
"""Maximum number of rows read at the same time."""
ALLOWED_PROMPT = "allowed: list<struct<role: string, content: string>>"

LEARNED_KEYS = ("role", "content", "tool_calls")
"""Allowed keys of an assistant's turn in a demonstration."""
ALLOWED_CONVERSATION = "an assistant's message, then those that follow, and an assistant's at the end"


@dataclass(frozen=True)
class Demonstration:
    """A prompt with the conversation to learn."""

    messages: list[Message]
    """The prompt."""
    turns: list[Message]
    """Messages after the prompt: the assistant's messages are learned, the environment's messages are only context."""
    env_class: str = ""
    """Environment of the row, whose tools are shown in the prompt; empty for a row without an environment."""


def load_prompts(
    files: Sequence[str | Path], config: EnvironmentConfig, *, key: str = "data.train", limit: int | None = None
) -> list[Prompt]:
    """Returns the prompts of the files, in order, after checking every row, and after checking that this machine can
    run the rows' environments (`check_ready`). A row whose reward no answer can earn is kept; only too many
    (`truths.MOST_WRONG`) are an error.

    Args:
        files: Parquet files; a prompt's `uid` is its position in the concatenated rows.
        config: Known environment names, and the default for rows without `env_class`.
        key: Setting naming the files, for errors.
        limit: Maximum number of prompts per file; None for all. Rows beyond the limit are checked too, and count in the
            uids of later files.

    Raises:
        UserError: A file, column or row is wrong (with the allowed values), an environment cannot run here, or no
            answer can earn the reward of too many rows.
    """
    prompts, offset, wrong = [], 0, WrongRows(key)
    for file in files:
        for batch, first, rows in _checked_batches(file, config, wrong):
            row_count = len(rows) if limit is None else max(0, limit - first)
            asked = batch["prompt"][:row_count].to_pylist()
            for index, (prompt, row) in enumerate(zip(asked, rows[:row_count], strict=True), start=first):
                name = row.pop("env_class", None) or config.default_name or ""
                prompts.append(Prompt(uid=offset + index, messages=_messages(prompt), env_class=name, extras=row))
        offset += pq.read_metadata(file).num_rows
    wrong.refuse()
    return prompts


def check_files(
    files: Sequence[str | Path],
    config: EnvironmentConfig,
    *,
    key: str = "data.train",
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Checks every row without building prompts, checks that this machine can run the rows' environments
    (`check_ready`), and reports rows in which no answer earns a reward.

    Args:
        files: Parquet files.
        config: Known environment names, and the default for rows without `env_class`.
        key: Setting naming the files, for errors.
        say: Called with a message about rows in which no answer earns a reward.

    Returns:
        The number of rows.

    Raises:
        UserError: A file, column or row is wrong, an environment cannot run here, or no answer can earn the reward of
            too many rows.
    """
    wrong = WrongRows(key)
    count = sum(len(rows) for file in files for _, _, rows in _checked_batches(file, config, wrong))
    wrong.refuse()
    if line := wrong.summary():
        say(line)
    return count


def environments_of(files: Sequence[str | Path], config: EnvironmentConfig) -> list[str]:
    """Returns the names of the environments used by the rows, each once, in the order of their first row. Rows without
    `env_class` have the default environment; without a default they add no name.

    Args:
        files: Parquet files that passed `check_files` or `load_prompts`.
        config: Has the default environment of rows without `env_class`.
    """
    names: dict[str, None] = {}
    for file in files:
        schema = pq.read_schema(file)
        env_classes = pq.read_table(file, columns=["env_class"])["env_class"] if "env_class" in schema.names else [None]
        named = (
            pc.unique(env_classes.cast(pa.string())).to_pylist()
            if isinstance(env_classes, pa.ChunkedArray)
            else env_classes
        )
        names |= dict.fromkeys(name or config.default_name or "" for name in named)
    return [name for name in names if name]


def load_demonstrations(files: Sequence[str | Path], *, key: str = "warmup.files") -> list[Demonstration]:
    """Returns the demonstrations of the files: prompts, with the response or the whole conversation to learn in the
    column `extra_info.demonstration`.

    Args:
        files: Parquet files.
        key: Setting naming the files, for errors.

    Raises:
        UserError: A file, column or row is wrong, a row lacks a demonstration, or the first or last message of a
            demonstration is not the assistant's.
    """
    column = "extra_info.demonstration"
    demonstrations = []
    for file in files:
        for batch, first in _batches(file, key):
            where, responses_column = f"{key}: {file}", _field(batch, "extra_info", "demonstration")
            _check_messages(batch["prompt"], first, where, "prompt")
            _check_words(batch["prompt"], first, where)
            if _is_conversation(responses_column.type):
                _check_messages(responses_column, first, where, column)
                turns = [_messages(conversation) for conversation in responses_column.to_pylist()]
                _check_calls(turns, first, where, column, *LEARNED_KEYS)
                unanswered = [t[0]["role"] != "assistant" or t[-1]["role"] != "assistant" for t in turns]
                _refuse(pa.array(unanswered), first, where, column, f"allowed: {ALLOWED_CONVERSATION}")
            else:
                _refuse(
                    pc.invert(_non_empty(responses_column)),
                    first,
                    where,
                    column,
                    "it is missing; allowed: text, or messages",
                )
                turns = [[{"role": "assistant", "content": response}] for response in responses_column.to_pylist()]
            prompts = [_messages(prompt) for prompt in batch["prompt"].to_pylist()]
            _check_calls(prompts, first, where, "prompt")
            named = batch["env_class"].to_pylist() if "env_class" in batch.schema.names else [None] * len(batch)
            names = [name or "" for name in named]
            demonstrations += [Demonstration(*parts) for parts in zip(prompts, turns, names, strict=True)]
    return demonstrations


def _checked_batches(
    file: str | Path, config: EnvironmentConfig, wrong: WrongRows
) -> Iterator[tuple[pa.RecordBatch, int, list[dict[str, Any]]]]:
    """Yields batches of a file, the number of each batch's first row, and the rows without prompts."""
    where = f"{wrong.key}: {file}"
    for batch, first in _batches(file, wrong.key):
        _check_messages(batch["prompt"], first, where, "prompt")
        if batch["prompt"].type.value_type.get_field_index("tool_calls") >= 0:
            _check_calls([_messages(prompt) for prompt in batch["prompt"].to_pylist()], first, where, "prompt")
        names = _environments(batch, first, where, config)
        rows = judged_rows(batch, names, first, where, config)
        wrong.check(rows, names, file, first, config)
        yield batch, first, rows


def _batches(file: str | Path, key: str) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yields batches of a file with the number of their first row, after checking the file and its columns."""
    path = Path(file)
    if not path.exists():
        raise UserError(
            f"{file} does not exist; allowed: parquet files; `python -m skyrl_mega.data` makes some", key=key
        )
    try:
        check_regular(path)
        with pq.ParquetFile(path) as reader:
            _check_columns(reader.schema_arrow, file, key)
            if reader.metadata.num_rows == 0:
                raise UserError(f"{file} has no rows", key=key)
            first = 0
            for batch in bounded_batches(reader, ROWS_AT_ONCE):
                _check_text(batch, first, f"{key}: {file}")
                yield batch, first
                first += len(batch)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{file} cannot be read as parquet ({reason})", key=key, fix="write it again") from error


def _check_columns(schema: pa.Schema, file: str | Path, key: str) -> None:
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise UserError(
            f"{file} has two columns {shown(twice[0])}", key=key, fix="write it again with one of each name"
        )
    if "prompt" not in schema.names:
        raise UserError(f"{file} has no column prompt (it has {', '.join(schema.names)})", key=key, fix=ALLOWED_PROMPT)
    kind = schema.field("prompt").type
    if not _is_conversation(kind):
        raise UserError(f"{file}, column prompt: its type is {kind}", key=key, fix=ALLOWED_PROMPT)
    if "env_class" in schema.names and not _is_string(schema.field("env_class").type):
        raise UserError(
            f"{file}, column env_class: its type is {schema.field('env_class').type}; allowed: string", key=key
        )


def _check_text(batch: pa.RecordBatch, first: int, where: str) -> None:
    """Refuses text with invalid UTF-8 in any column: a parquet file may mislabel other bytes as UTF-8."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        column = next((name for name in batch.schema.names if _is_broken(batch[name])), "?")
        at = next((row for row in range(len(batch)) if _is_broken(batch[column].slice(row, 1).take([0]))), 0)
        raise UserError(
            "its text is not valid UTF-8",
            key=f"{where}, row {first + at}, column {column}",
            fix="write the file again, with text as UTF-8",
        ) from error


def _is_broken(values: pa.Array) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return True
    return False


def _check_messages(conversations: pa.Array, first: int, where: str, column: str) -> None:
    """Refuses messages without a role or content."""
    empty = pc.equal(pc.fill_null(pc.list_value_length(conversations), 0), 0)
    _refuse(empty, first, where, column, f"it is empty; {ALLOWED_PROMPT}")
    row_of, messages = pc.list_parent_indices(conversations), pc.list_flatten(conversations)
    role, content = pc.struct_field(messages, "role"), pc.struct_field(messages, "content")
    for name, values, bad, allowed in (
        ("role", role, pc.invert(pc.is_in(_plain(role), pa.array(ROLES))), ", ".join(ROLES)),
        ("content", content, pc.is_null(content), "a string"),
    ):
        at = pc.index(bad, True).as_py()
        if at >= 0:
            row = first + row_of[at].as_py()
            raise UserError(
                f"{name} is {repr(values[at].as_py())[:80]}; allowed: {allowed}",
                key=f"{where}, row {row}, column {column}",
            )


def _check_words(conversations: pa.Array, first: int, where: str, selected: pa.Array | None = None) -> None:
    """Refuses prompts without a word in any message; checks only the rows selected by `selected`, if given."""
    row_of, messages = pc.list_parent_indices(conversations), pc.list_flatten(conversations)
    worded = pc.is_in(
        pa.array(range(len(conversations))), row_of.filter(_non_blank(pc.struct_field(messages, "content")))
    )
    wordless = pc.invert(worded) if selected is None else pc.and_(pc.invert(worded), selected)
    _refuse(wordless, first, where, "prompt", "all its messages are blank; allowed: at least one message with text")


def _writes_prompts(name: str, config: EnvironmentConfig) -> bool:
    """Returns True if an environment may write the first messages itself, so the row's prompt is a placeholder."""
    kind = registry.resolve(name, config)
    built_in = name in registry.BUILT_IN and name not in config.classes
    inits = (BaseTextEnv.init, RewardFunctionEnv.init)
    return getattr(kind, "init", None) not in inits and not (built_in and kind.requires_ground_truth)


def _environments(batch: pa.RecordBatch, first: int, where: str, config: EnvironmentConfig) -> list[str]:
    """Returns the environment of each row; all environments are resolved and ready."""
    if "env_class" in batch.schema.names:
        env_class = pc.if_else(_non_empty(batch["env_class"]), _plain(batch["env_class"]), config.default_name)
    else:
        env_class = pa.array([config.default_name] * len(batch), pa.string())
    _refuse(
        pc.is_null(env_class),
        first,
        where,
        "env_class",
        f"it is empty and environment.default is not set; allowed: {', '.join(registry.names(config))}",
    )
    used = pc.unique(env_class).to_pylist()
    for name in used:
        if name not in registry.names(config):
            unknown = pc.equal(env_class, name)
            _refuse(unknown, first, where, "env_class", registry.unknown_name(name, config, in_row=True))
    for name in used:
        registry.check_ready(name, config)
        registry.check_columns(name, batch.schema.names, where, config)
    row_prompted = [name for name in used if not _writes_prompts(name, config)]
    _check_words(batch["prompt"], first, where, pc.is_in(env_class, pa.array(row_prompted, pa.string())))
    environments: list[str] = env_class.to_pylist()
    return environments


def _refuse(bad: pa.Array, first: int, where: str, column: str, problem: str) -> None:
    """Raises UserError for the first row with a true value in `bad`."""
    index = pc.index(bad, True).as_py()
    if index >= 0:
        raise UserError(problem, key=f"{where}, row {first + index}, column {column}")


def _field(batch: pa.RecordBatch, column: str, name: str) -> pa.Array:
    """Returns a field of a struct column; nulls if the column or the field is absent."""
    if column in batch.schema.names:
        kind = batch.schema.field(column).type
        if pa.types.is_struct(kind) and kind.get_field_index(name) >= 0:
            return pc.struct_field(batch[column], name)
    return pa.nulls(len(batch))


def _non_empty(values: pa.Array) -> pa.Array:
    """Returns a mask of the non-empty strings."""
    if not _is_string(values.type):
        return pa.array([False] * len(values))
    return pc.fill_null(pc.greater(pc.binary_length(_plain(values)), 0), False)


def _non_blank(texts: pa.Array) -> pa.Array:
    """Returns a mask of the texts with more than spaces; missing texts, refused by another check, count as true."""
    return pc.fill_null(pc.greater(pc.binary_length(pc.utf8_trim_whitespace(_plain(texts))), 0), True)


def _plain(strings: pa.Array) -> pa.Array:
    return strings.cast(pa.string())


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_conversation(kind: pa.DataType) -> bool:
    """Returns True for a list of structs with the strings `role` and `content`."""
    if not (_is_list(kind) and pa.types.is_struct(kind.value_type)):
        return False
    fields = {f.name: f.type for f in kind.value_type}
    return _is_string(fields.get("role")) and _is_string(fields.get("content"))


def _is_string(kind: pa.DataType | None) -> bool:
    if kind is not None and pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind is not None and (pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _messages(prompt: Iterable[dict[str, Any]]) -> list[Message]:
    """Returns messages without keys that are null, because only other rows use these keys."""
    return [{k: _without_nulls(v) for k, v in message.items() if v is not None} for message in prompt]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _check_calls(conversations: Sequence[list[Message]], first: int, where: str, column: str, *allowed: str) -> None:
    """Refuses tool calls that no chat template can write. With `allowed`, also refuses other keys of the assistant."""
    for row, message in ((row, message) for row, messages in enumerate(conversations, first) for message in messages):
        try:
            calls_of(message)
        except Malformed as error:
            raise UserError(f"tool_calls: {error}", key=f"{where}, row {row}, column {column}") from error
        unlearned = (
            [key for key, value in message.items() if value and key not in allowed]
            if allowed and message["role"] == "assistant"
            else []
        )
        if unlearned:
            raise UserError(
                f"{shown(unlearned[0])} of an assistant's message is not trained on; allowed are "
                f"{', '.join(allowed)}; write thoughts into content, as the model writes them",
                key=f"{where}, row {row}, column {column}",
            )
