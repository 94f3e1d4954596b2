"""Residency of a rank's state in device memory: parts of the state move to host memory, bit by bit, and back.

Storages are moved, the memory behind tensors. An offloaded storage is resized to 0 bytes, and gets new memory when
onloaded. All tensors with that storage (parameters, data parallelism's buckets, the optimizer's shards, the reference's
pieces) stay valid. Addresses change, so no code may keep an address: the weight sync passes current addresses to the
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from skyrl_mega.config.residency import POLICY
from skyrl_mega.megatron.host_memory import HostMemory, release_cached_memory
from skyrl_mega.megatron.moments import inner_optimizers, master_weights

ALIGNMENT = 512
"""Alignment in bytes of every storage in host memory, the same as on a device."""

DROPPED = frozenset({"gradients"})
"""Parts with no contents worth keeping after an optimizer step; zeros on return."""

Tensors = Callable[[], Iterable[Tensor]]
"""A function that returns the current tensors of a part."""


class NotOnDevice(RuntimeError):
    """Error for use of a part of a rank's state while the part is offloaded."""


class OffloadablePart:
    """Storages moved together to host memory (offload) and back to the device (onload).

    An interrupted move can simply be repeated: the host copy is valid from the end of an offload until the end of the
    onload.

    Args:
        device: The device of the storages.
        dropped: True to return zeros on onload and use no host memory.
    """

    def __init__(self, device: torch.device, *, dropped: bool = False) -> None:
        self._device, self._dropped = device, dropped
        self._stream: torch.cuda.Stream | None = None
        self._storages: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        """torch's storage number → the storage, size in bytes, and offset in host memory."""
        self._host: HostMemory | None = None
        self.offloaded = False
        """True if the storages are not on the device."""

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Moves the tensors' storages off the device, waits for the end, and returns the bytes copied; no-op if already
        offloaded, whatever the tensors."""
        copied = self.begin_offload(tensors)
        self.end_offload()
        return copied

    def begin_offload(self, tensors: Iterable[Tensor]) -> int:
        """Starts copying the tensors' storages to host memory and returns the bytes to copy. 0 if they are already
        offloaded, or if the object was created with `dropped`. The device memory stays until `end_offload`."""
        return 0 if self.offloaded else self._start_offload(tensors)

    def end_offload(self) -> None:
        """Waits for the end of the copies to host memory, and frees the device memory. Call after `begin_offload`."""
        self._wait_for_copies()
        self.offloaded = True
        for storage, _, _ in self._storages.values():
            if storage.nbytes():
                storage.resize_(0)

    def onload(self) -> int:
        """Moves the storages back to the device, waits for the end, and returns the bytes copied; 0 without copying if
        the storages are already there or dropped (dropped storages become zeros)."""
        copied = self.begin_onload()
        self.end_onload()
        return copied

    def begin_onload(self) -> int:
        """Allocates device memory, starts copying offloaded storages to the device, and returns the bytes to copy.

        Does not wait: the contents are usable after `end_onload`. Returns 0 if nothing is offloaded, and for dropped
        storages, which become zeros.
        """
        if not self.offloaded:
            return 0
        for storage, size, _ in self._storages.values():
            if storage.nbytes() != size:
                storage.resize_(size)
        if self._host is not None:
            return self._copy(self._host, back=True)
        for storage, _, _ in self._storages.values():
            self._bytes(storage).zero_()
        return 0

    def end_onload(self) -> None:
        """Waits for the end of the copies of `begin_onload`. Call only after `begin_onload`."""
        self._wait_for_copies()
        self.offloaded = False

    def host_view(self, tensor: Tensor) -> Tensor | None:
        """Returns a view of the tensor's values in host memory, with the same shape and strides; None if the tensor's
        storage is not offloaded by this part, or dropped."""
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        if not self.offloaded or self._host is None or entry is None:
            return None
        _, _, host_offset = entry
        offset = host_offset // tensor.itemsize + tensor.storage_offset()
        host_storage = self._host.flat.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(host_storage, offset, tensor.shape, tensor.stride())

    def release_pages(self) -> None:
        """Lets the operating system reclaim memory read through `host_view`; the values stay valid. See
        `HostMemory.release_pages`."""
        if self._host is not None:
            self._host.release_pages()

    def close(self) -> None:
        """Frees the host memory and forgets the storages, so that offloaded contents are lost. Closing twice is
        harmless."""
        self.forget()
        if self._host is not None:
            self._host.close()
            self._host = None

    def forget(self) -> None:
        """Forgets the storages, so that offloaded contents never return to the device. The host memory stays allocated
        for the next offload."""
        self._storages, self.offloaded = {}, False

    def _start_offload(self, tensors: Iterable[Tensor]) -> int:
        self._storages, size = {}, 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages and (count := storage.nbytes()):
                self._storages[storage._cdata] = storage, count, size
                size += -(-count // ALIGNMENT) * ALIGNMENT
        if self._dropped or not size:
            return 0
        if self._host is not None and self._host.flat.numel() != size:
            self._host.close()
            self._host = None
        self._host = self._host or HostMemory(size, self._device)
        return self._copy(self._host, back=False)

    def _copy(self, host: HostMemory, *, back: bool) -> int:
        """Starts copying all storages, with a single copy for each, on a separate stream.

        So the link's two directions run independently of each other and of unrelated kernels on the current stream.
        """
        if self._device.type == "cpu":
            return self._copy_storages(host, back=back)
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return self._copy_storages(host, back=back)

    def _wait_for_copies(self) -> None:
        """Waits for the copies, so that device memory can be freed and host memory read."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._stream.synchronize()

    def _copy_storages(self, host: HostMemory, *, back: bool) -> int:
        for storage, size, at in self._storages.values():
            host_bytes, device_bytes = host.flat.narrow(0, at, size), self._bytes(storage)
            to, source = (device_bytes, host_bytes) if back else (host_bytes, device_bytes)
            to.copy_(source, non_blocking=True)
            host.release_pages()
        return sum(size for _, size, _ in self._storages.values())

    def _bytes(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


class Streamed(Protocol):
    """State kept in host memory all the time (`megatron.streamed_optimizer`)."""

    def host_view(self, tensor: Tensor) -> Tensor | None:
        """Returns the values of an offloaded tensor in host memory; None for any other tensor."""

    def release_pages(self) -> None:
        """Lets the operating system reclaim memory read through `host_view`; the values stay valid."""

    def close(self) -> None:
        """Frees the host memory."""


class Resident:
    """The parts of a rank's state, on or off the device.

    Args:
        name: Name of the model in errors.
        device: Device of the model.
        tensors: Part → function that returns the part's tensors, called on offload. Storages shared by two parts belong
            to the first.
    """

    def __init__(self, name: str, device: torch.device, tensors: Mapping[str, Tensors]) -> None:
        self.name, self.device = name, device
        self._tensors = tensors
        self._parts = {part: OffloadablePart(device, dropped=part in DROPPED) for part in tensors}
        self.streamed: Streamed | None = None
        """State outside of all parts, never on the device as a whole."""

    @property
    def offloaded(self) -> frozenset[str]:
        """Names of the parts not on the device."""
        return frozenset(name for name, part in self._parts.items() if part.offloaded)

    def require(self, *parts: str) -> None:
        """Raises `NotOnDevice` if any of these parts is offloaded, and KeyError for a part not in `tensors`; else does
        nothing."""
        for name in parts:
            if self._parts[name].offloaded:
                raise NotOnDevice(f"{self.name}: {name} is not on the device; onload([{name!r}]) brings it back")

    def offload(self, parts: Iterable[str]) -> int:
        """Moves parts off the device, releases unused cached memory, and returns the bytes copied to host memory.
        Parts already offloaded stay so. Raises KeyError for a part not in `tensors`, such as "critic"."""
        copied = sum(self._parts[name].offload(self._exclusive_tensors(name)) for name in parts)
        release_cached_memory(self.device)
        return copied

    def onload(self, parts: Iterable[str]) -> int:
        """Moves parts back to the device and returns the bytes copied; no-op for parts on the device. Dropped parts
        return as zeros and count 0. Raises KeyError for a part not in `tensors`, such as "critic"."""
        return sum(self._parts[name].onload() for name in parts)

    @contextmanager
    def onloaded(self, *parts: str) -> Iterator[None]:
        """Keeps the parts on the device inside the context; afterwards, also after an error, offloads the parts that
        were offloaded before. Raises KeyError for a part not in `tensors`."""
        offloaded_names = [name for name in parts if self._parts[name].offloaded]
        self.onload(offloaded_names)
        try:
            yield
        finally:
            if offloaded_names:
                self.offload(offloaded_names)

    def readable(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with the current values of `tensor`: `tensor` itself, or a view of host memory if the tensor
        is offloaded. Only for reading; call `release_pages` afterwards."""
        if self.streamed and (values := self.streamed.host_view(tensor)) is not None:
            return values
        for part in self._parts.values():
            if (values := part.host_view(tensor)) is not None:
                return values
        return tensor

    def release_pages(self) -> None:
        """Lets the operating system reclaim memory read through `readable`; the values stay valid."""
        for part in self._parts.values():
            part.release_pages()
        if self.streamed:
            self.streamed.release_pages()

    def forget(self, part: str) -> None:
        """Forgets a part's storages with offloaded contents, before the part's tensors are replaced by new tensors. The
        part then counts as on the device. Raises KeyError for an unknown part."""
        self._parts[part].forget()

    def _exclusive_tensors(self, part: str) -> Iterator[Tensor]:
        """Yields a part's tensors on the device, except storages of earlier parts."""
        earlier: set[int] = set()
        for name, tensors in self._tensors.items():
            if name == part:
                yield from (
                    t
                    for t in tensors()
                    if t.device.type == self.device.type and t.untyped_storage()._cdata not in earlier
                )
                return
            earlier.update(t.untyped_storage()._cdata for t in tensors())


def gradients(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    """Yields the buffers, in megatron-core's data parallelism, that hold all gradients of the chunks."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def optimizer_state(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yields the tensors of an optimizer's master weights and moments, on or off the device; scalars such as step
    counts are left out."""
    for part in inner_optimizers(optimizer):
        for _, master in master_weights(part):
            if master is not None:  # Transformer Engine's Adam may keep it in its state
                yield master.detach()
        for state in part.optimizer.state.values():
            yield from (t for t in state.values() if isinstance(t, Tensor) and t.ndim)


def expand_critic(parts: Iterable[str]) -> list[str]:
    """Returns the list of parts with "critic" replaced by parameters, gradients and optimizer, the names of a model's
    parts. Other names stay, also unknown ones; nothing is deduplicated."""
    return [part for name in parts for part in (POLICY if name == "critic" else (name,))]
