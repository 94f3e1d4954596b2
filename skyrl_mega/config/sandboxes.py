"""Usual limits of sandboxed environments, and what all of them may take together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the sandbox imports this file where nothing but the standard library is
    from skyrl_mega.config.schema import Config

ENVIRONMENT_THREADS = 64
"""Environment steps at once."""
SANDBOX_TOTAL_MIB, SANDBOX_DISK_MIB = 8192, 64
"""Usual limits of a sandboxed environment: memory of all its commands at once, and disk of each."""
SANDBOXES = {"python": "sandbox", "lcb": "sandbox", "text2sql": "sandbox", "swe": "session_options"}
"""Environment → where `environment.options.<name>` has the limits of its sandbox."""
SESSIONS = ("swe",)
"""Those whose disk is kept from step to step: every trajectory under way has one."""


def sandboxes_mib(config: Config) -> float:
    """Memory of what policies run in sandboxes, disks included, which lie in memory too.

    Of every environment that the settings name: by its options, as the usual one, or in `data.prepare`.
    """
    named = {*config.environment.options, config.environment.default, *(config.data.prepare or "").split()[:1]}
    trajectories = config.data.prompts_per_step * config.data.samples_per_prompt
    total = 0.0
    for name, key in SANDBOXES.items():
        if name in named:
            limits = (config.environment.options.get(name) or {}).get(key) or {}
            disks = trajectories if name in SESSIONS else min(trajectories, ENVIRONMENT_THREADS)
            total += limits.get("total_mib", SANDBOX_TOTAL_MIB) + disks * limits.get("disk_mib", SANDBOX_DISK_MIB)
    return total
