"""Error lines for settings of other programs (SkyRL, verl, slime, TRL, NeMo-RL), and names of our settings there."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config import megatron_options
from skyrl_mega.config.checks.engines import ENGINE_ARGUMENTS
from skyrl_mega.config.keys import keys as settings
from skyrl_mega.config.other_programs.table import Counterpart, Table, programs

DECIDED: Mapping[str, Mapping[str, str | None]] = {"rollout.options": ENGINE_ARGUMENTS, **megatron_options.DENIED}
"""Setting with free-form keys → refused key → setting to use instead (None: no such setting)."""
PAGE = "docs/migration.md"


def answer(key: str, value: Any = None, typed: str = "") -> str | None:
    """Returns an error line for a key of another program, with the program and our setting; None for other keys.

    Args:
        key: Key of another program, such as `trainer.epochs` or `--rollout-batch-size`.
        value: The key's value, as read from YAML; changes the line only if a table has an entry for this value.
        typed: The user's spelling to show in the line, if it differs from `key`.
    """
    found = {program: entry for program, table in programs().items() if (entry := find(table, key))}
    if not found:
        return None
    text = value if isinstance(value, str) else shown(value)
    by_value = next((entry.values[text] for entry in found.values() if text in entry.values), None)
    entry = by_value or next(iter(found.values()))
    whose = " and ".join(f"{program}'s" for program in found)
    given = f"{typed or key}={text}" if by_value else typed or key
    return with_page(f"{given} is {whose}; here {counterpart(entry)}")


def with_page(line: str) -> str:
    """Returns the line with a reference to `PAGE` appended, merged into a reference to another page at its end."""
    return line.removesuffix(")") + f", {PAGE})" if re.search(r"\(docs/[\w-]+\.md\)$", line) else f"{line} ({PAGE})"


def counterpart(entry: Counterpart) -> str:
    """Returns a phrase for an error line: `it is …` with our settings, or `there is none: …` with the reason."""
    if not entry.here:
        return f"there is none: {entry.note}"
    return f"it is {' and '.join(entry.here)}" + (f": {entry.note}" if entry.note else "")


def find(table: Table, key: str) -> Counterpart | None:
    """Returns the counterpart of a key from a program's table; None if the table does not cover the key.

    Without an entry for the key itself, uses the nearest group entry: `group.*`, or `--prefix-*` for an option. Below
    `group.*` the result is a new counterpart for the key.
    """
    if entry := table.get(key):
        return entry
    if key.startswith("--"):
        return next((e for k, e in table.items() if k.endswith("-*") and key.startswith(k[:-1])), None)
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        above = ".".join(parts[:length])
        if entry := table.get(f"{above}.*"):
            here = tuple(_below(ours, key[len(above) :]) for ours in entry.here)
            return next(filter(None, map(_decided, here)), Counterpart(here, entry.note, entry.values))
    return None


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value of the settings in a nested value; stops at keys with an entry in some table.

    Args:
        key: Key of the value.
        value: A mapping, expanded unless a table has an entry for the whole group, or a plain value.
    """
    whole = any(find(table, key) and not _keys_below(table, key) for table in programs().values())
    if isinstance(value, dict) and value and not whole:
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def options(words: Sequence[str], known: Container[str]) -> list[str]:
    """Returns error lines for the unknown options of a command line, in order.

    [] without unknown options, and if no unknown option belongs to another program: the command's own parser then
    reports them.

    Args:
        words: Arguments of the command.
        known: Options of the command, such as `--config`.
    """
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
    """Returns an error line for every `key=value` of a command line with a key of another program; [] without any.

    Args:
        words: Arguments of the command.
        known: Keys of this project, which are skipped.
    """
    pairs = (word.lstrip("+").partition("=") for word in words if not word.startswith("-") and "=" in word)
    lines = (answer(key, value) for key, _, value in pairs if key not in known)
    return [line for line in lines if line]


def names(setting: str) -> dict[str, str]:
    """Returns program → the program's key for one of our settings; programs without such a key are left out.

    Prefers a key with exactly the same meaning (no note, no further settings), otherwise the first key of the table. {}
    if no program has one.
    """
    found = {}
    for program, table in programs().items():
        leading = [(theirs, entry) for theirs, entry in table.items() if setting in map(_setting, entry.here)]
        same = [theirs for theirs, entry in leading if len(entry.here) == 1 and not entry.note]
        if leading:
            found[program] = (same or [theirs for theirs, _ in leading])[0].removesuffix(".*")
    return found


def foreign(key: str) -> bool:
    """Returns True if the first part of a dotted key is the name of a group in another program, such as `trainer`."""
    top = key.partition(".")[0] + "."
    return any(theirs.startswith(top) for table in programs().values() for theirs in table)


def _keys_below(table: Table, key: str) -> bool:
    return any(theirs.startswith(f"{key}.") and theirs != f"{key}.*" for theirs in table)


def _below(ours: str, rest: str) -> str:
    """Returns our setting for a key below `.*`: `rollout.options.*` and `.seed` give `rollout.options.seed`."""
    return ours.removesuffix(".*") + rest if ours.endswith(".*") else ours


def _decided(ours: str) -> Counterpart | None:
    """Returns the entry of an option that `DECIDED` refuses; None for other options."""
    setting, _, option = ours.rpartition(".")
    if option not in DECIDED.get(setting, {}):
        return None
    instead = DECIDED[setting][option]
    return (
        Counterpart((instead,))
        if instead in settings()
        else Counterpart(note=instead or "the run decides it; leave it out")
    )


def _setting(ours: str) -> str:
    """Returns the key of `group.key=value` or `group.key.*`."""
    return ours.partition("=")[0].removesuffix(".*")
