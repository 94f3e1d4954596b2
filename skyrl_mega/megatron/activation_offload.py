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

from skyrl_mega.megatron.fp8_parameters import storage_tensors
from skyrl_mega.megatron.host_memory import HostMemory

ALIGNMENT = 512
"""Alignment in bytes of every storage in host memory."""
PAGE = {"cuda": 32 * 2**20, "cpu": 2**20}
"""Page size in bytes, by device type. Layers allocate host memory in pages because rows differ in length."""
SMALLEST = {"cuda": 2**20, "cpu": 1}
"""Smallest storage in bytes to be moved, by device type. Smaller storages are many, but together 1 % of a layer's
bytes."""


def offload(stages: Sequence[Sequence[torch.nn.Module]], count: int, device: torch.device) -> HostPages:
    """Makes `count` layers of a rank keep saved activations in host memory, by replacing `forward` of all layers.

    Args:
        stages: The layers of each of the rank's model chunks, in order.
        count: Number of layers to offload, over all chunks together; all if there are fewer, and 0 replaces nothing.
        device: The device of the layers.

    Returns:
        The host memory shared by the layers.
    """
    pages = HostPages(device)
    for index, layers in enumerate(stages if count else ()):
        OffloadedChunk(layers, spread(len(layers), (count + len(stages) - 1 - index) // len(stages)), pages)
    return pages


def spread(layers: int, count: int) -> set[int]:
    """Returns the indices of `count` evenly spaced layers, starting with 0; all layers if there are fewer; none for 0.

    The distance from one index to the next, and from the last index to the end, is the same up to rounding: 0, 2, 4, 6
    for 4 of 8 layers.
    """
    count = min(count, layers)
    return {i * layers // count for i in range(count)}


class HostPages:
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
        self.newest_pass: LayerPass | None = None
        """The pass with copies to the host under way or complete, but with storages still on the device."""
        self._stream: torch.cuda.Stream | None = None

    def allocate(self, size: int) -> PageRange:
        """Returns a range of pages for `size` bytes, allocating missing pages. The pages become free again when the
        result is garbage-collected. A `size` of 0 gives a range without pages."""
        missing = -(-size // self.page) - len(self.free)
        for _ in range(missing):
            self.free.append(HostMemory(self.page, self.device))
        self.count += max(0, missing)
        page_range = PageRange([self.free.pop() for _ in range(-(-size // self.page))], self.page)
        weakref.finalize(page_range, self.free.extend, page_range.pages)
        return page_range

    def copying(self) -> AbstractContextManager[Any]:
        """Returns a context in which copies run on a separate stream, after all work issued so far. Work issued later
        does not wait for the copies. On a CPU, copies run at once."""
        if self.device.type == "cpu":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def record_copies(self) -> torch.cuda.Event | None:
        """Returns an event that marks the end of the copies issued so far; None before the first copy, and on a CPU."""
        return self._stream.record_event() if self._stream is not None else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Makes all work issued to the device from now on wait for `event`; the host does not wait. None does
        nothing."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class PageRange:
    """A sequence of pages used as a single range of bytes."""

    def __init__(self, pages: list[HostMemory], page: int) -> None:
        self.pages, self.page = pages, page

    def pieces(self, offset: int, size: int) -> Iterator[tuple[Tensor, int]]:
        """Yields `size` bytes from byte `offset` on, page by page: a uint8 view, and the number of bytes already
        yielded. The range must have `offset + size` bytes."""
        done = 0
        while done < size:
            index, start = divmod(offset + done, self.page)
            length = min(size - done, self.page - start)
            yield self.pages[index].flat.narrow(0, start, length), done
            done += length

    def release_pages(self) -> None:
        """Stops counting the pages as memory of the process, with contents kept; see `HostMemory.release_pages`."""
        for page in self.pages:
            page.release_pages()


@dataclass(eq=False)
class SavedStorage:
    """A storage needed by a layer's backward pass."""

    storage: torch.UntypedStorage | None
    """The storage on the device; None while only the host holds the bytes."""
    size: int
    """Bytes; 0 until the end of the layer's forward pass."""
    layer_pass: LayerPass
    """The pass that saved the storage."""
    host_offset: int = 0
    """Offset in `page_range`, in bytes."""
    page_range: PageRange | None = None
    """The pages with the bytes; None for a storage never moved off the device."""

    def bytes(self) -> Tensor:
        """Returns the storage as a uint8 tensor [size] that shares its memory; the storage must be on the device."""
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.layer_pass.pages.device).set_(self.storage)


@dataclass(frozen=True, eq=False)
class SavedView:
    """A saved tensor, as a view of a saved storage."""

    saved: SavedStorage
    dtype: torch.dtype
    offset: int
    """First element in the storage."""
    size: torch.Size
    """Shape of the tensor."""
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Returns the tensor with dtype, shape and strides as saved. Starts copying the storage back if the copy has
        not begun. Views of the same saved storage share the memory.

        Work issued from now on waits on the device for the end of the copy; the host does not wait.
        """
        self.saved.layer_pass.wait_reloaded()
        tensor = torch.empty(0, dtype=self.dtype, device=self.saved.layer_pass.pages.device)
        assert self.saved.storage is not None
        return tensor.set_(self.saved.storage, self.offset, self.size, self.stride)


class LayerPass:
    """The forward pass and the backward pass of one layer for one micro-batch.

    Args:
        pages: Host memory for the saved storages.
        previous: The previous offloaded layer of this forward pass.
    """

    def __init__(self, pages: HostPages, previous: LayerPass | None) -> None:
        self.pages, self.previous = pages, previous
        self._saved: dict[int, SavedStorage] = {}
        """Saved storages by torch's storage number, until the layer's forward pass ends."""
        self._moved_refs: list[weakref.ref[SavedStorage]] = []
        """The storages to move, as weak references: autograd keeps the needed ones alive."""
        self._offloading: list[SavedStorage] = []
        """The moved storages still held by the device."""
        self._copies_done: torch.cuda.Event | None = None
        """Event for the end of the latest copies."""
        self._offloaded = False

    def save(self, tensor: Tensor) -> Tensor | SavedView:
        """Returns the object for autograd to save: a `SavedView`, whose storage is moved to the host later, or the
        tensor itself.

        The tensor itself is returned for parameters and other subclasses, for layouts other than strided, for lazily
        conjugated or negated tensors, and for tensors in host memory.
        """
        elsewhere = self.pages.device.type == "cuda" and not tensor.is_cuda
        if type(tensor) is not Tensor or tensor.layout != torch.strided or elsewhere:
            return tensor
        if tensor.is_conj() or tensor.is_neg():  # the memory does not hold the tensor's values
            return tensor
        storage = tensor.untyped_storage()
        saved = self._saved.setdefault(storage._cdata, SavedStorage(storage, 0, self))
        return SavedView(saved, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def start_offload(self, staying: set[int]) -> None:
        """Starts copying the saved storages to the host, except small storages (`SMALLEST`) and storages at the
        addresses `staying`, which the layer does not own. Call once, at the end of the layer's forward pass."""
        smallest, size = SMALLEST[self.pages.device.type], 0
        for saved in self._saved.values():
            storage = saved.storage
            assert storage is not None
            saved.size = storage.nbytes()  # a storage to be recomputed is empty by now
            if saved.size >= smallest and storage.data_ptr() not in staying:
                saved.host_offset, size = size, size + -(-saved.size // ALIGNMENT) * ALIGNMENT
                self._offloading.append(saved)
        self._saved = {}
        if not size:
            return
        page_range = self.pages.allocate(size)
        with self.pages.copying():
            for saved in self._offloading:
                saved.page_range, source = page_range, saved.bytes()
                for piece, done in page_range.pieces(saved.host_offset, saved.size):
                    piece.copy_(source.narrow(0, done, len(piece)), non_blocking=True)
        page_range.release_pages()
        self._copies_done = self.pages.record_copies()
        self._moved_refs = [weakref.ref(saved) for saved in self._offloading]

    def free_device_memory(self) -> None:
        """Frees the device memory of the storages being copied to the host, after the end of the copies on the
        device; the host does not wait. Does nothing without such storages."""
        if self._offloading:
            self.pages.wait(self._copies_done)
            for saved in self._offloading:
                saved.storage = None
            self._offloading, self._copies_done, self._offloaded = [], None, True

    def start_reload(self) -> None:
        """Starts copying the storages back to the device, unless they are still there or the copy has begun. Does not
        wait; `SavedView.tensor` does."""
        self._offloading = []  # storages still on the device stay there
        if not self._offloaded:
            return
        self._offloaded = False
        alive = [saved for ref in self._moved_refs if (saved := ref()) is not None]
        for saved in alive:
            saved.storage = torch.empty(saved.size, dtype=torch.uint8, device=self.pages.device).untyped_storage()
        with self.pages.copying():
            for saved in alive:
                assert saved.page_range is not None
                destination = saved.bytes()
                for piece, done in saved.page_range.pieces(saved.host_offset, saved.size):
                    destination.narrow(0, done, len(piece)).copy_(piece, non_blocking=True)
        for page_range in {saved.page_range for saved in alive if saved.page_range is not None}:
            page_range.release_pages()
        self._copies_done = self.pages.record_copies()

    def wait_reloaded(self) -> None:
        """Makes all work issued from now on wait until the storages are back on the device; starts the copy back if the
        copy has not begun. The host does not wait."""
        self.start_reload()
        self.pages.wait(self._copies_done)
        self._copies_done = None

    def before_later_backward(self, *_: Any) -> None:
        """Starts copying this layer's storages back to the device. Hook for the start of the backward pass of a later
        layer; its arguments are ignored."""
        self._free_newest_pass()
        self.start_reload()

    def before_own_backward(self, *_: Any) -> None:
        """Starts copying the storages of this layer, and of the preceding offloaded layer, whose backward pass comes
        next, back to the device. Hook for the start of this layer's backward pass; its arguments are ignored."""
        self._free_newest_pass()
        self.start_reload()
        if self.previous is not None:
            self.previous.start_reload()

    def _free_newest_pass(self) -> None:
        """Frees the device memory of the newest forward pass, if different from this pass, as in a pipeline."""
        newest = self.pages.newest_pass
        if newest is not None and newest is not self:
            newest.free_device_memory()
            self.pages.newest_pass = None


class OffloadedChunk:
    """The layers of a model chunk, with wrapped forward passes that track start and end.

    Args:
        layers: All layers of the chunk, in order.
        offloaded: Indices of the layers to offload.
        pages: Host memory for the saved storages.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], offloaded: set[int], pages: HostPages) -> None:
        self.pages = pages
        self.last: LayerPass | None = None
        """The latest offloaded layer of the forward pass under way."""
        for i, layer in enumerate(layers):
            module: Any = layer
            module.forward = self._forward(
                layer, module.forward, is_offloaded=i in offloaded, is_last=i == len(layers) - 1
            )

    def _forward(
        self, layer: torch.nn.Module, original: Callable[..., Any], *, is_offloaded: bool, is_last: bool
    ) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(hidden_states, *args, **kwargs)
            if is_offloaded:
                layer_pass = self.last = LayerPass(self.pages, self.last)
                with saved_tensors_hooks(layer_pass.save, _restored):
                    result = original(hidden_states, *args, **kwargs)
                layer_pass.start_offload(_addresses(_weights(layer)) | _addresses(_given(args, kwargs)))
                if self.pages.newest_pass is not None:
                    self.pages.newest_pass.free_device_memory()
                self.pages.newest_pass = layer_pass
            else:
                result = original(hidden_states, *args, **kwargs)
            if self.last is not None:
                output = result[0] if isinstance(result, tuple) else result
                if output.grad_fn is not None:
                    output.grad_fn.register_prehook(
                        self.last.before_own_backward if is_offloaded else self.last.before_later_backward
                    )
            self.last = None if is_last else self.last
            return result

        return forward


def _restored(kept: Tensor | SavedView) -> Tensor:
    return kept.tensor() if isinstance(kept, SavedView) else kept


def _weights(layer: torch.nn.Module) -> Iterator[Any]:
    """Yields a layer's own memory: parameters, and the FP8 copies kept by Transformer Engine between passes."""
    yield from storage_tensors(layer.parameters())
    for module in layer.modules():
        for copy in getattr(module, "_fp8_workspaces", {}).values():
            yield from copy.get_data_tensors() if hasattr(copy, "get_data_tensors") else [copy]


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns all values that a layer gets from the model, and the tensors of the row's rotation: other layers use the
    same memory, so it must stay on the device."""
    rotation = getattr(kwargs.get("packed_seq_params"), "rotation", None)
    return tree_leaves((args, kwargs, vars(rotation) if rotation else {}))


def _addresses(values: Iterable[Any]) -> set[int]:
    """Returns the storage addresses of the tensors among `values`."""
    return {t.untyped_storage().data_ptr() for t in values if isinstance(t, Tensor)}
