"""Checks GPUs by NVML and the kernel's log: enough, healthy and idle.

Only Xid errors (docs.nvidia.com/deploy/xid-errors) caused by a device or its link count; the others are caused by
programs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_mega.cluster import devices
from skyrl_mega.cluster.devices import TorchView
from skyrl_mega.cluster.nvml import NvmlUnavailable, open_nvml
from skyrl_mega.preflight.finding import NodeProblem, gib, most_common

XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "high rate of single-bit errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""Meaning of each Xid error caused by a device."""
RECENT_S = 24 * 3600.0
"""Maximum age of an Xid error that counts, in seconds. Since older errors the node has been checked or restarted."""
IDLE_BYTES = 1 << 30
"""Maximum memory used on an idle GPU: the driver's memory."""
CLOCK_FAULTS = {0x8: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
"""Reasons for reduced clocks that are faults, by NVML's bits. Idle, power cap and application clocks are no faults."""

_LINE = re.compile(r"NVRM: Xid \((?P<where>[^)]*)\): (?P<xid>\d+)")


@dataclass(frozen=True)
class Gpu:
    """State of a GPU. Values not reported by the device are None."""

    index: int
    """NVML's number of the GPU on the node."""
    name: str
    """Product name."""
    bus: str
    """PCI bus id."""
    memory_bytes: int
    """Total memory."""
    used_bytes: int
    """Memory in use by all programs and the driver."""
    processes: tuple[int, ...]
    """Ids of processes computing on the GPU."""
    ecc_errors: int | None
    """Uncorrected errors since the driver was loaded."""
    remap_pending: bool | None
    """True if memory rows will be remapped at the next reset."""
    remap_failed: bool | None
    """True if remapping a faulty memory row failed."""
    clock_faults: tuple[str, ...]
    """Faults reducing the clocks at present, from `CLOCK_FAULTS`."""


@dataclass(frozen=True)
class GpuFacts:
    """Facts about the GPUs of a node, from NVML, the kernel's log and torch."""

    driver: str | None
    """Version of the NVIDIA driver."""
    gpus: tuple[Gpu, ...]
    lost: tuple[str, ...] = ()
    """GPUs that NVML counts but cannot query."""
    xids: tuple[tuple[str, int], ...] | None = ()
    """Recent (bus id, Xid) pairs of the kernel's log; None if unreadable."""
    error: str | None = None
    """Reason why NVML reports nothing; None if it works."""
    torch: TorchView | None = None
    """GPUs as torch sees them; None if torch was not asked."""


def gather(nvml: Any = None, sight: Callable[[], TorchView] = devices.torch_view) -> GpuFacts:
    """Returns the state of this node's GPUs from NVML and torch.

    A missing or failing NVML is not raised but described in `GpuFacts.error`; GPUs that cannot be queried are in
    `GpuFacts.lost`.

    Args:
        nvml: The module `pynvml` or a substitute for tests; None imports the module.
        sight: Returns the GPUs as torch sees them.
    """
    torch_sight = sight()
    try:
        with open_nvml(nvml) as library:
            try:
                driver = str(library.nvmlSystemGetDriverVersion())
                gpus_found, lost = [], []
                for index in range(library.nvmlDeviceGetCount()):
                    try:
                        gpus_found.append(_gpu(library, index))
                    except library.NVMLError as error:
                        lost.append(f"GPU {index}: {error}")
                return GpuFacts(driver, tuple(gpus_found), tuple(lost), recent_xids(), torch=torch_sight)
            except library.NVMLError as error:
                return GpuFacts(None, (), error=f"NVML does not answer: {error}", torch=torch_sight)
    except NvmlUnavailable as error:
        return GpuFacts(None, (), error=str(error), torch=torch_sight)


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def query(function: str, *arguments: Any) -> Any:
        """Returns the function's result, or None if unsupported by the device or an older driver."""
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
            return None

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    remapped = query("nvmlDeviceGetRemappedRows")
    reasons = query("nvmlDeviceGetCurrentClocksEventReasons") or 0
    return Gpu(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        bus=str(nvml.nvmlDeviceGetPciInfo(handle).busId),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        processes=tuple(p.pid for p in query("nvmlDeviceGetComputeRunningProcesses") or ()),
        ecc_errors=query(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        clock_faults=tuple(text for bit, text in CLOCK_FAULTS.items() if reasons & bit),
    )


def recent_xids() -> tuple[tuple[str, int], ...] | None:
    """Returns (bus id, Xid) pairs of the last `RECENT_S` seconds of the kernel's log, of every Xid and not only of
    `XIDS`; None if unreadable."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines: list[str] = []
    try:
        while True:
            try:
                lines.append(os.read(log, 8192).decode(errors="replace"))
            except BlockingIOError:
                break
            except BrokenPipeError:  # lines were overwritten while reading; the following ones remain
                continue
    except OSError:
        return None
    finally:
        os.close(log)
    with open("/proc/uptime") as uptime:
        return parse_xids(lines, float(uptime.read().split()[0]))


def parse_xids(lines: Iterable[str], uptime_s: float) -> tuple[tuple[str, int], ...]:
    """Returns (bus id, Xid) pairs of at most `RECENT_S` seconds of age, in the order of the lines; lines without an Xid
    are skipped.

    Args:
        lines: Records of /dev/kmsg: `<level>,<number>,<microseconds since boot>,…;<text>`.
        uptime_s: Present time in seconds since boot.
    """
    xids = []
    for line in lines:
        head, _, text = line.partition(";")
        fields = head.split(",")
        match = _LINE.search(text)
        if match and len(fields) > 2 and fields[2].isdigit() and uptime_s - int(fields[2]) / 1e6 <= RECENT_S:
            xids.append((match["where"].removeprefix("PCI:"), int(match["xid"])))
    return tuple(xids)


def check(facts: Mapping[str, GpuFacts], wanted: int) -> list[NodeProblem]:
    """Returns findings about missing, unhealthy, busy and unequal GPUs, GPUs that torch does not see, old drivers, and
    recent Xid errors of `XIDS`: bad, or warn if a run may work nevertheless; [] without any. More GPUs than wanted are
    no finding. A node with `GpuFacts.error` gets only this error as a finding (bad).

    Args:
        facts: State of the GPUs by node.
        wanted: Required number of GPUs per node.
    """
    findings = []
    names = {node: gpu.name for node, f in facts.items() for gpu in f.gpus[:1]}
    for node, f in facts.items():

        def bad(text: str, status: Any = "bad", node: str = node) -> None:
            findings.append(NodeProblem(node, "gpus", status, text))

        if f.error:
            bad(f.error)
            continue
        for text in f.lost:
            bad(f"{text}; drain the node")
        if len(f.gpus) < wanted:
            bad(f"{len(f.gpus)} GPUs answer, {wanted} are wanted (cluster.gpus_per_node)")
        if f.torch and not f.torch.sees:
            bad(devices.why_no_gpu(f.torch, f.driver, {}))
        elif f.torch and devices.outdated(f.torch.cuda, f.driver):
            least = devices.least_driver(f.torch.cuda)
            bad(
                f"driver {f.driver} is older than {least}, CUDA {f.torch.cuda} runs by its compatibility library; "
                "update the driver if programs fail",
                "warn",
            )
        for gpu in f.gpus:
            for text in _health(gpu):
                bad(f"GPU {gpu.index}: {text}")
            if gpu.name != most_common(names):
                bad(f"GPU {gpu.index}: is a {gpu.name}, other nodes have {most_common(names)}", "warn")
        if f.xids is None:
            bad("the kernel's log (/dev/kmsg) cannot be read, so Xid errors are not checked", "warn")
        for where, xid in sorted(set(f.xids or ())):
            if xid in XIDS:
                bad(f"Xid {xid} ({XIDS[xid]}) of {where} in the last {RECENT_S / 3600:g} h; reset or drain the node")
    return findings


def _health(gpu: Gpu) -> list[str]:
    problems = []
    if gpu.ecc_errors:
        problems.append(f"{gpu.ecc_errors} uncorrected ECC errors; reset it or drain the node")
    if gpu.remap_failed:
        problems.append("row remapping failed; drain the node")
    if gpu.remap_pending:
        problems.append("memory rows wait to be remapped; reset the GPU")
    if gpu.clock_faults:
        problems.append(f"clocks are reduced: {', '.join(gpu.clock_faults)}; check cooling and power")
    if gpu.processes:
        problems.append(f"processes {', '.join(map(str, gpu.processes))} compute on it; end them")
    elif gpu.used_bytes > IDLE_BYTES:
        problems.append(f"{gib(gpu.used_bytes)} of its memory are in use; end the programs left by earlier jobs")
    return problems
