"""A network thread shared by the gloo groups of a process that have a single member.

By default each gloo group starts a network thread, and the thread wakes up 100 times a second. Megatron creates about
20 groups per rank, and vLLM 16 per engine. Most of these groups have a single member. On a CPU the threads together
used 4 % of a core in each policy process, even in an idle one.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

_Gloo: Any = dist.ProcessGroupGloo
_torchs_init = _Gloo.__init__


def share_gloo_threads() -> None:
    """Lets the gloo groups of a single member that are created later in this process share a network thread. Groups
    with more members, or created with options of their own, keep a thread each. May be called again.

    Replaces the constructor of torch's class, because torch passes no options to gloo groups. A group with more members
    cannot share: if its creation times out, gloo may still call back into it.
    """
    _Gloo.__init__ = _init


def _init(group: Any, store: dist.Store, rank: int, size: int, *rest: Any, **named: Any) -> None:
    """Constructs a group like torch. A group of a single member, given a time limit and no options, gets the process's
    shared device."""
    given = (*rest, *named.values())
    if size == 1 and len(given) == 1 and isinstance(given[0], timedelta):
        options = _Gloo._Options()
        options._timeout, options._devices = given[0], [_device()]
        _torchs_init(group, store, rank, size, options)
    else:
        _torchs_init(group, store, rank, size, *rest, **named)


@cache
def _device() -> Any:
    """Returns the shared device: in gloo an address and its network thread. Nothing connects to the address, so
    GLOO_SOCKET_IFNAME does not matter."""
    return _Gloo.create_device(hostname="127.0.0.1")
