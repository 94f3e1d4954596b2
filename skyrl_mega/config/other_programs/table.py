"""The table of other programs' settings, read from `table.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("table.yaml")
ALONE = "alone"
"""Key of `table.yaml` with the list of settings unique to this project."""


@dataclass(frozen=True)
class Counterpart:
    """The counterpart of another program's key."""

    here: tuple[str, ...] = ()
    """Settings of this project, as `group.key` or `group.key=value`; empty without a counterpart."""
    note: str = ""
    """Difference between key and counterpart; without a counterpart, the reason or the remedy."""
    values: Mapping[str, Counterpart] = field(default_factory=dict)
    """Value of the key, as written in YAML → counterpart of this value, if it differs from `here`."""


Table = Mapping[str, Counterpart]
"""Key of a program → counterpart in this project."""


@cache
def programs() -> Mapping[str, Table]:
    """Returns the tables of SkyRL, verl, slime, TRL and NeMo-RL, by program name; reads `table.yaml` once per process.
    Do not change the result."""
    return {name: _table(entries) for name, entries in _file().items() if name != ALONE}


def alone() -> list[str]:
    """Returns the settings, and groups of settings, unique to this project: without a counterpart elsewhere."""
    return list(_file()[ALONE])


@cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = yaml.load(FILE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return content


def _table(entries: Mapping[str, Any]) -> Table:
    without = {key: Counterpart(note=note) for note, keys in entries["without"].items() for key in keys}
    return {key: _entry(value) for key, value in entries["here"].items()} | without


def _entry(value: Any) -> Counterpart:
    if isinstance(value, dict):
        by_value = {theirs: _entry(ours) for theirs, ours in value.get("values", {}).items()}
        return Counterpart(_settings(value.get("here", [])), value.get("note", ""), by_value)
    return Counterpart(_settings(value))


def _settings(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
