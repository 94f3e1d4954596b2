"""Host memory for state moved off a device, and the return of freed memory to other users of the device."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

_M_MMAP_THRESHOLD = -3
MAPPED = 2**20
"""Size in bytes from which blocks on a CPU are mapped one by one, after the first call of `release_cached_memory`. By
default, the C library raises this threshold to the largest block freed so far and keeps smaller blocks."""


class HostMemory:
    """A block of host memory next to a device, as a single tensor.

    For a GPU the memory is page-locked (cudaHostRegister), because a GPU reads pageable memory at a tenth of the link's
    rate. torch's own pinned memory rounds sizes up to a power of two, up to twice the need of a large model. For a CPU
    device the memory is an unnamed file, with pages that count as process memory only between the first access and
    `release_pages`. So state moved off the "device" really leaves the process.

    Args:
        size: Bytes.
        device: The device to copy to and from.
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
        """The whole block as uint8 [size]."""
        if not self._cpu:
            # cudaHostRegister returns an error code instead of raising.
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self.flat.data_ptr(), size, 0)))

    def release_pages(self) -> None:
        """Removes the block from this process's memory use until the next access, for a CPU device; the bytes of the
        block stay valid. Does nothing for a GPU."""
        if self._cpu:
            self._memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Ends the page lock for a GPU; does nothing for a CPU device. Call at most once. The memory itself is freed
        together with the last tensor on it."""
        if not self._cpu:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self.flat.data_ptr())))


def release_cached_memory(device: torch.device) -> None:
    """Returns unused cached memory to other users: for a CUDA device torch's cache to the GPU, for a CPU device the C
    library's to the operating system. After the first call on a CPU, freed blocks of `MAPPED` bytes or more return at
    once."""
    if device.type == "cpu":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, MAPPED)
        library.malloc_trim(0)
    else:
        torch.cuda.empty_cache()
