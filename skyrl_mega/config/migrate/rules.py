"""Rules for the values of other programs' settings, read from `translation.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from skyrl_mega.common.values import shown
from skyrl_mega.config.other_programs.table import Counterpart

FILE = Path(__file__).with_name("translation.yaml")
OFF = (None, False, 0, "", "no", "none", "adam", "adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused")
"""Values of settings without a counterpart that leave training as it is here."""


@dataclass(frozen=True)
class Conversion:
    """A named conversion of `convert.py` with its argument."""

    name: str
    argument: Any = None


@dataclass(frozen=True)
class Switch:
    """A setting whose value decides which other settings have an effect."""

    default: Any
    turns_on: Mapping[str, tuple[str, ...]]
    """Value, as YAML writes it → keys that have an effect with this value."""

    @property
    def governed(self) -> set[str]:
        """Keys that have an effect only with some value of the switch."""
        return {key for keys in self.turns_on.values() for key in keys}


@dataclass(frozen=True)
class Rules:
    """The rules of a program."""

    keys: Mapping[str, Conversion]
    switches: Mapping[str, Switch]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    """Our settings for behavior that no key of the program names."""


@cache
def rules(program: str) -> Rules:
    """Returns the rules of a program as named in `other_programs/table.yaml`."""
    content = _file()
    switches = {
        key: Switch(value["default"], {name: tuple(keys) for name, keys in value.items() if name != "default"})
        for key, value in content["switches"].get(program, {}).items()
    }
    keys = {key: _conversion(value) for key, value in content["keys"][program].items()}
    return Rules(keys, switches, content["defaults"][program], content["fixed"].get(program, {}))


@cache
def notes() -> Mapping[str, Conversion]:
    """Returns the conversion for each note of the table."""
    return {" ".join(note.split()): _conversion(value) for note, value in _file()["notes"].items()}


def needs_look(note: str, value: Any) -> bool:
    """True for a value that changes training and has no counterpart, by the note of its entry."""
    off = value in OFF or value in ([], {}) or (isinstance(value, str) and value.casefold() in OFF)
    return not off and " ".join(note.split()) in _file()["look"]


def conversion(
    program: str, key: str, entry: Counterpart, value: Any = None, *, by_value: bool = False
) -> Conversion | None:
    """Returns the conversion for the value of a key; None if neither the key nor the note of its entry has one.

    Args:
        program: The program of the key.
        key: The key.
        entry: The key's entry in the table.
        value: The value of the key.
        by_value: True to look for a conversion of this value alone.
    """
    text = value if isinstance(value, str) else shown(value)
    named = rules(program).keys
    if by_value:
        return named.get(f"{key}={text}")
    return named.get(key) or notes().get(" ".join(entry.note.split()))


def _conversion(value: Any) -> Conversion:
    if isinstance(value, dict):
        [(name, argument)] = value.items()
        return Conversion(name, argument)
    return Conversion(value)


@cache
def _file() -> dict[str, Any]:
    content: dict[str, Any] = yaml.load(FILE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return content
