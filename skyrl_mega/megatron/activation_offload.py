"""What layers keep for their backward pass lies in host memory in between (`policy.offload_layers`).

Such layers lie evenly among the others. What one has saved begins to leave when its forward pass has been issued, on a
stream of its own, and the device lets go of it at the end of the next such layer; it begins to come back when the
backward pass of that next one begins. So a copy has the time of all layers between them, and the device has two such
layers at a time. The host waits for nothing but new pages.

What moves are storages, each once however many tensors look at it: slices by expert, views of one product. Nothing is
assumed of the order of passes, as each knows the one before it: pipelines may have several under way, rows may differ
in length, and a pass may have no backward one.

After Rhu et al. (arXiv:1602.08124). Transformer Engine's own (`cpu_offload`, 2.20) moves tensors one by one, and leaves
small ones behind: an expert with few tokens then holds the memory of all experts' inputs.
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
"""Bytes: every storage begins at a multiple of it."""
PAGE = {"cuda": 32 * 2**20, "cpu": 2**20}
"""Bytes of host memory that a layer takes at a time: rows differ in length, and a page serves any."""
SMALLEST = {"cuda": 2**20, "cpu": 1}
"""Bytes of a storage that moves. Smaller ones are many, and a hundredth of a layer's."""


def offload(stages: Sequence[Sequence[torch.nn.Module]], count: int, device: torch.device) -> Pages:
    """Has layers of a rank keep what they keep in host memory.

    Args:
        stages: The layers of each of the rank's model chunks, in order.
        count: How many, all where there are no more.
        device: Theirs.

    Returns:
        The host memory that they share.
    """
    pages = Pages(device)
    for chunk, layers in enumerate(stages if count else ()):
        Chunk(layers, spread(len(layers), (count + len(stages) - 1 - chunk) // len(stages)), pages)
    return pages


def spread(layers: int, count: int) -> set[int]:
    """Which of so many layers move, where `count` do: evenly, with as many after the last as between two."""
    count = min(count, layers)
    return {i * layers // count for i in range(count)}


class Pages:
    """Host memory in pages, and the stream that copies to and from it. One that is given back serves the next layer:
    copies are over in the order in which they were issued.

    Args:
        device: What is copied to and from.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.page = device, PAGE[device.type]
        self.free: list[HostMemory] = []
        self.count = 0
        """Of all pages."""
        self.leaving: Pass | None = None
        """Whose storages the device has still, though they are copied or will be soon."""
        self._stream: torch.cuda.Stream | None = None

    def take(self, size: int) -> Held:
        """Memory for so many bytes, until the answer is no more."""
        missing = -(-size // self.page) - len(self.free)
        for _ in range(missing):
            self.free.append(HostMemory(self.page, self.device))
        self.count += max(0, missing)
        held = Held([self.free.pop() for _ in range(-(-size // self.page))], self.page)
        weakref.finalize(held, self.free.extend, held.pages)
        return held

    def copying(self) -> AbstractContextManager[Any]:
        """Copies inside begin after what has been issued, and nothing that is issued later waits for them."""
        if self.device.type == "cpu":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def copied(self) -> torch.cuda.Event | None:
        """When the copies so far are over."""
        return self._stream.record_event() if self._stream is not None else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Has what is issued from now on wait for it."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class Held:
    """Some pages, one after another."""

    def __init__(self, pages: list[HostMemory], page: int) -> None:
        self.pages, self.page = pages, page

    def pieces(self, at: int, size: int) -> Iterator[tuple[Tensor, int]]:
        """Bytes `at … at + size - 1`: for each page the part of it, uint8, and how many bytes come before."""
        done = 0
        while done < size:
            index, start = divmod(at + done, self.page)
            length = min(size - done, self.page - start)
            yield self.pages[index].flat.narrow(0, start, length), done
            done += length

    def rest(self) -> None:
        """Nobody reads or writes them for a while."""
        for page in self.pages:
            page.rest()


@dataclass(eq=False)
class Saved:
    """A storage that a layer's backward pass needs."""

    storage: torch.UntypedStorage | None
    """None while only the host has it."""
    size: int
    of: Pass
    at: int = 0
    """Where it begins in `held`."""
    held: Held | None = None
    """None where it stays on the device."""

    def bytes(self) -> Tensor:
        """uint8 [size], on the device."""
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.of.pages.device).set_(self.storage)


@dataclass(frozen=True, eq=False)
class View:
    """A tensor of it."""

    saved: Saved
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """As it was."""
        self.saved.of.be_back()
        empty = torch.empty(0, dtype=self.dtype, device=self.saved.of.pages.device)
        assert self.saved.storage is not None
        return empty.set_(self.saved.storage, self.offset, self.size, self.stride)


class Pass:
    """One layer in one forward pass, and in its backward pass.

    Args:
        pages: Where its storages go.
        before: The layer before it that moves, in this forward pass.
    """

    def __init__(self, pages: Pages, before: Pass | None) -> None:
        self.pages, self.before = pages, before
        self._saved: dict[int, Saved] = {}
        """By the storage's number in torch, until the layer has ended."""
        self._moved: list[weakref.ref[Saved]] = []
        """Those that move. Whoever needs one holds it."""
        self._leaving: list[Saved] = []
        """Those of them that the device holds still."""
        self._done: torch.cuda.Event | None = None
        """When the copies of the last move are over."""
        self._away = False

    def save(self, tensor: Tensor) -> Tensor | View:
        """What autograd keeps of a tensor: itself where it is a parameter, more than strided memory, or the host's."""
        elsewhere = self.pages.device.type == "cuda" and not tensor.is_cuda
        if type(tensor) is not Tensor or tensor.layout != torch.strided or elsewhere:
            return tensor
        if tensor.is_conj() or tensor.is_neg():  # numbers that are not what lies in memory
            return tensor
        storage = tensor.untyped_storage()
        saved = self._saved.setdefault(storage._cdata, Saved(storage, 0, self))
        return View(saved, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def leave(self, staying: set[int]) -> None:
        """Begins to copy what was saved to the host; storages at the addresses `staying` are not the layer's."""
        smallest, size = SMALLEST[self.pages.device.type], 0
        for saved in self._saved.values():
            storage = saved.storage
            assert storage is not None
            saved.size = storage.nbytes()  # one that is computed once more is empty now
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
        """The device lets go of what has left."""
        if self._leaving:
            self.pages.wait(self._done)
            for saved in self._leaving:
                saved.storage = None
            self._leaving, self._done, self._away = [], None, True

    def come(self) -> None:
        """Begins to bring it back."""
        self._leaving = []  # what is still here stays
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
        """It is there for what is issued from now on."""
        self.come()
        self.pages.wait(self._done)
        self._done = None

    def come_soon(self, *_: Any) -> None:
        """The backward pass of a layer after it begins."""
        self._newest_gone()
        self.come()

    def begin_backward(self, *_: Any) -> None:
        """Its own begins: the next one to need something is the one before it."""
        self._newest_gone()
        self.come()
        if self.before is not None:
            self.before.come()

    def _newest_gone(self) -> None:
        """In a pipeline the newest forward pass is another's."""
        newest = self.pages.leaving
        if newest is not None and newest is not self:
            newest.be_gone()
            self.pages.leaving = None


class Chunk:
    """The layers of one model chunk, each of which is told where its forward pass begins and ends.

    Args:
        layers: In order.
        moving: Those whose storages move.
        pages: Where they go.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], moving: set[int], pages: Pages) -> None:
        self.pages = pages
        self.last: Pass | None = None
        """The last one that moves, of the forward pass under way."""
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
    """A layer's own memory: parameters, and what Transformer Engine keeps of them in FP8 from one pass to the next."""
    yield from memory(layer.parameters())
    for module in layer.modules():
        for copy in getattr(module, "_fp8_workspaces", {}).values():
            yield from copy.get_data_tensors() if hasattr(copy, "get_data_tensors") else [copy]


def _addresses(values: Iterable[Any]) -> set[int]:
    """Where tensors among them begin to lie."""
    return {t.untyped_storage().data_ptr() for t in values if isinstance(t, Tensor)}
