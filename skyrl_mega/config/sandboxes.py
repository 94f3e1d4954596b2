"""Usual limits of sandboxed environments, and what all of them may take together."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_mega.config.limits import ENVIRONMENT_WORKERS
from skyrl_mega.config.outside import check_regular

if TYPE_CHECKING:  # the sandbox imports this file where nothing but the standard library is
    from skyrl_mega.config.schema import Config

SANDBOX_MEMORY_MIB, SANDBOX_DISK_MIB = 512, 64
"""Usual limits of a sandboxed program: memory of each of its processes, and disk."""
LEAST_TOTAL_MIB, SHARE = 8192, 8
"""Memory of all programs of an environment at once: so much at least, else this part of the node's."""
SANDBOXES = {"python": "sandbox", "lcb": "sandbox", "text2sql": "sandbox", "swe": "session_options"}
"""Environment → where `environment.options.<name>` has the limits of its sandbox."""
SESSIONS = ("swe",)
"""Those whose disk is kept from step to step: every trajectory under way has one."""
CGROUP = Path("/sys/fs/cgroup/memory.max")
"""Where a container says what it may have of its machine."""
MIB = 2**20


def usual_total_mib(node_mib: float) -> int:
    """What all programs of an environment may have together where the settings do not say: no more than one process
    each of the usual number of workers could take, and of a large node no more than an eighth."""
    return int(min(max(LEAST_TOTAL_MIB, node_mib / SHARE), ENVIRONMENT_WORKERS * SANDBOX_MEMORY_MIB))


def machine_mib(limit: Path = CGROUP) -> float:
    """Memory of this machine, or of the container that this is."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # none, or "max"
        sizes.append(int(limit.read_text()))
    return min(sizes) / MIB


def sandboxes_mib(config: Config, trajectories: int | None = None) -> float:
    """Memory of what policies run in sandboxes, disks included, which lie in memory too.

    Of every environment that the settings name: by its options, as the usual one, or in `data.prepare`.

    Args:
        config: The settings.
        trajectories: Under way at once; without it, those of training and of evaluations.
    """
    from skyrl_mega.config.derived import open_at_once

    named = {*config.environment.options, config.environment.default, *(config.data.prepare or "").split()[:1]}
    if trajectories is None:
        trajectories = open_at_once(config, evaluated(config)) if named & {*SANDBOXES} else 0
    if config.environment.slots is not None:
        trajectories = min(trajectories, config.environment.slots)
    node = config.cluster.host_memory_gib
    usual = usual_total_mib(node * 1024 if node is not None else machine_mib())
    total = 0.0
    for name, key in SANDBOXES.items():
        if name in named:
            limits = (config.environment.options.get(name) or {}).get(key) or {}
            disks = trajectories if name in SESSIONS else min(trajectories, config.environment.workers)
            total += limits.get("total_mib", usual) + disks * limits.get("disk_mib", SANDBOX_DISK_MIB)
    return total


def evaluated(config: Config) -> int:
    """Trajectories of an evaluation during the run, which are all under way at once; 0 without one.

    A file that is not there yet, or is no parquet file, counts as `evaluation.limit` rows: whether it must be there
    is checked with the data.
    """
    if not (config.evaluation.every or config.evaluation.before):
        return 0
    prompts = 0
    for file in config.data.eval:
        prompts += min((n for n in (_rows(file), config.evaluation.limit) if n is not None), default=0)
    return prompts * config.evaluation.samples


def _rows(file: str) -> int | None:
    import pyarrow.parquet as pq

    try:
        check_regular(Path(file))
        return int(pq.read_metadata(file).num_rows)
    except (OSError, ValueError):
        return None
