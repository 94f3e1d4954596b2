"""Checks before a run resumes: changed settings, forbidden changes, and remaining work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.secrets import masked
from skyrl_mega.common.values import Rule
from skyrl_mega.config.derived import has_critic
from skyrl_mega.config.keys import keys
from skyrl_mega.config.schema import Config
from skyrl_mega.data.fingerprint import fingerprint
from skyrl_mega.trainer.checkpoints import newest_intact

FIXED = {
    "run.seed": "it decides the order of the data, and the checkpoint has a position in that order",
    "data.shuffle": "it decides the order of the data, and the checkpoint has a position in that order",
    "policy.moe.freeze_router": "the checkpoint has an optimizer state for exactly the weights trained so far",
}
"""Settings or groups bound to a checkpoint, with the reason (docs/faults.md)."""
PLACES = ("run.directory", "run.name")
"""Settings locating the folder; a run may have been moved."""
LARGEST = 2**24
"""Maximum bytes of a state.json."""
WHOLE = Rule(int, low=0)
SHOWN = 12
"""Maximum number of changes shown."""


def checkpoint_of(config: Config) -> Path | None:
    """Returns the newest intact checkpoint of the run, from which it resumes.

    Returns None without a checkpoint, or if `checkpoint.resume` is false. A missing folder is not an error.

    Raises:
        UserError: A checkpoint was written by an earlier version, whose files are not read any more.
    """
    if not config.checkpoint.resume:
        return None
    return newest_intact(Path(config.run.directory) / config.run.name / "checkpoints")


def changes(config: Config) -> list[str]:
    """Returns `key old → new` for every setting changed since the last start, with secrets masked, and a text if the
    rows of `data.train` changed; empty without a checkpoint to resume from.

    Call before opening the run's folder, which overwrites the stored settings.

    Raises:
        UserError: A changed setting is bound to the checkpoint, the checkpoint lacks a critic, or the stored settings
            or the checkpoint's state.json cannot be read; or a checkpoint was written by an earlier version.
    """
    file = Path(config.run.directory) / config.run.name / "config.yaml"
    checkpoint = checkpoint_of(config)
    if checkpoint is None or not file.is_file():
        return []
    if has_critic(config) and not (checkpoint / "critic").is_dir():
        raise UserError(
            f"{checkpoint} has no critic; set it back, or give another run.name and the policy's "
            "export (docs/export.md) as model.path",
            key="algorithm.advantage",
            value=config.algorithm.advantage,
        )
    try:
        stored = yaml.safe_load(safe_read.read(file, "bring back the one that the run wrote")) or {}
        if not isinstance(stored, dict):
            raise yaml.YAMLError("it is no mapping of settings")
        before = _flat(masked(stored))  # an older run's file may hold what is masked today
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read as settings: {' '.join(str(error).split())}",
            fix="bring back the one that the run wrote, or remove it",
        ) from error
    now = _flat(masked(asdict(config)))
    changed = []
    for name, key in keys().items():
        if (key.group and not key.nullable) or name in PLACES:
            continue
        before_value, value = before.get(name, key.default), now.get(name, key.default)
        if before_value == value or (key.group and (before_value is None) == (value is None)):
            continue
        bound = next((why for fixed, why in FIXED.items() if name == fixed or name.startswith(f"{fixed}.")), None)
        if bound:
            raise UserError(
                f"{checkpoint} was made with {_written(before_value)}, and a resumed run keeps it: {bound}",
                key=name,
                value=_written(value),
                fix="set it back, or give another run.name",
            )
        changed.append(f"{name} {_written(before_value)} → {_written(value)}")
    return [*changed, *_other_rows(config, checkpoint)]


def _other_rows(config: Config, checkpoint: Path) -> Iterator[str]:
    """Yields a text if the contents of `data.train` differ from the rows used before the checkpoint."""
    stream = safe_read.read_json(checkpoint / "state.json", "take another checkpoint", most=LARGEST).get("stream")
    before = stream.get("rows") if isinstance(stream, dict) else None
    files = config.data.train
    if before and all(Path(file).is_file() for file in files) and fingerprint(files) != before:
        yield "the rows in data.train (the position in them is kept)"


def changes_text(changed: list[str]) -> str:
    """Returns the line for the user about changed settings: at most `SHOWN` changes, then the number of the rest."""
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return f"settings changed since the run was last started: {', '.join(changed[:SHOWN])}{more}"


def nothing_left(config: Config) -> str | None:
    """Returns a message for the user if the run to resume has no work left; None if there is work, or no checkpoint to
    resume from.

    No work is left if all steps are done or all prompts are used, and the export, if configured, exists. Used up means
    that fewer prompts than a step needs are left in all epochs.

    Raises:
        UserError: The checkpoint's state.json is invalid, or a checkpoint was written by an earlier version.
    """
    checkpoint = checkpoint_of(config)
    if checkpoint is None:
        return None
    step, count, drawn = _place(checkpoint)
    if config.checkpoint.export and not (checkpoint.parents[1] / "model").exists():
        return None
    if config.run.steps is not None and step >= config.run.steps:
        return (
            f"nothing to do: all {config.run.steps} steps are done ({checkpoint}); raise run.steps to continue training"
        )
    left = count * config.run.epochs - drawn
    if left < config.data.prompts_per_step:
        return f"nothing to do: the prompts are used up after step {step} ({checkpoint}); more run.epochs train on"
    return None


def _place(checkpoint: Path) -> tuple[int, int, int]:
    """Returns a checkpoint's step, the number of prompts, and the number of prompts already trained on.

    Raises:
        UserError: The checkpoint's state.json is invalid.
    """
    fix = f"remove {checkpoint}, and the run resumes from the one before"
    state = safe_read.read_json(checkpoint / "state.json", fix, most=LARGEST)
    stream = state.get("stream")
    values = [state.get("step"), *((stream.get("count"), stream.get("position")) if isinstance(stream, dict) else ())]
    ordered = isinstance(stream, dict) and {"seed", "shuffle"} <= stream.keys()
    if len(values) != 3 or not all(WHOLE.allows(value) for value in values) or not ordered:
        raise UserError(
            f"it lacks one of step, stream.count, stream.position (each {WHOLE.words}), stream.seed and stream.shuffle",
            key=checkpoint / "state.json",
            fix=fix,
        )
    returned = stream.get("returned", []) if isinstance(stream, dict) else []
    ahead = state.get("ahead", 0)
    if not WHOLE.allows(ahead) or not isinstance(returned, list):
        raise UserError(
            f"ahead must be {WHOLE.words}, and stream.returned a list", key=checkpoint / "state.json", fix=fix
        )
    return values[0], values[1], values[2] - ahead - len(returned)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns values by dotted key. A group itself is {} if present and None if absent."""
    schema = keys()
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key in schema and schema[key].group:
            values |= {key: {}, **_flat(value, f"{key}.")}
        else:
            values[key] = value
    return values


def _written(value: Any) -> str:
    return "a group" if value == {} else json.dumps(value, default=str, ensure_ascii=False)
