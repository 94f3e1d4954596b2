"""Offloading of saved activations to host memory between forward and backward pass (`policy.offload_layers`).

The offloaded layers are spread evenly over all layers. Copying a layer's saved storages to the host starts once the
layer's forward pass is issued, on a separate stream. The device memory is freed at the end of the next offloaded layer.
Copying back starts when the backward pass of that next layer starts. So a copy may take as long as all layers in
between, and the device holds two offloaded layers at a time. The host waits only for the allocation of new pages.

Storages are moved, not tensors: each once, no matter how many tensors share the memory (slices by expert, views of one
product). No order of passes is assumed, because each pass knows the previous one: pipelines may run several passes at
once, rows may differ in length, and a pass may lack a backward pass.

After Rhu et al. (arXiv:1602.08124). Transformer Engine's own offload (`cpu_offload`, 2.20) moves tensors one by one and
leaves small tensors behind: an expert with few tokens then keeps the memory of all experts' inputs on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from skyrl_mega.megatron.fp8_parameters import memory
from skyrl_mega.megatron.host_memory import HostMemory

ALIGNMENT = 512
"""Alignment in bytes of every storage in host memory."""
PAGE = {"cuda": 32 * 2**20, "cpu": 2**20}
"""Page size in bytes, by device type. Layers allocate host memory in pages because rows differ in length."""
SMALLEST = {"cuda": 2**20, "cpu": 1}
"""Smallest storage in bytes to be moved, by device type. Smaller storages are many, but together 1 % of a layer's
bytes."""


def offload(stages: Sequence[Sequence[torch.nn.Module]], count: int, device: torch.device) -> Pages:
    """Makes `count` layers of a rank keep saved activations in host memory.

    Args:
        stages: The layers of each of the rank's model chunks, in order.
        count: Number of layers to offload; all if there are fewer.
        device: The device of the layers.

    Returns:
        The host memory shared by the layers.
    """
    pages = Pages(device)
    for chunk, layers in enumerate(stages if count else ()):
        Chunk(layers, spread(len(layers), (count + len(stages) - 1 - chunk) // len(stages)), pages)
    return pages


def spread(layers: int, count: int) -> set[int]:
    """Returns the indices of `count` evenly spaced layers. The gap after the last equals the gap between two of
    them."""
    count = min(count, layers)
    return {i * layers // count for i in range(count)}


class Pages:
    """Pages of host memory, with the stream for copies to and from the pages.

    A freed page serves the next layer, because copies end in the order of issue.

    Args:
        device: The device to copy to and from.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.page = device, PAGE[device.type]
        self.free: list[HostMemory] = []
        self.count = 0
        """Number of pages allocated so far."""
        self.leaving: Pass | None = None
        """The pass with copies to the host under way or complete, but with storages still on the device."""
        self._stream: torch.cuda.Stream | None = None

    def take(self, size: int) -> Held:
        """Returns pages for `size` bytes, allocating missing pages. Garbage collection of the result frees the
        pages."""
        missing = -(-size // self.page) - len(self.free)
        for _ in range(missing):
            self.free.append(HostMemory(self.page, self.device))
        self.count += max(0, missing)
        held = Held([self.free.pop() for _ in range(-(-size // self.page))], self.page)
        weakref.finalize(held, self.free.extend, held.pages)
        return held

    def copying(self) -> AbstractContextManager[Any]:
        """Returns a context for copies that wait for all work issued so far, while later work does not wait for
        them."""
        if self.device.type == "cpu":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def copied(self) -> torch.cuda.Event | None:
        """Returns an event for the end of the copies issued so far; None without a stream."""
        return self._stream.record_event() if self._stream is not None else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Makes all work issued from now on wait for `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class Held:
    """A sequence of pages used as a single range of bytes."""

    def __init__(self, pages: list[HostMemory], page: int) -> None:
        self.pages, self.page = pages, page

    def pieces(self, at: int, size: int) -> Iterator[tuple[Tensor, int]]:
        """Yields the bytes `at … at + size - 1` page by page: a uint8 view, and the number of bytes before the view."""
        done = 0
        while done < size:
            index, start = divmod(at + done, self.page)
            length = min(size - done, self.page - start)
            yield self.pages[index].flat.narrow(0, start, length), done
            done += length

    def rest(self) -> None:
        """Marks the pages as unused for now; see `HostMemory.rest`."""
        for page in self.pages:
            page.rest()


@dataclass(eq=False)
class Saved:
    """A storage needed by a layer's backward pass."""

    storage: torch.UntypedStorage | None
    """The storage on the device; None while only the host holds the bytes."""
    size: int
    of: Pass
    at: int = 0
    """Offset in `held`, in bytes."""
    held: Held | None = None
    """The pages with the bytes; None for a storage never moved off the device."""

    def bytes(self) -> Tensor:
        """Returns the storage as a uint8 tensor [size] on the device."""
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.of.pages.device).set_(self.storage)


@dataclass(frozen=True, eq=False)
class View:
    """A saved tensor, as a view of a saved storage."""

    saved: Saved
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Waits until the storage is back on the device, and returns the tensor with dtype, shape and strides as
        saved."""
        self.saved.of.be_back()
        empty = torch.empty(0, dtype=self.dtype, device=self.saved.of.pages.device)
        assert self.saved.storage is not None
        return empty.set_(self.saved.storage, self.offset, self.size, self.stride)


class Pass:
    """The forward pass and the backward pass of one layer for one micro-batch.

    Args:
        pages: Host memory for the saved storages.
        before: The previous offloaded layer of this forward pass.
    """

    def __init__(self, pages: Pages, before: Pass | None) -> None:
        self.pages, self.before = pages, before
        self._saved: dict[int, Saved] = {}
        """Saved storages by torch's storage number, until the layer's forward pass ends."""
        self._moved: list[weakref.ref[Saved]] = []
        """The storages to move, as weak references: autograd keeps the needed ones alive."""
        self._leaving: list[Saved] = []
        """The moved storages still held by the device."""
        self._done: torch.cuda.Event | None = None
        """Event for the end of the latest copies."""
        self._away = False

    def save(self, tensor: Tensor) -> Tensor | View:
        """Returns the object for autograd to save: a `View`, or the tensor itself.

        The tensor itself is returned for parameters and other subclasses, for layouts other than strided, for lazily
        conjugated or negated tensors, and for tensors in host memory.
        """
        elsewhere = self.pages.device.type == "cuda" and not tensor.is_cuda
        if type(tensor) is not Tensor or tensor.layout != torch.strided or elsewhere:
            return tensor
        if tensor.is_conj() or tensor.is_neg():  # the memory does not hold the tensor's values
            return tensor
        storage = tensor.untyped_storage()
        saved = self._saved.setdefault(storage._cdata, Saved(storage, 0, self))
        return View(saved, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def leave(self, staying: set[int]) -> None:
        """Starts copying the saved storages to the host, except storages at the addresses `staying`, not owned by the
        layer."""
        smallest, size = SMALLEST[self.pages.device.type], 0
        for saved in self._saved.values():
            storage = saved.storage
            assert storage is not None
            saved.size = storage.nbytes()  # a storage to be recomputed is empty by now
            if saved.size >= smallest and storage.data_ptr() not in staying:
                saved.at, size = size, size + -(-saved.size // ALIGNMENT) * ALIGNMENT
                self._leaving.append(saved)
        self._saved = {}
        if not size:
            return
        held = self.pages.take(size)
        with self.pages.copying():
            for saved in self._leaving:
                saved.held, source = held, saved.bytes()
                for piece, done in held.pieces(saved.at, saved.size):
                    piece.copy_(source.narrow(0, done, len(piece)), non_blocking=True)
        held.rest()
        self._done = self.pages.copied()
        self._moved = [weakref.ref(saved) for saved in self._leaving]

    def be_gone(self) -> None:
        """Frees the device memory of the storages copied to the host."""
        if self._leaving:
            self.pages.wait(self._done)
            for saved in self._leaving:
                saved.storage = None
            self._leaving, self._done, self._away = [], None, True

    def come(self) -> None:
        """Starts copying the storages back to the device."""
        self._leaving = []  # storages still on the device stay there
        if not self._away:
            return
        self._away = False
        alive = [saved for of in self._moved if (saved := of()) is not None]
        for saved in alive:
            saved.storage = torch.empty(saved.size, dtype=torch.uint8, device=self.pages.device).untyped_storage()
        with self.pages.copying():
            for saved in alive:
                assert saved.held is not None
                here = saved.bytes()
                for piece, done in saved.held.pieces(saved.at, saved.size):
                    here.narrow(0, done, len(piece)).copy_(piece, non_blocking=True)
        for held in {saved.held for saved in alive if saved.held is not None}:
            held.rest()
        self._done = self.pages.copied()

    def be_back(self) -> None:
        """Makes all work issued from now on wait until the storages are back on the device."""
        self.come()
        self.pages.wait(self._done)
        self._done = None

    def come_soon(self, *_: Any) -> None:
        """Hook for the start of the backward pass of a later layer: starts copying this layer's storages back."""
        self._newest_gone()
        self.come()

    def begin_backward(self, *_: Any) -> None:
        """Hook for the start of this layer's backward pass: starts copying back the storages of this layer and of the
        previous offloaded layer, which is needed next."""
        self._newest_gone()
        self.come()
        if self.before is not None:
            self.before.come()

    def _newest_gone(self) -> None:
        """Frees the device memory of the newest forward pass, if different from this pass, as in a pipeline."""
        newest = self.pages.leaving
        if newest is not None and newest is not self:
            newest.be_gone()
            self.pages.leaving = None


class Chunk:
    """The layers of a model chunk, with wrapped forward passes that track start and end.

    Args:
        layers: All layers of the chunk, in order.
        moving: Indices of the layers to offload.
        pages: Host memory for the saved storages.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], moving: set[int], pages: Pages) -> None:
        self.pages = pages
        self.last: Pass | None = None
        """The latest offloaded layer of the forward pass under way."""
        for i, layer in enumerate(layers):
            module: Any = layer
            module.forward = self._forward(layer, module.forward, moves=i in moving, ends=i == len(layers) - 1)

    def _forward(
        self, layer: torch.nn.Module, own: Callable[..., Any], *, moves: bool, ends: bool
    ) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return own(hidden_states, *args, **kwargs)
            if moves:
                here = self.last = Pass(self.pages, self.last)
                with saved_tensors_hooks(here.save, _restored):
                    result = own(hidden_states, *args, **kwargs)
                here.leave(_addresses(_weights(layer)) | _addresses(tree_leaves((args, kwargs))))
                if self.pages.leaving is not None:
                    self.pages.leaving.be_gone()
                self.pages.leaving = here
            else:
                result = own(hidden_states, *args, **kwargs)
            if self.last is not None:
                output = result[0] if isinstance(result, tuple) else result
                if output.grad_fn is not None:
                    output.grad_fn.register_prehook(self.last.begin_backward if moves else self.last.come_soon)
            self.last = None if ends else self.last
            return result

        return forward


def _restored(kept: Tensor | View) -> Tensor:
    return kept.tensor() if isinstance(kept, View) else kept


def _weights(layer: torch.nn.Module) -> Iterator[Any]:
    """Yields a layer's own memory: parameters, and the FP8 copies kept by Transformer Engine between passes."""
    yield from memory(layer.parameters())
    for module in layer.modules():
        for copy in getattr(module, "_fp8_workspaces", {}).values():
            yield from copy.get_data_tensors() if hasattr(copy, "get_data_tensors") else [copy]


def _addresses(values: Iterable[Any]) -> set[int]:
    """Returns the storage addresses of the tensors among `values`."""
    return {t.untyped_storage().data_ptr() for t in values if isinstance(t, Tensor)}
