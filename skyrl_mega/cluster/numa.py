"""A process on the CPUs that are nearest to its GPUs.

A node of 8 GPUs has two sockets or more. A process that runs on the other socket than its GPU copies to it through the
link between them, and so does whoever reads the memory that it was the first to touch: pinned buffers too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.nvml import NoNvml, opened


def visible(env: Mapping[str, str] = os.environ) -> list[str]:
    """The devices of CUDA_VISIBLE_DEVICES, numbers or UUIDs; none where it is not set."""
    return [device.strip() for device in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]


def near(devices: Sequence[str], nvml: Any = None) -> frozenset[int]:
    """The CPUs nearest to any of these devices; empty where NVML does not tell.

    Args:
        devices: As `visible` gives them.
        nvml: See `nvml.opened`.
    """
    words = -(-os.sysconf("SC_NPROCESSORS_CONF") // 64)
    cpus: set[int] = set()
    try:
        with opened(nvml) as library:
            for device in devices:
                try:
                    if device.isdigit():
                        handle = library.nvmlDeviceGetHandleByIndex(int(device))
                    else:
                        handle = library.nvmlDeviceGetHandleByUUID(device)
                    masks = library.nvmlDeviceGetCpuAffinity(handle, words)
                except library.NVMLError:  # a virtual machine may know nothing of its host's sockets
                    return frozenset()
                cpus |= {64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}
    except NoNvml:
        return frozenset()
    return frozenset(cpus)


def bind(devices: Sequence[str], nvml: Any = None) -> frozenset[int]:
    """Keeps this process, its threads and the children that it will have on the CPUs nearest to these devices.

    Only CPUs that the process has already count, so what Slurm or a container gives it stays a limit.

    Returns:
        The CPUs; empty where nothing was changed: no devices, no NVML, or none of these CPUs is allowed.
    """
    cpus = near(devices, nvml) & os.sched_getaffinity(0) if devices else frozenset()
    if cpus:
        for thread in Path("/proc/self/task").iterdir():  # Ray's threads are there already
            try:
                os.sched_setaffinity(int(thread.name), cpus)
            except ProcessLookupError:  # it has ended meanwhile
                continue
    return frozenset(cpus)


def text(cpus: frozenset[int]) -> str:
    """CPUs as the kernel writes them: `0-47,96-143`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
