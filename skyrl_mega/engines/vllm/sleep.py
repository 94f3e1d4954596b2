"""The memory of a vLLM worker by parts: weights and KV cache are dropped, and come back empty.

On CUDA vLLM's allocator for its sleep mode holds them (`device_allocator/cumem.py`), started by `enable_sleep_mode`. It
gives back the pages of all that was allocated under a tag, and maps new ones to the same addresses, which CUDA graphs
hold. We use its `discard`, which keeps no copy: an update brings every weight. What lies in the same memory and no
update brings, such as rotary tables, scales and orders of rows, is a constant: it is copied to the host before, and
back. vLLM's own `sleep(level=2)` saves the model's buffers alone, and drops both parts or none.

A CPU has no such allocator: there the kernel takes back the pages of parameters and cache, whose addresses stay as
well, and what has been packed of a linear layer's weights, which the next update packs again, is let go.
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
"""Tags under which vLLM's allocator holds each part. The workspace is scratch memory of mixture-of-experts layers (512
MiB a worker of Qwen3-30B-A3B at TP8); like the cache, only generation needs it (`v1/worker/workspace.py`)."""


class Memory(Protocol):
    """Where the parts lie."""

    def constants(self, filled: list[Tensor]) -> list[Tensor]:
        """Tensors that lie where the weights do, and are none of those that an update fills."""

    def drop(self, part: str, tensors: list[Tensor]) -> None:
        """Gives back the memory of a part, all of which is in these tensors."""

    def bring_back(self, part: str) -> None:
        """The memory is there again; what is in it is undefined."""


@dataclass
class Parts:
    """The parts of one worker.

    Args:
        model: As loaded.
        parameters: The way that updates take into it.
        caches: Tensors of the KV cache.
        memory: What they lie in.
    """

    model: Module
    parameters: LoadTimeParameters
    caches: list[Tensor]
    memory: Memory
    asleep: set[str] = field(default_factory=set)
    held: list[Tensor] | None = None
    """Constants; looked for once, as nothing is allocated under the weights' tag after the model has been loaded."""
    saved: list[Tensor] = field(default_factory=list)
    """What is in them, on the host, while the weights are dropped."""

    def drop(self, part: str) -> None:
        """Gives back a part's memory."""
        if part in self.asleep:
            return
        if part == WEIGHTS:
            if self.held is None:
                self.held = self.memory.constants(self._weights())
            self.saved = [tensor.to("cpu", copy=True) for tensor in self.held]
            self.parameters.undefined = True
        self.asleep.add(part)
        self.memory.drop(part, self._tensors(part))

    @torch.no_grad()
    def bring_back(self, part: str) -> None:
        """Takes the memory again. The cache is empty; of the weights only what no update brings is what it was, and
        the rest is 0: so padding, which no update covers, is again."""
        if part not in self.asleep:
            return
        self.memory.bring_back(part)
        for storage in storages(self._tensors(part)):
            as_bytes(storage).zero_()
        if part == WEIGHTS:
            for tensor, value in zip(self.held or [], self.saved, strict=True):
                tensor.copy_(value)
            self.saved = []
        self.asleep.discard(part)

    def _tensors(self, part: str) -> list[Tensor]:
        return self._weights() if part == WEIGHTS else self.caches

    def _weights(self) -> list[Tensor]:
        return [parameter.data for parameter in self.model.parameters()]


def storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """The storages of tensors, each once."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ---- CUDA ------------------------------------------------------------------------------------------------------------


class CudaMemory:
    """vLLM's allocator of this process.

    Args:
        allocator: A `CuMemAllocator`.
    """

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.dropped: set[str] = set()
        """Parts that are asleep."""

    def constants(self, filled: list[Tensor]) -> list[Tensor]:
        """As of `Memory`. Every tensor that Python knows is looked at, as kernels also keep some in caches of theirs
        that no module of the model holds."""
        inside = _Ranges(self.allocator, TAGS[WEIGHTS][0])
        seen = {storage._cdata for storage in storages(filled)}
        found = []
        for tensor in _alive():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in seen and storage.data_ptr() in inside:
                seen.add(storage._cdata)
                found.append(as_bytes(storage))
        return found

    def drop(self, part: str, tensors: list[Tensor]) -> None:
        """As of `Memory`; what torch has cached beside it goes too."""
        self.dropped.add(part)
        self.allocator.discard(TAGS[part])
        gc.collect()
        torch.accelerator.empty_cache()

    def bring_back(self, part: str) -> None:
        """As of `Memory`."""
        self.dropped.discard(part)
        self.allocator.wake_up(list(TAGS[part]))
        for other in sorted(self.dropped):  # vLLM wakes every tag but weights and cache, whatever it is asked for
            self.allocator.discard(TAGS[other])


class _Ranges:
    """The addresses that vLLM's allocator has given out under a tag."""

    def __init__(self, allocator: Any, tag: str) -> None:
        known = allocator.pointer_to_data.items()
        self.ranges = sorted((start, start + data.handle[1]) for start, data in known if data.tag == tag)

    def __contains__(self, address: int) -> bool:
        place = bisect_right(self.ranges, address, key=lambda one: one[0]) - 1
        return place >= 0 and address < self.ranges[place][1]


def _alive() -> list[Tensor]:
    """All tensors with memory that this process's Python has."""
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.unfreeze()  # vLLM freezes what there is after its start, and Python then does not tell of it
    try:
        objects = gc.get_objects()
    finally:
        if frozen:
            gc.freeze()
    # Other kinds of tensors, such as the compiler's, have no memory of their own.
    tensors = [one for one in objects if type(one) is Tensor or issubclass(type(one), Parameter)]
    return [one for one in tensors if one.layout is torch.strided and one.device.type != "meta"]


# ---- CPU -------------------------------------------------------------------------------------------------------------


class HostMemory:
    """The memory of this process, where the model computes on its CPU.

    Args:
        model: As loaded. Its linear layers keep packed weights in `cpu_linear`.
    """

    def __init__(self, model: Module) -> None:
        self.model = model

    def constants(self, filled: list[Tensor]) -> list[Tensor]:
        """None: here parameters are dropped one by one, and nothing else."""
        return []

    def drop(self, part: str, tensors: list[Tensor]) -> None:
        """As of `Memory`."""
        for storage in storages(tensors):
            take_pages(storage)
        if part == WEIGHTS:
            for module in self.model.modules():
                if "cpu_linear" in vars(module):
                    vars(module)["cpu_linear"] = _dropped
            trim()

    def bring_back(self, part: str) -> None:
        """As of `Memory`: pages come as they are written to."""


def _dropped(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("the weights of this layer have been dropped; an update brings them")


def take_pages(storage: torch.UntypedStorage) -> None:
    """Gives the whole pages of a storage back to the system; they are 0 when they are next looked at.

    Raises:
        OSError: The system does not take them, as they are locked.
    """
    first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
            number = ctypes.get_errno()
            raise OSError(number, f"madvise: {os.strerror(number)}")


def trim() -> None:
    """Has the C library give free memory back to the system, where it can be asked to (glibc)."""
    gc.collect()
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if call is not None:
        call(0)
