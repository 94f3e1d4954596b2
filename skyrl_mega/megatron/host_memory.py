"""Host memory for what leaves a device for a while, and memory given back to whoever else is on the device."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

_M_MMAP_THRESHOLD = -3
MAPPED = 2**20
"""On a CPU, blocks of so many bytes are mapped one by one from the first time on that memory is given back: the C
library raises its own threshold to the largest block that was freed, and keeps what is below it."""


class HostMemory:
    """Bytes in host memory beside a device, as one tensor.

    For a GPU they are locked (cudaHostRegister), as it reads pageable memory at a tenth of the link's rate; torch's own
    pinned memory is rounded up to a power of two, which is up to twice of what a large model needs. Where the device is
    the CPU, they lie in a file without a name: its pages count as the process's memory only from when they are touched
    until `rest`, so that what leaves the "device" really leaves the process.

    Args:
        size: Bytes.
        device: What copies to and from it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._cpu = device.type == "cpu"
        if self._cpu:
            file = os.memfd_create("parked")
            try:
                os.ftruncate(file, size)
                self._memory = mmap.mmap(file, size)
            finally:
                os.close(file)
        else:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.flat: Tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        """uint8 [size]."""
        if not self._cpu:
            # Called without its errors being raised: a code, 0 for none.
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self.flat.data_ptr(), size, 0)))

    def rest(self) -> None:
        """Nobody reads or writes it for a while. It keeps what it holds."""
        if self._cpu:
            self._memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unlocks the memory; it is freed with the last tensor that looks at it."""
        if not self._cpu:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self.flat.data_ptr())))


def give_back(device: torch.device) -> None:
    """Freed memory that torch, or on a CPU the C library, keeps for later goes back to the device, for others."""
    if device.type == "cpu":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, MAPPED)
        library.malloc_trim(0)
    else:
        torch.cuda.empty_cache()
