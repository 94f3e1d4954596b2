"""Default limits of sandboxed environments, and the total memory of all sandboxes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_mega.common.limits import ENVIRONMENT_WORKERS
from skyrl_mega.common.safe_read import check_regular

if TYPE_CHECKING:  # sandboxes import this file with only the standard library installed
    from skyrl_mega.config.schema import Config

SANDBOX_MEMORY_MIB, SANDBOX_DISK_MIB = 512, 64
"""Default limits of a sandboxed program: memory per process, and disk."""
LEAST_TOTAL_MIB, SHARE = 8192, 8
"""Memory limit for all programs of an environment together: LEAST_TOTAL_MIB, or the node's memory / SHARE if larger."""
SANDBOXES = {
    **dict.fromkeys(("python", "lcb", "text2sql", "harness", "verifiers"), "sandbox"),
    "swe": "session_options",
}
"""Environment → key of the sandbox limits in `environment.options.<name>`."""
SESSIONS = ("swe",)
"""Environments with a disk kept from step to step: every running trajectory owns a disk."""
CGROUP = Path("/sys/fs/cgroup/memory.max")
"""File with the memory limit of a container."""
MIB = 2**20


def default_total_mib(node_mib: float) -> int:
    """Returns the default memory limit, in MiB, for all programs of an environment together: an eighth of the node's
    memory (at least `LEAST_TOTAL_MIB`), but at most `SANDBOX_MEMORY_MIB` for each of the default number
    of workers."""
    return int(min(max(LEAST_TOTAL_MIB, node_mib / SHARE), ENVIRONMENT_WORKERS * SANDBOX_MEMORY_MIB))


def machine_mib(limit: Path = CGROUP) -> float:
    """Returns the memory of this machine in MiB, or the container's limit if smaller.

    Args:
        limit: File with the container's limit in bytes; ignored if missing or unlimited.
    """
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        sizes.append(int(limit.read_text()))
    return min(sizes) / MIB


def sandboxes_mib(config: Config, trajectories: int | None = None) -> float:
    """Returns the memory of all sandboxed programs in MiB, including their disks, which are held in memory.

    Counts every environment named in the settings: with options, as the default, or in `data.prepare`; 0 if none of
    these is sandboxed. Sessions in containers are no sandboxed programs. With `cluster.host_memory_gib=null`, the
    default limit depends on the memory of this machine.

    Args:
        config: The settings.
        trajectories: Concurrent trajectories; None computes the number from training and evaluations, and reads the row
            counts of `data.eval`. `environment.slots` limits both.
    """
    from skyrl_mega.config.derived import max_open_trajectories

    named = {*config.environment.options, config.environment.default_name, *(config.data.prepare or "").split()[:1]}
    if trajectories is None:
        trajectories = max_open_trajectories(config, evaluation_trajectories(config)) if named & {*SANDBOXES} else 0
    if config.environment.slots is not None:
        trajectories = min(trajectories, config.environment.slots)
    node = config.cluster.host_memory_gib
    default_total = default_total_mib(node * 1024 if node is not None else machine_mib())
    total = 0.0
    for name, key in SANDBOXES.items():
        options = config.environment.options.get(name) or {}
        contained = options.get("container") or options.get("reward") == "swe"  # `harness`
        contained = contained or options.get("session", "local") != "local"  # `swe`
        if name in named and options.get("confined", True) and not contained:
            limits = options.get(key) or {}
            disks = trajectories if name in SESSIONS else min(trajectories, config.environment.workers)
            total += limits.get("total_mib", default_total) + disks * limits.get("disk_mib", SANDBOX_DISK_MIB)
    return total


def evaluation_trajectories(config: Config) -> int:
    """Returns the number of trajectories of an evaluation during the run, all counted as concurrent; 0 without one.

    A missing or non-parquet file counts as `evaluation.limit` rows (0 without a limit); the data check reports it.
    """
    if not (config.evaluation.every or config.evaluation.before):
        return 0
    prompts = 0
    for file in config.data.eval:
        prompts += min((rows for rows in (row_count(file), config.evaluation.limit) if rows is not None), default=0)
    return prompts * config.evaluation.samples


def row_count(file: str) -> int | None:
    """Returns the number of rows of a parquet file; None for a file that is missing or not parquet."""
    import pyarrow.parquet as pq

    try:
        check_regular(Path(file))
        return int(pq.read_metadata(file).num_rows)
    except (OSError, ValueError):
        return None
