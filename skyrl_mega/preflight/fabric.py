"""InfiniBand and RoCE adapters of a node, and whether NCCL can use them.

NCCL opens adapters through libibverbs and a vendor driver library. If either is missing, as in many containers, NCCL
falls back to TCP and reports the fallback only at NCCL_DEBUG=INFO.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from skyrl_mega.preflight.finding import NodeProblem

ADAPTERS = Path("/sys/class/infiniband")
"""The kernel's folder of InfiniBand and RoCE adapters."""
REMEDY = "install libibverbs1 and ibverbs-providers, and let the container see /dev/infiniband"


@dataclass(frozen=True)
class FabricFacts:
    """Facts about the InfiniBand and RoCE adapters of a node."""

    adapters: tuple[str, ...]
    """Adapters listed by the kernel."""
    usable: int
    """Number of adapters opened by libibverbs."""
    error: str | None = None
    """Reason why libibverbs is unavailable; None if available."""


def gather(adapters: Path = ADAPTERS, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> FabricFacts:
    """Returns the InfiniBand and RoCE adapters listed by the kernel of this node, and the number of adapters opened by
    libibverbs. A missing library is not raised but described in `FabricFacts.error`; without adapters it is not loaded.

    Args:
        adapters: The kernel's folder of adapters.
        load: Loads a shared library.
    """
    names = tuple(sorted(entry.name for entry in adapters.iterdir())) if adapters.is_dir() else ()
    if not names:
        return FabricFacts((), 0)
    try:
        verbs = load("libibverbs.so.1")
    except OSError as error:
        return FabricFacts(names, 0, f"libibverbs cannot be loaded ({error})")
    count = ctypes.c_int(0)
    verbs.ibv_get_device_list.restype = ctypes.c_void_p
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    if devices:
        verbs.ibv_free_device_list(ctypes.c_void_p(devices))
    return FabricFacts(names, count.value)


def check(facts: Mapping[str, FabricFacts]) -> list[NodeProblem]:
    """Returns a warning for each node whose adapters are not all opened by libibverbs, and thus by NCCL; [] without
    any.

    Args:
        facts: Node → result of `gather`.
    """
    findings = []
    for node, f in facts.items():
        if f.usable < len(f.adapters):
            shown = ", ".join(f.adapters[:3]) + ("…" if len(f.adapters) > 3 else "")
            why = f.error or f"libibverbs opens {f.usable} of {len(f.adapters)}"
            text = f"{shown}: {why}, so NCCL talks over TCP; {REMEDY}"
            findings.append(NodeProblem(node, "network", "warn", text))
    return findings
