"""Rules for the values of other programs' settings, read from `translation.yaml`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from skyrl_mega.common.values import shown
from skyrl_mega.config.other_programs.table import Counterpart

FILE = Path(__file__).with_name("translation.yaml")
OFF = (
    *(None, False, 0, "", "no", "none"),
    *("adam", "adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused", "torch.optim.adamw"),
)
"""Values with which a setting without a counterpart makes no difference to training."""


@dataclass(frozen=True)
class Conversion:
    """A conversion of a value, by name, with its argument."""

    name: str
    """Name in `conversions.CONVERSIONS`, or `figures`."""
    argument: Any = None
    """Second value from `translation.yaml`; the meaning depends on the conversion."""


@dataclass(frozen=True)
class Switch:
    """A setting of another program that turns other settings on, depending on its value."""

    default: Any
    """The program's default of the switch."""
    turns_on: Mapping[str, tuple[str, ...]]
    """Value of the switch, as written in YAML → keys with an effect under this value; `group.*` stands for all keys
    below the group."""

    @property
    def governed(self) -> set[str]:
        """All keys and `group.*` patterns in `turns_on`: without an effect under every other value of the switch."""
        return {key for keys in self.turns_on.values() for key in keys}

    def turns_on_key(self, key: str, value: str) -> bool:
        """Returns True if `key` has an effect while the switch has the value, as written in YAML."""
        return _among(key, self.turns_on.get(value, ()))

    def governs(self, key: str) -> bool:
        """Returns True if only some values of the switch give `key` an effect; also for the switch itself, if it is in
        its own group."""
        return _among(key, self.governed)

    def governs_group(self, key: str) -> bool:
        """Returns True if the switch governs `key` only by a pattern `group.*`, not by its own name."""
        return self.governs(key) and key not in self.governed


def _among(key: str, names: Iterable[str]) -> bool:
    """Returns True if `key` is one of the names, or below a name that ends in `.*`."""
    return any(key == name or (name.endswith(".*") and key.startswith(name[:-1])) for name in names)


@dataclass(frozen=True)
class Rules:
    """The translation rules of a program."""

    keys: Mapping[str, Conversion]
    """Key of the program, or `key=value` for a single value → conversion."""
    switches: Mapping[str, Switch]
    """Key of the program → switch."""
    defaults: Mapping[str, Any]
    """Key of the program → its default, translated if the key is not given."""
    fixed: Mapping[str, Any]
    """Our settings, with values, for fixed behavior of the program."""


@cache
def rules(program: str) -> Rules:
    """Returns the translation rules of a program (SkyRL, verl, slime, TRL or NeMo-RL), from `translation.yaml`. Raises
    KeyError for another name."""
    content = _file()
    switches = {
        key: Switch(value["default"], {name: tuple(keys) for name, keys in value.items() if name != "default"})
        for key, value in content["switches"].get(program, {}).items()
    }
    keys = {key: _conversion(value) for key, value in content["keys"][program].items()}
    return Rules(keys, switches, content["defaults"][program], content["fixed"].get(program, {}))


@cache
def notes() -> Mapping[str, Conversion]:
    """Returns note of an entry in `other_programs/table.yaml` → conversion for all keys with this note. Read from
    `translation.yaml` once per process; do not change it."""
    return {" ".join(note.split()): _conversion(value) for note, value in _file()["notes"].items()}


def needs_look(note: str, value: Any) -> bool:
    """Returns True if dropping a value changes training, so the user must look at it.

    Args:
        note: Note of the key's entry in the table; `translation.yaml` lists the notes of such keys.
        value: The value. A value that means "off" needs no look.
    """
    off = value in OFF or value in ([], {}) or (isinstance(value, str) and value.casefold() in OFF)
    return not off and " ".join(note.split()) in _file()["look"]


def conversion(
    program: str, key: str, entry: Counterpart, value: Any = None, *, by_value: bool = False
) -> Conversion | None:
    """Returns the conversion for a key of another program; None if neither the key nor its note has a conversion.
    Raises KeyError for an unknown program.

    Args:
        program: The other program.
        key: The key.
        entry: The key's entry in the table.
        value: The value of the key; used only with `by_value`.
        by_value: True to return only a conversion listed for exactly this value (`key=value`).
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
