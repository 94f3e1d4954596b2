"""Inheritance of NeMo-RL's YAML files: `defaults` names parent files; the file's own settings override theirs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.migrate.given import GivenSettings

DEFAULTS = "defaults"
"""Key with the names of parent files."""
OVERRIDE = "_override_"
"""Mark of a group that replaces the inherited group as a whole; NeMo-RL sees it in the groups of a file alone."""
MANDATORY = "???"
"""Value of a key that another file or the command line must give."""
MOST_READS = 200
"""Most reads of files for one input; a parent of several files is read for each."""


def read_with_parents(path: Path, read: Callable[[Path], dict[str, Any]], reading: GivenSettings) -> dict[str, Any]:
    """Returns the settings of a YAML file merged with those of its parents, as NeMo-RL merges them, without `defaults`.
    A later parent overrides an earlier one, and the file overrides all. A missing parent is no error.

    Args:
        path: The file. Names in its `defaults` are relative to its folder.
        read: Returns the mapping in a file; its errors pass through.
        reading: Receives a sentence in `missing` and one in `assumptions` for each missing parent.

    Raises:
        UserError: `defaults` is neither a file name nor a list of them; or a file inherits from itself; or more than
            `MOST_READS` files are read.
    """
    count = itertools.count()

    def counted(path: Path) -> dict[str, Any]:
        if next(count) == MOST_READS:
            raise UserError(f"`defaults` leads to more than {MOST_READS} files", key=path, fix="inherit from fewer")
        return read(path)

    return _merge_chain(path, counted, reading, ())


def _merge_chain(
    path: Path, read: Callable[[Path], dict[str, Any]], reading: GivenSettings, children: tuple[Path, ...]
) -> dict[str, Any]:
    """Merges a file with its parents; `children` are the files that led to it, to find loops."""
    if path.resolve() in children:
        raise UserError("the chain of `defaults` does not end", key=path, fix="let no file inherit from itself")
    content = read(path)
    names = content.pop(DEFAULTS, None) or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError("allowed is a file, or a list of files", key=f"{path}: {DEFAULTS}", value=names)
    inherited: dict[str, Any] = {}
    for name in names:
        parent = path.parent / name
        if parent.is_file():
            inherited = _override(inherited, _merge_chain(parent, read, reading, (*children, path.resolve())))
        else:
            reading.missing.append(f"{parent}: {path.name} inherits from it")
            reading.assumptions.append(
                f"{name}, from which {path.name} inherits, is not here: the values of NeMo-RL's grpo_math_1B.yaml are "
                "taken instead"
            )
    return _override(inherited, content)


def _override(inherited: Mapping[str, Any], own: Mapping[str, Any], top: bool = True) -> dict[str, Any]:
    """Returns `inherited` overridden by `own`. Groups merge key by key; with the mark `OVERRIDE`, a group of the file
    itself (`top`) replaces the inherited one. `MANDATORY` leaves an inherited value; any other value, null included,
    replaces even a group."""
    result = {**inherited}
    for key, value in own.items():
        below = inherited.get(key)
        if isinstance(value, dict):
            replaces = top and bool(value.get(OVERRIDE))
            plain = {name: inner for name, inner in value.items() if name != OVERRIDE}
            result[key] = _override(below if isinstance(below, dict) and not replaces else {}, plain, top=False)
        elif value != MANDATORY or key not in inherited:
            result[key] = value
    return result
