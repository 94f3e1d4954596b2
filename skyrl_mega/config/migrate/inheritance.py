"""Inheritance of NeMo-RL's YAML files: `defaults` names files whose settings hold unless the file gives others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.migrate.given import GivenSettings

DEFAULTS, REPLACES = "defaults", "_override_"
"""Key for the files to inherit from; and the mark of a group that replaces the inherited group as a whole."""
DEEPEST, MOST = 16, 200
"""Most files in a chain, and most readings of a file in all."""


def merged(path: Path, read: Callable[[Path], dict[str, Any]], reading: GivenSettings) -> dict[str, Any]:
    """Returns the content of a YAML file, with the settings of the files it inherits from, as NeMo-RL merges them.

    Args:
        path: The file. Names in its `defaults` are relative to its folder.
        read: Reads a file.
        reading: Receives an assumption, and an entry of `missing`, for every file that is missing.

    Raises:
        UserError: `defaults` is no file name and no list of file names, or the chain of files does not end.
    """
    count = itertools.count()

    def counted(path: Path) -> dict[str, Any]:
        if next(count) == MOST:
            raise UserError(
                f"`defaults` leads to more than {MOST} files", key=path, fix="let a file inherit from fewer"
            )
        return read(path)

    return _merged(path, counted, reading, ())


def _merged(
    path: Path, read: Callable[[Path], dict[str, Any]], reading: GivenSettings, above: tuple[Path, ...]
) -> dict[str, Any]:
    if path.resolve() in above or len(above) == DEEPEST:
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
            inherited = _over(inherited, _merged(parent, read, reading, (*above, path.resolve())))
        else:
            reading.missing.append(f"{parent}: {path.name} inherits from it")
            reading.assumptions.append(
                f"{name}, from which {path.name} inherits, is not here: the values of NeMo-RL's grpo_math_1B.yaml are "
                "taken instead"
            )
    return _over(inherited, content)


def _over(inherited: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns two groups merged; the values of `own` hold."""
    result = {**inherited}
    for key, value in own.items():
        below = inherited.get(key)
        if isinstance(value, dict):
            replaces = bool(value.get(REPLACES))
            plain = {name: inner for name, inner in value.items() if name != REPLACES}
            result[key] = _over(below, plain) if isinstance(below, dict) and not replaces else _over({}, plain)
        else:
            result[key] = value
    return result
