"""Passages of a corpus, from JSON lines or parquet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.records import records

SUFFIXES = (".jsonl", ".parquet")
"""Allowed suffixes of a corpus file."""
FORM = "allowed: id, title and text, or id and contents, all strings (an id may be a whole number)"


@dataclass(frozen=True)
class Passage:
    """A passage of a corpus."""

    id: str
    """Id in the corpus file, as text."""
    contents: str
    """`"title"` in quotes, a line break, the text: the form of Search-R1's corpora and clients."""


def read_passages(file: Path) -> Iterator[Passage]:
    """Yields every passage of a `.jsonl` or `.parquet` file in order, without loading the whole file.

    Raises:
        UserError: The file cannot be read, or a row is not a valid passage; raised during the iteration.
    """
    if file.suffix not in SUFFIXES or not file.is_file():
        raise UserError(f"allowed: an existing file, {' or '.join(SUFFIXES)}", key="--corpus", value=file)
    for index, record in enumerate(records(file)):
        yield _passage(record, f"{file}, row {index}")


def fingerprint(file: Path) -> str:
    """Returns 32 hexadecimal digits, a hash of the file's content. Raises OSError if the file cannot be read."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def contents(title: str, text: str) -> str:
    """Returns title and text as one string, `"title"` in quotes, a line break, the text: the form of Search-R1's
    corpora."""
    return f'"{title}"\n{text}'


def _passage(record: Any, where: str) -> Passage:
    if not isinstance(record, dict):
        raise UserError("it is no object", key=where, fix=FORM)
    name = record.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise UserError(f"{where}, id: {name!r}", fix=FORM)
    if isinstance(record.get("contents"), str):
        return Passage(str(name), record["contents"])
    for key in ("title", "text"):
        if not isinstance(record.get(key), str):
            raise UserError(f"{where}, {key}: {record.get(key)!r}", fix=FORM)
    return Passage(str(name), contents(record["title"], record["text"]))
