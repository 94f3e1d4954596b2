"""CPU affinity: each process runs on the CPUs nearest to its GPUs.

A node of 8 GPUs contains at least two sockets. A process on the wrong socket copies to its GPU through the link between
the sockets. The same applies to every reader of memory first touched by this process, pinned buffers included.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.nvml import NvmlUnavailable, open_nvml


def visible_devices(env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the entries of CUDA_VISIBLE_DEVICES, numbers or UUIDs as text; empty if the variable is empty or not
    set."""
    return [device.strip() for device in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]


def nearest_cpus(devices: Sequence[str], nvml: Any = None) -> frozenset[int]:
    """Returns the numbers of the CPUs nearest to any of these devices. Empty if NVML is missing, or does not know one
    of the devices.

    Args:
        devices: Devices as returned by `visible_devices`.
        nvml: NVML library; see `nvml.open_nvml`.
    """
    words = -(-os.sysconf("SC_NPROCESSORS_CONF") // 64)
    cpus: set[int] = set()
    try:
        with open_nvml(nvml) as library:
            for device in devices:
                try:
                    if device.isdigit():
                        handle = library.nvmlDeviceGetHandleByIndex(int(device))
                    else:
                        handle = library.nvmlDeviceGetHandleByUUID(device)
                    masks = library.nvmlDeviceGetCpuAffinity(handle, words)
                except library.NVMLError:  # a virtual machine may not see the sockets of its host
                    return frozenset()
                cpus |= {64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}
    except NvmlUnavailable:
        return frozenset()
    return frozenset(cpus)


def bind(devices: Sequence[str], nvml: Any = None) -> frozenset[int]:
    """Binds this process, its threads and future children to the CPUs nearest to these devices.

    Only CPUs already allowed for the process are used, so limits set by Slurm or a container still hold.

    Returns:
        The numbers of the CPUs; empty if nothing was changed: no devices, no NVML, or none of these CPUs is allowed.
    """
    cpus = nearest_cpus(devices, nvml) & os.sched_getaffinity(0) if devices else frozenset()
    if cpus:
        for thread in Path("/proc/self/task").iterdir():  # Ray has already started threads
            try:
                os.sched_setaffinity(int(thread.name), cpus)
            except ProcessLookupError:  # the thread has ended
                continue
    return frozenset(cpus)


def text(cpus: frozenset[int]) -> str:
    """Returns CPU numbers in the kernel's notation, such as `0-47,96-143`; "" without any."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
