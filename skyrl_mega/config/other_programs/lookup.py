"""What to say to somebody who types a setting of another program, and what ours are called there."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from skyrl_mega.config import megatron_options
from skyrl_mega.config.checks import ENGINE_ARGUMENTS
from skyrl_mega.config.keys import keys as settings
from skyrl_mega.config.other_programs import skyrl, skyrl_older, slime, trl, verl, verl_rollout
from skyrl_mega.config.other_programs.entry import Entry, Table, none, to
from skyrl_mega.config.values import shown

PROGRAMS: Mapping[str, Table] = {
    "SkyRL": {**skyrl.KEYS, **skyrl_older.KEYS},
    "verl": {**verl.KEYS, **verl_rollout.KEYS},
    "slime": slime.KEYS,
    "TRL": trl.KEYS,
}
DECIDED: Mapping[str, Mapping[str, str | None]] = {"rollout.options": ENGINE_ARGUMENTS, **megatron_options.DENIED}
"""Setting of free keys → what may not stand in it, and the setting to use instead."""
PAGE = "docs/migration.md"


def answer(key: str, value: Any = None, typed: str = "") -> str | None:
    """One line: whose key it is, and what it is here; None for a key of no other program.

    Args:
        key: As it was given: `trainer.epochs`, `--rollout-batch-size`.
        value: What it was given, as YAML reads it.
        typed: How it was written, if not as `key`.
    """
    found = {program: entry for program, table in PROGRAMS.items() if (entry := find(table, key))}
    if not found:
        return None
    text = value if isinstance(value, str) else shown(value)
    by_value = next((entry.values[text] for entry in found.values() if text in entry.values), None)
    entry = by_value or next(iter(found.values()))
    whose = " and ".join(f"{program}'s" for program in found)
    given = f"{typed or key}={text}" if by_value else typed or key
    return with_page(f"{given} is {whose}; here {told(entry)}")


def with_page(line: str) -> str:
    """The line and the page of the tables, behind a page that it ends with itself."""
    return line.removesuffix(")") + f", {PAGE})" if re.search(r"\(docs/[\w-]+\.md\)$", line) else f"{line} ({PAGE})"


def told(entry: Entry) -> str:
    """What stands for it here, in words."""
    if not entry.here:
        return f"there is none: {entry.note}"
    return f"it is {' and '.join(entry.here)}" + (f": {entry.note}" if entry.note else "")


def find(table: Table, key: str) -> Entry | None:
    """The entry of a key: its own, or that of the nearest `.*` above it."""
    if entry := table.get(key):
        return entry
    if key.startswith("--"):
        return next((e for k, e in table.items() if k.endswith("-*") and key.startswith(k[:-1])), None)
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        above = ".".join(parts[:length])
        if entry := table.get(f"{above}.*"):
            here = tuple(_below(ours, key[len(above) :]) for ours in entry.here)
            return next(filter(None, map(_decided, here)), Entry(here, entry.note, entry.values))
    return None


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A key with its value; where it is a group, what is in it, down to what a table has an entry for."""
    whole = any(find(table, key) and not _keys_below(table, key) for table in PROGRAMS.values())
    if isinstance(value, dict) and value and not whole:
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def options(words: Sequence[str], known: Container[str]) -> list[str]:
    """A line for every option of a command line that is not `known`, if one of them is another program's."""
    lines, answered = [], False
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, assigned, value = word.partition("=")
        if not word.startswith("--") or name in known or len(name) == len("--"):
            continue
        given = value if assigned else "" if following.startswith("--") else following
        field = name.removeprefix("--").replace("-", "_")
        line = answer(name, given) or answer(field, given, name)
        answered = answered or line is not None
        lines.append(line or f"{name} is not known here")
    return lines if answered else []


def keys(words: Sequence[str], known: Container[str]) -> list[str]:
    """A line for every `key=value` of a command line that is another program's, and not one of the `known` keys."""
    pairs = (word.lstrip("+").partition("=") for word in words if not word.startswith("-") and "=" in word)
    lines = (answer(key, value) for key, _, value in pairs if key not in known)
    return [line for line in lines if line]


def names(setting: str) -> dict[str, str]:
    """Program → what it calls one of our settings; only those that have it.

    Of several keys, the first that means just that setting; or the first.
    """
    found = {}
    for program, table in PROGRAMS.items():
        leading = [(theirs, entry) for theirs, entry in table.items() if setting in map(_setting, entry.here)]
        same = [theirs for theirs, entry in leading if len(entry.here) == 1 and not entry.note]
        if leading:
            found[program] = (same or [theirs for theirs, _ in leading])[0].removesuffix(".*")
    return found


def foreign(key: str) -> bool:
    """Whether another program has a group of this name, and so perhaps a key that no table has."""
    top = key.partition(".")[0] + "."
    return any(theirs.startswith(top) for table in PROGRAMS.values() for theirs in table)


def _keys_below(table: Table, key: str) -> bool:
    return any(theirs.startswith(f"{key}.") and theirs != f"{key}.*" for theirs in table)


def _below(ours: str, rest: str) -> str:
    """Where a key below `.*` belongs: `rollout.options.*` and `.seed` give `rollout.options.seed`."""
    return ours.removesuffix(".*") + rest if ours.endswith(".*") else ours


def _decided(ours: str) -> Entry | None:
    """What to say of an option that is passed through, but not this one: the run decides it, or another setting."""
    setting, _, option = ours.rpartition(".")
    if option not in DECIDED.get(setting, {}):
        return None
    instead = DECIDED[setting][option]
    return to(instead) if instead in settings() else none(instead or "the run decides it; leave it out")


def _setting(ours: str) -> str:
    """`group.key=value` and `group.key.*` without what follows the key."""
    return ours.partition("=")[0].removesuffix(".*")
