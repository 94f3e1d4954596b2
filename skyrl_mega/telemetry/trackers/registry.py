"""Trackers by name: built-in trackers, and user-defined classes by import path."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from skyrl_mega.common import imports
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.options import filled
from skyrl_mega.config.schema import TelemetryConfig

TRACKERS: Mapping[str, str] = {
    "jsonl": "skyrl_mega.telemetry.trackers.jsonl:JsonlTracker",
    "tensorboard": "skyrl_mega.telemetry.trackers.tensorboard:TensorboardTracker",
    "mlflow": "skyrl_mega.telemetry.trackers.mlflow:MlflowTracker",
    "wandb": "skyrl_mega.telemetry.trackers.wandb:WandbTracker",
}
"""Name -> import path. The packages behind the trackers are imported on use."""
ALWAYS = "jsonl"
"""Tracker of every run, listed or not."""
METHODS = ("start", "log", "log_trajectories", "close")


def listed_trackers(config: TelemetryConfig) -> dict[str, str]:
    """Returns name -> import path of the run's trackers, without metrics.jsonl. A user-defined tracker is named after
    its class.

    Raises:
        UserError: A name is unknown or appears twice.
    """
    paths: dict[str, str] = {}
    for entry in config.trackers:
        name = entry.rpartition(":")[2]
        if name == entry and name not in TRACKERS:
            raise UserError(unknown(entry), key="telemetry.trackers", value=shown(config.trackers))
        if name in paths or (name != entry and name in TRACKERS):
            raise UserError(
                f"two trackers are called {name}; name each once, and give a class of your own a "
                f"name that is not one of {', '.join(TRACKERS)}",
                key="telemetry.trackers",
                value=shown(config.trackers),
            )
        paths[name] = TRACKERS.get(entry, entry)
    paths.pop(ALWAYS, None)
    return paths


def unknown(name: str) -> str:
    """Returns the error message for an unknown tracker name: the nearest name if any, and all allowed forms."""
    nearest = get_close_matches(name, TRACKERS, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"{shown(name)} is unknown; {hint}allowed: {', '.join(TRACKERS)}, or your own: {imports.path_forms('class')}"


def resolve(path: str) -> Any:
    """Imports and returns the tracker class behind an import path.

    Raises:
        UserError: The path cannot be imported, or is not a class with the methods of a tracker.
    """
    cls = imports.load(path, "telemetry.trackers")
    if not isinstance(cls, type) or not all(callable(getattr(cls, method, None)) for method in METHODS):
        raise UserError(
            f"{path} is not a tracker; allowed: a class with {', '.join(METHODS)}, as "
            "skyrl_mega.telemetry.trackers.base.Tracker has them",
            key="telemetry.trackers",
        )
    return cls


def options_of(name: str, cls: Any, config: TelemetryConfig) -> dict[str, Any]:
    """Returns a tracker's options, completed with defaults and checked; a class without OPTIONS accepts any.

    Raises:
        UserError: An option is unknown or a value is not allowed.
    """
    return filled(f"telemetry.options.{name}", config.options.get(name), getattr(cls, "OPTIONS", None))


def check(config: TelemetryConfig) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Imports the trackers' classes, and checks names and options of all trackers, without looking for packages, keys
    or servers.

    Returns:
        Name -> (class, options) of the run's trackers; the tracker that always writes metrics.jsonl is left out.

    Raises:
        UserError: A name is unknown or appears twice, a class cannot be imported or is no tracker, or an option is
            unknown or has a value that is not allowed.
    """
    paths = listed_trackers(config)
    for name in config.options:
        if name not in {*paths, *TRACKERS}:
            raise UserError(f"{unknown(name)}, named in telemetry.trackers", key=f"telemetry.options.{name}")
        options_of(name, resolve(paths.get(name) or TRACKERS[name]), config)
    classes = {name: resolve(path) for name, path in paths.items()}
    return {name: (cls, options_of(name, cls, config)) for name, cls in classes.items()}


def unused_notes(config: TelemetryConfig) -> list[str]:
    """Returns a note for each non-default option in `telemetry.options` of a tracker not in `telemetry.trackers`.

    Such an option is not an error, because a recipe may contain options of a tracker that the user turns off. The
    settings must have passed `check`.
    """
    notes = []
    for name in sorted({*config.options} - {*listed_trackers(config), ALWAYS}):
        cls = resolve(TRACKERS[name])
        values, defaults = options_of(name, cls, config), options_of(name, cls, TelemetryConfig())
        notes += [
            f"telemetry.options.{name}.{option} = {shown(value)}: telemetry.trackers={shown(config.trackers)} has no "
            f"{name}; give telemetry.trackers=[{','.join([*config.trackers, name])}], or leave it out"
            for option, value in values.items()
            if value != defaults[option]
        ]
    return notes


def check_ready(config: TelemetryConfig) -> None:
    """Calls `check_ready` of every tracker of the run, to look for the required packages and API keys.

    Raises:
        UserError: A package or key is missing (the message names the fix), or `check` refuses a setting.
    """
    for cls, options in check(config).values():
        if hasattr(cls, "check_ready"):
            cls.check_ready(options)
