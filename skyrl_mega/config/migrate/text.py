"""Output of a migration: our YAML, and the account of every setting as text or plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import yaml

from skyrl_mega.common.secrets import masked
from skyrl_mega.common.values import shown
from skyrl_mega.config.keys import keys
from skyrl_mega.config.migrate.account import KINDS, AccountRow, Migration

TITLES = {
    "taken": "taken over, same value",
    "changed": "changed",
    "dropped": "dropped",
    "unknown": "unknown",
    "added": "added beside what was brought",
}
MARK = "brought over by `python -m skyrl_mega.config migrate`."
"""End of the first line of a written file."""
WIDEST = 56
"""Maximum characters of a column before the reason."""
LEARNING = ("algorithm.", "policy.optimizer.", "rollout.sampling.", "data.")
"""Prefixes of keys; the account lists the defaults of unset keys with these prefixes."""


def as_yaml(migration: Migration, source: str) -> str:
    """Returns the migrated settings as the text of a YAML configuration file, with secrets masked.

    Args:
        migration: The migration.
        source: Description of the input, for the comment in the first line.
    """
    tree: dict[str, Any] = {}
    order = {key: n for n, key in enumerate(keys())}
    for key in sorted(migration.settings, key=lambda name: order.get(name, len(order))):
        group = tree
        *above, last = key.split(".")
        for name in above:
            group = group.setdefault(name, {})
        group[last] = migration.settings[key]
    body = yaml.dump(masked(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return f"# {source}, {MARK}\n{body}"


class _Dumper(yaml.SafeDumper):
    """Writer with lists in one line, and numbers such as 1e-06 that YAML reads as numbers."""


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text.replace("e", ".0e") if "." not in text else text)


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(float, _float)
_Dumper.add_representer(list, _list)


def as_text(migration: Migration) -> str:
    """Returns the account as text: assumptions, a table per kind of row, remaining defaults, and a summary. Dropped
    settings from inherited files that need no look are only counted."""
    lines = [f"assumed: {line}" for line in migration.assumptions]
    for kind in KINDS:
        rows = [row for row in migration.rows if row.kind == kind]
        shown_rows = [row for row in rows if kind != "dropped" or row.look or row.theirs not in migration.inherited]
        if rows:
            lines += ["", f"{TITLES[kind]}: {len(rows)}", *_aligned([*map(_cells, shown_rows)])]
        if hidden_rows := len(rows) - len(shown_rows):
            lines.append(f"  … and {hidden_rows} more, from inherited files (--json lists them)")
    lines += ["", *_remaining(migration), "", summary(migration), *_look(migration)]
    return "\n".join(lines).lstrip("\n")


def open_tasks(migration: Migration) -> list[str]:
    """Returns `migration.to_add`, and `REWARD` if no reward is set."""
    return migration.to_add + ([REWARD] if migration.without_reward else [])


REWARD = (
    "the reward: environment.reward_function=FILE.py:FUNCTION or environment.default=NAME "
    "(docs/own-environment.md), unless the rows of data.train have env_class"
)
"""Line for a migrated run without any environment."""


def _look(migration: Migration) -> Iterator[str]:
    """Yields a line for each setting that needs a look."""
    for row in migration.rows:
        if row.look:
            theirs, _, why = _cells(row)
            yield f"needs a look: {theirs}  {row.kind}: {why.partition(chr(10))[0]}"


def summary(migration: Migration) -> str:
    """Returns a line with the number of given settings, of these by kind, and of added settings."""
    counts = migration.counts
    given = sum(counts[kind] for kind in KINDS if kind != "added")
    parts = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if kind != "added")
    return f"{given} settings of {migration.program}: {parts}; {counts['added']} added"


def as_values(migration: Migration) -> dict[str, Any]:
    """Returns the migration as JSON values, with secrets masked: `program`, `settings`, `rows` (the account), `counts`
    (rows by kind), `assumptions`, `to_add` (`open_tasks`) and `defaults`
    (`remaining`)."""
    rows = [
        {**asdict(row), "value": masked(row.value, row.theirs), "ours": masked(dict(row.ours))}
        for row in migration.rows
    ]
    return {
        "program": migration.program,
        "settings": masked(dict(migration.settings)),
        "rows": rows,
        "counts": migration.counts,
        "assumptions": migration.assumptions,
        "to_add": open_tasks(migration),
        "defaults": remaining(migration.settings),
    }


def remaining(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our defaults, other than empty ones, for settings of learning (`LEARNING`) absent from `settings`.

    Settings in subgroups of `algorithm` other than `kl` are left out.
    """
    return {
        name: key.default
        for name, key in keys().items()
        if name.startswith(LEARNING) and name.count(".") < 3 and not key.group and name not in settings
        if key.default not in (None, [], {}, "") and key.type is not dict and not _unused(name, settings)
    }


def _unused(name: str, settings: Mapping[str, Any]) -> bool:
    """True for a setting of a loss, an estimator or a group that the run does not use."""
    group = name.split(".")[1] if name.count(".") == 2 else ""
    return name.startswith("algorithm.") and group not in ("", "kl")


def _remaining(migration: Migration) -> Iterator[str]:
    values = ", ".join(f"{key}={shown(value)}" for key, value in remaining(migration.settings).items())
    yield f"our defaults for the rest of learning: {values}"


def _cells(row: AccountRow) -> tuple[str, str, str]:
    theirs = row.theirs if row.kind == "added" else f"{row.theirs}={shown(masked(row.value, row.theirs))}"
    ours = ", ".join(f"{key}={shown(masked(value, key))}" for key, value in row.ours.items())
    return theirs, ours or ("–" if row.kind in ("dropped", "unknown", "changed") else ""), row.why


def _aligned(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    """Yields lines with aligned columns; a column too wide for its place starts the next column on a new line."""
    left = min(WIDEST, max((len(row[0]) for row in rows), default=0))
    middle = min(WIDEST, max((len(row[1]) for row in rows), default=0))
    for theirs, ours, why in rows:
        line = f"  {theirs:<{left}}  {ours:<{middle}}"
        yield f"{line}  {why}".rstrip()
