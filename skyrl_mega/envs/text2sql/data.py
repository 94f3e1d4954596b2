"""Rows for text to SQL: Spider- or BIRD-like folders, or small generated databases."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.records import records
from skyrl_mega.config.command import MOST, integer, path_of
from skyrl_mega.envs.base import Message
from skyrl_mega.envs.row import row
from skyrl_mega.envs.sandbox import CommandLimits, Sandbox
from skyrl_mega.envs.text2sql import small
from skyrl_mega.envs.text2sql.database import Database, schema
from skyrl_mega.envs.text2sql.env import observation

TASK = """You answer questions about an SQLite database with one SQL query.

Database:
{schema}

Question: {question}
{evidence}
You have {turns} turns. In each turn first think inside <think>…</think>. Then either look something up with one query
inside <sql>…</sql>; its rows come back inside <observation>…</observation>. Or, when you are sure, give the final
query inside <solution>…</solution>; it must return exactly what the question asks for."""

FILES = {
    "train": ("train.json", "train.jsonl", "train_spider.json"),
    "test": ("dev.json", "dev.jsonl", "test.json", "test.jsonl"),
}
DATABASES = ("database", "databases", "train_databases", "dev_databases")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data text2sql`."""
    parser.add_argument(
        "--source",
        type=path_of,
        help="a folder as Spider's or BIRD's: train.json(l), dev.json(l) with db_id, question and query (or SQL), and "
        "database/<db_id>/<db_id>.sqlite; without it, small databases are made in OUTPUT/database",
    )
    parser.add_argument("--limit", type=integer(1, MOST), help="rows of each split at most, drawn at random")
    parser.add_argument("--turns", type=integer(1, 1000), default=6, help="turns that the prompt promises (default: 6)")
    parser.add_argument(
        "--schema", type=integer(1, MOST), default=6000, help="characters of a schema that is shown (default: 6000)"
    )
    parser.add_argument(
        "--longest", type=integer(1, MOST), help="characters of a schema; questions to larger databases are left out"
    )
    parser.add_argument(
        "--shots",
        type=integer(0, 1000),
        default=0,
        help="N training questions, with a query, what it returns and the solution, as earlier turns before each "
        "question; they are left out of the rows (default: 0)",
    )


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name (`train.parquet`, `test.parquet`) → rows, from `--source` or small generated databases.

    Without `--source`, first writes the databases to `<output>/database`. The databases of the test rows never occur in
    the training rows. Questions without a database file are left out, and so are questions to a database whose schema
    has more than `--longest` characters, and the `--shots` training questions shown as examples. `--limit` keeps so
    many rows of each split, drawn at random by `args.seed`.

    The databases are read while the rows are iterated, so the errors of a database may come only then.

    Raises:
        UserError: The training rows are fewer than `--shots`, the source is wrong, a file in `<output>/database` is no
            generated database, or a database has a write-ahead log.
        OSError: A file of the source is no database.
        InfrastructureFault: The sandbox for the query of an example (`--shots`) cannot start.
    """
    if args.source is None:
        folder = args.output / "database"
        small.write(folder, args.seed)
        splits = {
            split: [q._asdict() for name in names for q in small.questions(name)]
            for split, names in (
                ("train", [name for name in small.THEMES if name not in small.HELD_OUT]),
                ("test", list(small.HELD_OUT)),
            )
        }
    else:
        folder, splits = _databases(args.source), _splits(args.source)
        tested = {record["db_id"] for record in splits.get("test", [])}
        if "train" in splits:
            splits["train"] = [record for record in splits["train"] if record["db_id"] not in tested]
    if args.longest is not None:
        splits = {split: _with_small_schema(records, folder, args.longest) for split, records in splits.items()}
    rng = np.random.default_rng(args.seed)
    shots = _draw(splits.get("train", []), args.shots, rng)
    if len(shots) < args.shots:
        raise UserError(
            f"the examples are taken from the training rows, and there are only {len(shots)}",
            key="--shots",
            value=args.shots,
        )
    remaining = {split: [record for record in records if record not in shots] for split, records in splits.items()}
    drawn = {split: _draw(records, args.limit, rng) for split, records in remaining.items()}
    examples = [message for record in shots for message in _example(record, folder, args)]
    return {f"{split}.parquet": _rows(records, split, folder, examples, args) for split, records in drawn.items()}


def _databases(source: Path) -> Path:
    for name in DATABASES:
        if (source / name).is_dir():
            return source / name
    raise UserError(f"it has no folder of databases; allowed: {', '.join(DATABASES)}", key="--source", value=source)


def _splits(source: Path) -> dict[str, list[dict[str, Any]]]:
    files = {
        split: file for split, names in FILES.items() for name in reversed(names) if (file := source / name).is_file()
    }
    if not files:
        allowed = ", ".join(name for names in FILES.values() for name in names)
        raise UserError(f"it has no questions; allowed: {allowed}", key="--source", value=source)
    return {split: [_record(r, file, i) for i, r in enumerate(records(file))] for split, file in files.items()}


def _record(record: Any, file: Path, index: int) -> dict[str, Any]:
    """Returns a record with the same keys for Spider (`query`) and BIRD (`SQL`, `evidence`)."""
    fields = dict(record) if isinstance(record, dict) else {}
    values = {
        "db_id": fields.get("db_id"),
        "question": fields.get("question"),
        "query": fields.get("query", fields.get("SQL")),
    }
    for column, value in values.items():
        if not isinstance(value, str) or not value:
            raise UserError("allowed: a string that is not empty", key=f"{file}, row {index}, column {column}")
    return {**values, "evidence": str(fields.get("evidence") or "")}


def _with_small_schema(records: list[dict[str, Any]], folder: Path, longest: int) -> list[dict[str, Any]]:
    """Returns the questions about existing databases with a schema of at most `longest` characters."""
    files = {name: folder / name / f"{name}.sqlite" for name in {record["db_id"] for record in records}}
    small = {name for name, file in files.items() if file.is_file() and len(schema(file, longest + 1)) <= longest}
    return [record for record in records if record["db_id"] in small]


def _draw(records: list[dict[str, Any]], limit: int | None, rng: np.random.Generator) -> list[dict[str, Any]]:
    order = rng.permutation(len(records))[:limit]
    return [records[i] for i in order]


def _question(record: dict[str, Any], text: str, turns: int) -> Message:
    evidence = f"Hint: {record['evidence']}\n" if record.get("evidence") else ""
    content = TASK.format(schema=text, question=record["question"], evidence=evidence, turns=turns)
    return {"role": "user", "content": content}


def _example(record: dict[str, Any], folder: Path, args: argparse.Namespace) -> list[Message]:
    """Returns a question answered in two turns, with the reply of the environment."""
    name, query = record["db_id"], record["query"]
    file = folder / name / f"{name}.sqlite"
    if not file.is_file():
        raise UserError(
            f"{file}, the database of an example, does not exist; add it, or draw other examples with another --seed",
            key="--shots",
            value=args.shots,
        )
    table = Database(file, Sandbox(CommandLimits(processes=4)), shown=5).query(query, 30.0)
    return [
        _question(record, schema(file, args.schema), args.turns),
        {"role": "assistant", "content": f"<think>I try a query.</think>\n<sql>{query}</sql>"},
        {"role": "user", "content": observation(table.text(300), args.turns - 1)},
        {"role": "assistant", "content": f"<think>That answers it.</think>\n<solution>{query}</solution>"},
    ]


def _rows(
    records: list[dict[str, Any]], split: str, folder: Path, examples: list[Message], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    schemas: dict[str, str | None] = {}
    for index, record in enumerate(records):
        name = record["db_id"]
        if name not in schemas:
            file = folder / name / f"{name}.sqlite"
            schemas[name] = schema(file, args.schema) if file.is_file() else None
        schema_text = schemas[name]
        if schema_text is None:
            continue  # published data sets often lack their largest databases; such questions are unanswerable
        result = row(
            data_source="text2sql",
            prompt=[*examples, _question(record, schema_text, args.turns)],
            env_class="text2sql",
            ground_truth=record["query"],
            extra_info={"split": split, "index": index, "question": record["question"]},
        )
        yield {**result, "db_id": name}
