"""The memory of a vLLM worker by parts: weights and KV cache are dropped, and come back empty.

On CUDA both are held by the allocator of vLLM's sleep mode (`device_allocator/cumem.py`), started by
`enable_sleep_mode`. This allocator frees the pages of everything allocated under a tag, and maps new pages to the same
addresses, held by CUDA graphs. We use its `discard`, which keeps no copy: an update delivers every weight. Data in the
same memory that no update delivers, such as rotary tables, scales and orders of rows, is constant: it is copied to the
host before, and back afterwards. vLLM's own `sleep(level=2)` saves only the model's buffers, and drops both parts or
none.

A CPU has no such allocator: there the kernel takes back the pages of parameters and cache, whose addresses stay as
well. Packed copies of linear layers' weights are freed; the next update packs the weights again.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from skyrl_mega.engines.presence import CACHE, WEIGHTS
from skyrl_mega.engines.vllm.params import LoadTimeParameters

TAGS = {WEIGHTS: ("weights",), CACHE: ("kv_cache", "workspace")}
"""Tags of each part in vLLM's allocator. The workspace is scratch memory of mixture-of-experts layers (512 MiB a
worker of Qwen3-30B-A3B at TP8); like the cache, needed only for generation (`v1/worker/workspace.py`).
"""


class Memory(Protocol):
    """The memory that holds the parts."""

    def constants(self, filled: list[Tensor]) -> list[Tensor]:
        """Returns the tensors in the weights' memory other than `filled`, the tensors that an update writes: their
        values must be saved before a drop."""

    def drop(self, part: str, tensors: list[Tensor]) -> None:
        """Frees the memory of a part, "engine_weights" or "kv_cache", which consists of these tensors. The tensors stay
        valid objects at the same addresses."""

    def bring_back(self, part: str) -> None:
        """Allocates the memory of a dropped part, "engine_weights" or "kv_cache", again, at the same addresses. The
        content is undefined."""


@dataclass
class MemoryParts:
    """The memory of a worker, in parts that can be dropped.

    Args:
        model: The loaded model.
        parameters: The model's parameters as written by updates.
        caches: Tensors of the KV cache.
        memory: The memory that holds the parts.
    """

    model: Module
    parameters: LoadTimeParameters
    caches: list[Tensor]
    memory: Memory
    asleep: set[str] = field(default_factory=set)
    """Dropped parts."""
    found_constants: list[Tensor] | None = None
    """Constants; searched for once, as nothing is allocated under the weights' tag after the model was loaded."""
    saved: list[Tensor] = field(default_factory=list)
    """Values of the constants, on the host, while the weights are dropped."""

    def drop(self, part: str) -> None:
        """Frees the memory of a part, "engine_weights" or "kv_cache"; no-op for a part already dropped.

        The values of the model's constants are saved on the host.

        Raises:
            OSError: On a CPU the system does not take the memory, because its pages are locked.
        """
        if part in self.asleep:
            return
        if part == WEIGHTS:
            if self.found_constants is None:
                self.found_constants = self.memory.constants(self._weights())
            self.saved = [tensor.to("cpu", copy=True) for tensor in self.found_constants]
            self.parameters.undefined = True
        self.asleep.add(part)
        self.memory.drop(part, self._tensors(part))

    @torch.no_grad()
    def bring_back(self, part: str) -> None:
        """Allocates the memory of a part, "engine_weights" or "kv_cache", again; no-op for a part not dropped. The
        cache is empty.

        Constants get the former values back; other weights are 0, as required for padding, which no update covers, and
        the next update must deliver all of them.
        """
        if part not in self.asleep:
            return
        self.memory.bring_back(part)
        for storage in storages(self._tensors(part)):
            as_bytes(storage).zero_()
        if part == WEIGHTS:
            for tensor, value in zip(self.found_constants or [], self.saved, strict=True):
                tensor.copy_(value)
            self.saved = []
        self.asleep.discard(part)

    def _tensors(self, part: str) -> list[Tensor]:
        return self._weights() if part == WEIGHTS else self.caches

    def _weights(self) -> list[Tensor]:
        return [parameter.data for parameter in self.model.parameters()]


def storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yields the distinct storages of tensors: each once, though several tensors may share a storage."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Returns a tensor uint8 [bytes] that shares the memory of the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ---- CUDA ------------------------------------------------------------------------------------------------------------


class CudaMemory:
    """vLLM's sleep-mode allocator in this process.

    Args:
        allocator: A `CuMemAllocator`.
    """

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.dropped: set[str] = set()
        """Parts that are asleep."""

    def constants(self, filled: list[Tensor]) -> list[Tensor]:
        """Returns the constants: data in the weights' memory that no weight update writes, such as rotary tables and
        scales. [] without constants.

        Each constant is a uint8 tensor with the bytes of a whole storage, and shares the memory. Searches all tensors
        known to Python, as kernels also keep some in caches outside the model's modules.

        Args:
            filled: The tensors that an update writes, which are no constants.
        """
        inside = _Ranges(self.allocator, TAGS[WEIGHTS][0])
        seen = {storage._cdata for storage in storages(filled)}
        constants = []
        for tensor in _live_tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in seen and storage.data_ptr() in inside:
                seen.add(storage._cdata)
                constants.append(as_bytes(storage))
        return constants

    def drop(self, part: str, tensors: list[Tensor]) -> None:
        """Frees the memory of a part, "engine_weights" or "kv_cache", and memory cached by torch. Constants in the part
        are lost unless saved before (`MemoryParts.drop`). `tensors` is not used, as the allocator knows the part's
        memory."""
        self.dropped.add(part)
        self.allocator.discard(TAGS[part])
        gc.collect()
        torch.accelerator.empty_cache()

    def bring_back(self, part: str) -> None:
        """Allocates the memory of a part, "engine_weights" or "kv_cache", again, at the same addresses, with undefined
        content. Other dropped parts stay dropped."""
        self.dropped.discard(part)
        self.allocator.wake_up(list(TAGS[part]))
        for other in sorted(self.dropped):  # vLLM wakes every tag but weights and cache, regardless of the request
            self.allocator.discard(TAGS[other])


class _Ranges:
    """The address ranges given out by vLLM's allocator under a tag."""

    def __init__(self, allocator: Any, tag: str) -> None:
        known = allocator.pointer_to_data.items()
        self.ranges = sorted((start, start + data.handle[1]) for start, data in known if data.tag == tag)

    def __contains__(self, address: int) -> bool:
        place = bisect_right(self.ranges, address, key=lambda limits: limits[0]) - 1
        return place >= 0 and address < self.ranges[place][1]


def _live_tensors() -> list[Tensor]:
    """Returns all tensors with memory in this process's Python."""
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.unfreeze()  # vLLM freezes existing objects after its start, which hides them from `get_objects`
    try:
        objects = gc.get_objects()
    finally:
        if frozen:
            gc.freeze()
    # Other kinds of tensors, such as the compiler's, have no memory of their own.
    tensors = [item for item in objects if type(item) is Tensor or issubclass(type(item), Parameter)]
    return [item for item in tensors if item.layout is torch.strided and item.device.type != "meta"]


# ---- CPU -------------------------------------------------------------------------------------------------------------


class ProcessMemory:
    """The memory of this process, for a model on the CPU.

    Args:
        model: The loaded model. Its linear layers keep packed weights in `cpu_linear`.
    """

    def __init__(self, model: Module) -> None:
        self.model = model

    def constants(self, filled: list[Tensor]) -> list[Tensor]:
        """Returns []: on a CPU only the given parameters are dropped, nothing else."""
        return []

    def drop(self, part: str, tensors: list[Tensor]) -> None:
        """Frees the pages of the tensors, whose elements then read as 0. For "engine_weights" also frees the packed
        weights of linear layers; such a layer raises RuntimeError when used before the next update.

        Args:
            part: "engine_weights" or "kv_cache".
            tensors: The tensors of the part.

        Raises:
            OSError: The system refuses because the pages are locked.
        """
        for storage in storages(tensors):
            take_pages(storage)
        if part == WEIGHTS:
            for module in self.model.modules():
                if "cpu_linear" in vars(module):
                    vars(module)["cpu_linear"] = _raise_dropped
            trim()

    def bring_back(self, part: str) -> None:
        """Does nothing: the system gives pages again when they are written to."""


def _raise_dropped(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("the weights of this layer have been dropped (the engine is asleep); sync the weights first")


def take_pages(storage: torch.UntypedStorage) -> None:
    """Gives the pages that lie completely in a storage back to the system; later reads of them give 0. Parts of pages
    at both ends keep their content.

    Raises:
        OSError: The system refuses because the pages are locked.
    """
    first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
            number = ctypes.get_errno()
            raise OSError(number, f"madvise: {os.strerror(number)}")


def trim() -> None:
    """Asks the C library to give free memory back to the system, if supported (glibc)."""
    gc.collect()
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is not None:
        call(0)
