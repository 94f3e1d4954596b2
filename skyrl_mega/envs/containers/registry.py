"""Registry of container runtimes: name → class."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers.runtime import Runtime

RUNTIMES = {
    "podman": "skyrl_mega.envs.containers.docker:Podman",
    "docker": "skyrl_mega.envs.containers.docker:Docker",
}
"""Name → import path of the runtime's class."""


def runtime_class(name: str, key: str) -> type[Runtime]:
    """Returns the class of a container runtime.

    Args:
        name: A name in `RUNTIMES`.
        key: Setting with the name, for the error.

    Raises:
        UserError: There is no such runtime.
    """
    if name not in RUNTIMES:
        raise UserError(f"there is no such runtime; allowed: {', '.join(RUNTIMES)}", key=key, value=name)
    module, _, attribute = RUNTIMES[name].partition(":")
    cls: Any = getattr(import_module(module), attribute)
    return cls
