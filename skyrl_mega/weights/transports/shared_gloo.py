"""Gloo groups that share one thread for their messages.

By default each gloo group has a thread of its own, which wakes up 100 times a second. Megatron creates about 20 groups
per rank, and vLLM 16 per engine, most of them of one process: on a CPU these threads took 4 % of a core from each
process, busy or idle.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_Gloo: Any = dist.ProcessGroupGloo


class SharedGloo(_Gloo):
    """torch's gloo group, on this process's shared devices. In gloo, a device is an address and the thread that waits
    for messages; groups may share it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = _Gloo._Options()
        options._timeout, options._devices = timeout, _devices()
        super().__init__(store, rank, size, options)


def share_gloo_threads() -> None:
    """Lets all gloo groups created later in this process share their devices. May be called again.

    torch passes no options to gloo groups, so this replaces the class that torch creates.
    """
    distributed_c10d.ProcessGroupGloo = SharedGloo  # type: ignore[misc]


@cache
def _devices() -> list[Any]:
    """Returns the devices that torch would choose for a group: of the interfaces named by GLOO_SOCKET_IFNAME, else of
    the address of this host's name."""
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [_Gloo.create_device(interface=name) for name in interfaces.split(",")]
    return [_Gloo.create_default_device()]
