"""A rank's state takes turns in its device's memory: parts of it move to host memory, whole and bit by bit, and back.

What moves are storages, the memory behind tensors. A storage that is away has no bytes, and gets new ones when it comes
back; every tensor that looks at it (parameters, data parallelism's buckets, the optimizer's shards, the reference's
pieces) stays what it is. Addresses change, so nobody keeps one: the weight sync tells its kernels the present ones.
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
from skyrl_mega.megatron.host_memory import HostMemory, give_back
from skyrl_mega.megatron.moments import masters, parts

ALIGNMENT = 512
"""Bytes: every storage begins at a multiple of it in host memory, as it does on a device."""

DROPPED = frozenset({"gradients"})
"""Parts of which nothing survives an optimizer step: they come back as zeros."""

Tensors = Callable[[], Iterable[Tensor]]


class Parked(RuntimeError):
    """A part was asked for that is not on the device."""


class Part:
    """Storages that leave a device and come back together.

    Every move may be broken off, and is then simply made again: what is in host memory counts from when all of it is
    there, and until all of it is back.

    Args:
        device: Where they are.
        dropped: They come back as zeros, and take no host memory.
    """

    def __init__(self, device: torch.device, *, dropped: bool = False) -> None:
        self._device, self._dropped = device, dropped
        self._stream: torch.cuda.Stream | None = None
        self._storages: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        """By its number in torch: a storage, its bytes, and where it begins in host memory."""
        self._host: HostMemory | None = None
        self.away = False
        """Whether the device does not hold it."""

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Takes these tensors' storages from the device; returns the bytes copied. Nothing happens where it is away."""
        copied = self.begin_offload(tensors)
        self.end_offload()
        return copied

    def begin_offload(self, tensors: Iterable[Tensor]) -> int:
        """Begins to copy them to host memory, if they are not there; the device holds them until `end_offload`."""
        return 0 if self.away else self._take(tensors)

    def end_offload(self) -> None:
        """Waits until they are in host memory, and takes them from the device."""
        self._settle()
        self.away = True
        for storage, _, _ in self._storages.values():
            if storage.nbytes():
                storage.resize_(0)

    def onload(self) -> int:
        """Brings them back; returns the bytes copied. Nothing happens where they are there."""
        copied = self.begin_onload()
        self.end_onload()
        return copied

    def begin_onload(self) -> int:
        """Begins to copy them to the device, if they are away; they may be used after `end_onload`."""
        if not self.away:
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
        """Waits until they are on the device."""
        self._settle()
        self.away = False

    def held(self, tensor: Tensor) -> Tensor | None:
        """The tensor's values in host memory, in its shape and strides; None where it is no part of this, or not
        away."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        if not self.away or self._host is None or known is None:
            return None
        _, _, at = known
        offset = at // tensor.itemsize + tensor.storage_offset()
        there = self._host.flat.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(there, offset, tensor.shape, tensor.stride())

    def rest(self) -> None:
        """What `held` has given is not looked at any more."""
        if self._host is not None:
            self._host.rest()

    def close(self) -> None:
        """Gives its host memory back, and forgets what was in it."""
        self.forget()
        if self._host is not None:
            self._host.close()
            self._host = None

    def forget(self) -> None:
        """Its tensors are no more: what was away does not come back. Its host memory serves the next ones."""
        self._storages, self.away = {}, False

    def _take(self, tensors: Iterable[Tensor]) -> int:
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
        """Begins to copy all storages, each in one copy, on a stream of its own: the link's two directions do not wait
        for each other, nor for the kernels of the current stream that have nothing to do with it."""
        if self._device.type == "cpu":
            return self._copies(host, back=back)
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return self._copies(host, back=back)

    def _settle(self) -> None:
        """Waits for the copies: then memory may be given back, and host memory read."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._stream.synchronize()

    def _copies(self, host: HostMemory, *, back: bool) -> int:
        for storage, size, at in self._storages.values():
            there, here = host.flat.narrow(0, at, size), self._bytes(storage)
            to, source = (here, there) if back else (there, here)
            to.copy_(source, non_blocking=True)
            host.rest()
        return sum(size for _, size, _ in self._storages.values())

    def _bytes(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


class Streamed(Protocol):
    """State that lies in host memory all the time (`megatron.streamed_optimizer`)."""

    def held(self, tensor: Tensor) -> Tensor | None:
        """The values in host memory of a tensor that is away; None of any other."""

    def rest(self) -> None:
        """What `held` has given is not looked at any more."""

    def close(self) -> None:
        """Gives the host memory back."""


class Resident:
    """Which parts of a rank's state are on its device.

    Args:
        name: What errors call the model.
        device: Its device.
        tensors: Part → its tensors, asked for when it leaves. What belongs to two parts belongs to the first.
    """

    def __init__(self, name: str, device: torch.device, tensors: Mapping[str, Tensors]) -> None:
        self.name, self.device = name, device
        self._tensors = tensors
        self._parts = {part: Part(device, dropped=part in DROPPED) for part in tensors}
        self.streamed: Streamed | None = None
        """What is never on the device as a whole, and in none of the parts."""

    @property
    def away(self) -> frozenset[str]:
        """Parts that the device does not hold."""
        return frozenset(name for name, part in self._parts.items() if part.away)

    def need(self, *parts: str) -> None:
        """Raises Parked unless all of them are on the device."""
        for name in parts:
            if self._parts[name].away:
                raise Parked(f"{self.name}: {name} is not on the device; onload([{name!r}]) brings it back")

    def offload(self, parts: Iterable[str]) -> int:
        """Takes parts off the device; returns the bytes copied to host memory. Those that are away stay there."""
        copied = sum(self._parts[name].offload(self._own(name)) for name in parts)
        give_back(self.device)
        return copied

    def onload(self, parts: Iterable[str]) -> int:
        """Brings parts back; returns the bytes copied. Those that are on the device stay as they are."""
        return sum(self._parts[name].onload() for name in parts)

    @contextmanager
    def brought(self, *parts: str) -> Iterator[None]:
        """They are on the device inside, and those that were not leave it again."""
        away = [name for name in parts if self._parts[name].away]
        self.onload(away)
        try:
            yield
        finally:
            if away:
                self.offload(away)

    def held(self, tensor: Tensor) -> Tensor:
        """Where its values lie now: the tensor, or one in host memory like it."""
        if self.streamed and (there := self.streamed.held(tensor)) is not None:
            return there
        for part in self._parts.values():
            if (held := part.held(tensor)) is not None:
                return held
        return tensor

    def rest(self) -> None:
        """What `held` has given is not looked at any more."""
        for part in self._parts.values():
            part.rest()
        if self.streamed:
            self.streamed.rest()

    def forget(self, part: str) -> None:
        """Its tensors are no more, and new ones may be made."""
        self._parts[part].forget()

    def _own(self, part: str) -> Iterator[Tensor]:
        """A part's tensors on the device, without those of the parts before it."""
        before: set[int] = set()
        for name, tensors in self._tensors.items():
            if name == part:
                yield from (
                    t
                    for t in tensors()
                    if t.device.type == self.device.type and t.untyped_storage()._cdata not in before
                )
                return
            before.update(t.untyped_storage()._cdata for t in tensors())


def gradients(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    """Data parallelism's buffers."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def optimizer_state(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Master weights and moments, wherever the optimizer has them."""
    for part in parts(optimizer):
        for _, master in masters(part):
            if master is not None:  # Transformer Engine's Adam may have it in its state
                yield master.detach()
        for state in part.optimizer.state.values():
            yield from (t for t in state.values() if isinstance(t, Tensor) and t.ndim)


def expanded(parts: Iterable[str]) -> list[str]:
    """A rank's parts, of those that the table names: a critic is all three."""
    return [part for name in parts for part in (POLICY if name == "critic" else (name,))]
