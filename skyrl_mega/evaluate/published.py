"""Published results for comparison with ours, read from `published.yaml`, which names the sources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class TestSetRow:
    """A test set in a published table."""

    title: str
    names: tuple[str, ...]
    """Possible names of our corresponding set, in the form returned by `normalized`."""
    size: int
    """Examples of the full set."""


@dataclass(frozen=True)
class ModelColumn:
    """A model in a published table."""

    title: str
    values: tuple[float | None, ...]
    """Scores by row."""
    average: float | None = None
    """The published average."""


@dataclass(frozen=True)
class PublishedTable:
    """A published table of a score."""

    title: str
    score: str
    """Our corresponding score: `accuracy`, `pass` or `reward`."""
    rows: tuple[TestSetRow, ...]
    columns: tuple[ModelColumn, ...]
    note: str = ""
    """Sentence below the table."""


def _read(file: Path) -> dict[str, tuple[PublishedTable, ...]]:
    """Returns the tables of a YAML file by name."""

    def table(rows: list[dict[str, Any]], columns: list[dict[str, Any]], **rest: str) -> PublishedTable:
        return PublishedTable(
            rows=tuple(TestSetRow(**{**row, "names": tuple(row["names"])}) for row in rows),
            columns=tuple(ModelColumn(**{**column, "values": tuple(column["values"])}) for column in columns),
            **rest,
        )

    content: dict[str, list[dict[str, Any]]] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {name: tuple(table(**entry) for entry in tables) for name, tables in content.items()}


PUBLISHED = _read(Path(__file__).with_name("published.yaml"))
"""Tables by the name given to `--published`."""


def normalized(name: str) -> str:
    """Returns a set's name in lower case, without other characters than letters and digits, and without the prefix
    `searchR1_` of SkyRL's users."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("searchr1")


def matching_tables(names: Sequence[str]) -> list[str]:
    """Returns the keys of `PUBLISHED` whose tables have a row for any of these sets, in the order of `PUBLISHED`; [] if
    none has.

    Args:
        names: Names of our sets.
    """
    ours = {normalized(name) for name in names}
    return [
        key for key, tables in PUBLISHED.items() if any(ours & set(row.names) for table in tables for row in table.rows)
    ]
