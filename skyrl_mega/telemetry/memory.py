"""Memory of a process from one reading to the next: the most that it had, and what its GPU and its node have left.

A reading costs well under a millisecond and waits for no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
PEAK_OF_RSS = "5"
"""What `clear_refs` is told to begin a new high-water mark of the resident set (proc(5), Linux 4.0)."""


@dataclass(frozen=True)
class Reading:
    """Bytes, or a number of events, since the reading before."""

    peak: int
    """The most of it: on CUDA what torch's allocator has given out, on a CPU the resident set."""
    node: int
    """Of the node's memory, now: what no program can have, whoever uses it."""
    reserved: int | None = None
    """CUDA: the most that the allocator has taken from the GPU, what it keeps for later included."""
    device: int | None = None
    """CUDA: of the GPU's memory, now, by all processes, CUDA's contexts included."""
    retries: int | None = None
    """CUDA: times that the allocator found no room, waited for the GPU and gave back what it kept."""
    allocations: int | None = None
    """CUDA: times that it asked the driver for memory, each of which waits for the GPU."""


class MemoryMeter:
    """Reads one process's memory. The first reading is since the start of the process.

    Args:
        device: `cuda`, whose current device is read, or `cpu`.
        proc: Linux's files about processes.
    """

    def __init__(self, device: str, proc: Path = PROC) -> None:
        self.cuda, self.proc = device == "cuda", proc
        self._events = (0, 0)

    def read(self) -> Reading:
        """What was, and a new beginning."""
        node = self._node()
        if not self.cuda:
            return Reading(self._resident(), node)
        import torch

        stats = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        free, total = torch.cuda.mem_get_info()
        events = stats.get("num_alloc_retries", 0), stats.get("num_device_alloc", 0)
        retries, allocations = (now - before for now, before in zip(events, self._events, strict=True))
        self._events = events
        return Reading(
            peak=stats.get("allocated_bytes.all.peak", 0),
            node=node,
            reserved=stats.get("reserved_bytes.all.peak", 0),
            device=total - free,
            retries=retries,
            allocations=allocations,
        )

    def _resident(self) -> int:
        """The high-water mark of the resident set; where no new one may be begun, the resident set as it is now."""
        sizes = _table(self.proc / "self" / "status")
        try:
            (self.proc / "self" / "clear_refs").write_text(PEAK_OF_RSS)
        except OSError:  # a container may forbid it; the mark would then be the whole life's
            return sizes["VmRSS"]
        return max(sizes["VmHWM"], sizes["VmRSS"])

    def _node(self) -> int:
        sizes = _table(self.proc / "meminfo")
        return sizes["MemTotal"] - sizes["MemAvailable"]


def _table(file: Path) -> dict[str, int]:
    """Bytes by name, of the lines that are in kB."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
