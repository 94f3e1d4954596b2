"""Memory use of a process between two readings: its peak, and the memory in use on the GPU and the node.

A reading takes well under a millisecond and waits for no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
PEAK_OF_RSS = "5"
"""Value for `clear_refs` that resets the peak of the resident set (proc(5), Linux 4.0)."""


@dataclass(frozen=True)
class MemoryReading:
    """Memory in bytes, and numbers of allocator events. Peaks and numbers cover the time since the previous reading."""

    peak: int
    """Peak of the process: on CUDA, GPU memory allocated by torch; on a CPU, the resident set, or the present resident
    set if the system does not allow to reset its peak."""
    node: int
    """Host memory of the node now in use by all programs: total minus available."""
    reserved: int | None = None
    """CUDA: peak of the memory reserved by torch's allocator, cached blocks included."""
    device: int | None = None
    """CUDA: GPU memory currently used by all processes, CUDA contexts included."""
    retries: int | None = None
    """CUDA: number of allocations that failed at first, so the allocator waited for the GPU and freed cached blocks."""
    allocations: int | None = None
    """CUDA: number of memory requests to the CUDA driver; each waits for the GPU."""


class MemoryMeter:
    """Reads the memory use of a process. The first reading covers the time since the start of the process.

    Args:
        device: `cuda`, for the current CUDA device, or `cpu`.
        proc: Folder with Linux's process files.
    """

    def __init__(self, device: str, proc: Path = PROC) -> None:
        self.cuda, self.proc = device == "cuda", proc
        self._events = (0, 0)

    def read(self) -> MemoryReading:
        """Returns the memory use since the previous call and resets the peaks of this process. On a CPU only `peak`
        (the process's resident memory) and `node` are measured; the other fields are None."""
        node = self._node()
        if not self.cuda:
            return MemoryReading(self._resident(), node)
        import torch

        stats = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        free, total = torch.cuda.mem_get_info()
        events = stats.get("num_alloc_retries", 0), stats.get("num_device_alloc", 0)
        retries, allocations = (now - before for now, before in zip(events, self._events, strict=True))
        self._events = events
        return MemoryReading(
            peak=stats.get("allocated_bytes.all.peak", 0),
            node=node,
            reserved=stats.get("reserved_bytes.all.peak", 0),
            device=total - free,
            retries=retries,
            allocations=allocations,
        )

    def _resident(self) -> int:
        """Returns the peak of the resident set in bytes; if resetting the peak is not allowed, the current resident
        set."""
        sizes = _table(self.proc / "self" / "status")
        try:
            (self.proc / "self" / "clear_refs").write_text(PEAK_OF_RSS)
        except OSError:  # a container may forbid the reset; the peak would then cover the whole life of the process
            return sizes["VmRSS"]
        return max(sizes["VmHWM"], sizes["VmRSS"])

    def _node(self) -> int:
        sizes = _table(self.proc / "meminfo")
        return sizes["MemTotal"] - sizes["MemAvailable"]


def _table(file: Path) -> dict[str, int]:
    """Returns name -> bytes for the lines of a file with values in kB."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
