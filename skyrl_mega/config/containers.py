"""Limit of open environments, if environments run in containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from skyrl_mega.common.limits import CONTAINERS

if TYPE_CHECKING:
    from skyrl_mega.config.schema import EnvironmentConfig


def environment_slots(environment: EnvironmentConfig) -> int | None:
    """Returns the maximum number of open environments; None for no limit.

    The limit is `environment.slots`. With containers, it is at most the number of containers of all processes that run
    trajectories: an open environment has a container, and must not wait for another environment to end.
    """
    chosen = [whole(given, "containers", CONTAINERS) for _, _, given in container_options(environment.options)]
    limits = [containers * max(1, environment.processes) for containers in chosen]
    return min([*limits, *([environment.slots] if environment.slots is not None else [])], default=None)


def container_options(options: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields (key, runtime, options of containers) of each environment that runs in containers; nothing without any.
    The options are as given, perhaps {}.

    Args:
        options: `environment.options`.
    """
    swe, harness = options.get("swe") or {}, options.get("harness") or {}
    judged = harness.get("reward_options") or {}
    for key, runtime, chosen in (
        ("swe.session_options", swe.get("session"), swe.get("session_options")),
        ("harness.container_options", harness.get("container"), harness.get("container_options")),
        ("harness.reward_options.session_options", judged.get("session"), judged.get("session_options")),
    ):
        if runtime and runtime != "local" and ":" not in runtime:  # a class of the user has limits of its own
            yield f"environment.options.{key}", runtime, chosen or {}


def whole(options: Mapping[str, Any], name: str, default: int) -> int:
    """Returns an option that is a whole number; the default for a missing value or another type, which the environment
    itself refuses. The range is not checked."""
    value = options.get(name, default)
    return value if isinstance(value, int) else default
