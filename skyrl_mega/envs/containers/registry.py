"""Registry of container runtimes: name → class."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import pool
from skyrl_mega.envs.containers.pool import ContainerPool
from skyrl_mega.envs.containers.runtime import Runtime
from skyrl_mega.envs.options import Option, filled

RUNTIMES = {
    "podman": "skyrl_mega.envs.containers.docker:Podman",
    "docker": "skyrl_mega.envs.containers.docker:Docker",
    "apptainer": "skyrl_mega.envs.containers.apptainer:Apptainer",
    "kubectl": "skyrl_mega.envs.containers.kubectl:Kubectl",
    "swerex": "skyrl_mega.envs.containers.swerex:SweRexRuntime",
}
"""Name → import path of the runtime's class."""
LEAST_MEMORY_MIB = 16
"""Smallest limit of a container's memory: with less, some runtimes start no program."""


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


def options_of(name: str, key: str) -> Mapping[str, Option]:
    """Returns name → declaration of the options of a runtime and of its pool.

    Args:
        name: A name in `RUNTIMES`.
        key: Setting with the name, for the error.

    Raises:
        UserError: There is no such runtime.
    """
    return {**runtime_class(name, key).OPTIONS, **pool.OPTIONS}


def make_pool(name: str, options: Mapping[str, Any], key: str) -> ContainerPool:
    """Returns a pool that starts the containers of a runtime, at most `containers` at once; starts none yet.

    Args:
        name: A name in `RUNTIMES`.
        options: Options in `options_of`; missing options have their defaults.
        key: Setting with the options, for errors.

    Raises:
        UserError: There is no such runtime, or an option is unknown or wrong.
    """
    cls = runtime_class(name, key)
    chosen = filled(key, options, options_of(name, key))
    own = {option: value for option, value in chosen.items() if option in cls.OPTIONS}
    if 0 < own.get("memory_mib", 0) < LEAST_MEMORY_MIB:
        raise UserError(
            f"too little for a program; allowed: 0 for no limit, or at least {LEAST_MEMORY_MIB}",
            key=f"{key}.memory_mib",
            value=own["memory_mib"],
        )
    cls.check_options(own, key)
    limits = (float(chosen[option]) for option in ("lifetime_s", "pull_timeout_s"))
    return ContainerPool(cls(own), name, int(chosen["containers"]), *limits)
