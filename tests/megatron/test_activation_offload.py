"""Tests of offloading activations to host memory, on a CPU and with simulated GPU streams. A simulated copy happens
only when its stream is waited for."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from skyrl_mega.megatron import activation_offload
from skyrl_mega.megatron.activation_offload import HostPages, LayerPass, offload, spread
from skyrl_mega.megatron.host_memory import HostMemory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HIDDEN = 8
torch_copy = torch.Tensor.copy_


class Layer(nn.Module):
    """Layer with saved views of a product, a table shared by all layers, and the input of a recomputed part."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(HIDDEN, 3 * HIDDEN, dtype=torch.float64) / 3)
        self.down = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64) / 3)
        self.again = again

    def forward(self, hidden_states: Tensor, rotary: Tensor) -> tuple[Tensor, None]:
        a, b, c = (hidden_states @ self.up).chunk(3, -1)
        mixed: Any = checkpoint(mix, a * rotary, b, use_reentrant=True) if self.again else mix(a * rotary, b)
        return hidden_states + (mixed * c.tanh()) @ self.down, None


def mix(a: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.silu(a) * b.sigmoid()


class Copies:
    """The copy stream."""

    def __init__(self, *_: Any) -> None:
        self.queue: list[Callable[[], None]] = []
        self.done = 0

    def wait_stream(self, _: Any) -> None:
        """Does nothing: computation is always complete."""

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(stream=self, after=self.done + len(self.queue))

    def run(self, until: int) -> None:
        while self.done < until:
            self.queue.pop(0)()
            self.done += 1


class Gpu:
    """Replacement of `torch` in `activation_offload` with a simulated GPU."""

    def __init__(self) -> None:
        self.inside: Copies | None = None
        computing = SimpleNamespace(wait_event=lambda event: event.stream.run(event.after))
        self.cuda = SimpleNamespace(Stream=Copies, stream=self.on, current_stream=lambda _: computing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @contextmanager
    def on(self, stream: Copies) -> Iterator[None]:
        self.inside = stream
        yield
        self.inside = None

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a tensor full of garbage."""
        assert device == CUDA
        return torch.full((size,), 0xEE, dtype=torch.uint8) if size else torch.empty(0, dtype=dtype)

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Queues a copy. A pending copy keeps no memory alive."""
        assert self.inside is not None
        ends = [(StorageWeakRef(t.untyped_storage()), t.storage_offset(), len(t)) for t in (to, source)]

        def happen() -> None:
            of_torch: Any = torch.UntypedStorage
            storages = [of_torch._new_with_weak_ptr(ref.cdata) for ref, _, _ in ends]
            assert storages[1] is not None, "it was let go of before it was copied"
            if storages[0] is not None:  # else the target was freed
                views = [
                    torch.empty(0, dtype=torch.uint8).set_(storage, at, (size,))
                    for storage, (_, at, size) in zip(storages, ends, strict=True)
                ]
                torch_copy(*views)

        self.inside.queue.append(happen)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Simulates a GPU and returns its device."""
    gpu = Gpu()

    def copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if gpu.inside is None:
            return torch_copy(to, source, non_blocking)
        assert non_blocking, "the host would wait"
        gpu.copy(to, source)
        return to

    monkeypatch.setattr(activation_offload, "torch", gpu)
    monkeypatch.setattr(activation_offload, "HostMemory", lambda size, _: HostMemory(size, CPU))
    monkeypatch.setattr(activation_offload, "PAGE", {"cuda": 4096})
    monkeypatch.setattr(activation_offload, "SMALLEST", {"cuda": 64})
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return CUDA


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda":
        simulated: torch.device = request.getfixturevalue("cuda")
        return simulated
    monkeypatch.setattr(activation_offload, "PAGE", {"cpu": 4096})
    return CPU


class Model:
    """Chunks of layers with offload, and copies of the layers without offload."""

    def __init__(self, chunks: int, layers: int, count: int, device: torch.device, *, again: bool = False) -> None:
        torch.manual_seed(layers)
        self.chunks = [nn.ModuleList(Layer(again=again) for _ in range(layers)) for _ in range(chunks)]
        self.plain = copy.deepcopy(self.chunks)
        self.pages: HostPages = offload([[*layers] for layers in self.chunks], count, device)

    def both(self, chunk: int, rows: int) -> tuple[Tensor, Tensor]:
        """Returns the sum of squares of a pass's output, with and without offload."""
        start, rotary = torch.randn(rows, HIDDEN, dtype=torch.float64), torch.rand(rows, HIDDEN, dtype=torch.float64)
        losses = []
        for layers in (self.chunks[chunk], self.plain[chunk]):
            hidden = start.clone().requires_grad_()
            for layer in layers:
                hidden, _ = layer(hidden_states=hidden, rotary=rotary)
            losses.append(hidden.square().sum())
        return losses[0], losses[1]

    def equal(self) -> bool:
        """Returns True if all parameters have the gradient of the layers without offload."""
        mine, plain = ([p.grad for layers in of for p in layers.parameters()] for of in (self.chunks, self.plain))
        assert all(g is None or g.isfinite().all() for g in plain)
        return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(mine, plain, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_passes_in_any_order_give_the_same_gradients(device: torch.device, seed: int) -> None:
    """Runs several passes of different lengths at the same time; some have no backward pass, some run without
    gradients."""
    rng = random.Random(seed)
    model = Model(rng.randint(1, 2), rng.randint(1, 6), rng.randint(0, 9), device, again=rng.random() < 0.3)
    waiting: list[tuple[Tensor, Tensor]] = []
    for _ in range(25):
        match rng.choice(["forward", "forward", "backward", "backward", "drop", "look"]):
            case "forward" if len(waiting) < 4:
                waiting.append(model.both(rng.randrange(len(model.chunks)), rng.randint(1, 90)))
            case "backward" if waiting:
                for loss in waiting.pop(rng.randrange(len(waiting))):
                    loss.backward()
            case "drop" if waiting:
                waiting.pop(rng.randrange(len(waiting)))
            case "look":
                with torch.no_grad():
                    offloaded, plain = model.both(0, 5)
                assert torch.equal(offloaded, plain)
    assert model.equal()
    waiting.clear()
    if model.pages.newest_pass is not None:
        model.pages.newest_pass.free_device_memory()
    assert len(model.pages.free) == model.pages.count, "a page waits for Python's garbage collection, or is lost"


def test_memory_that_is_let_go_of_too_early_is_found(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frees memory too early on purpose: the simulated GPU must detect the fault."""
    free = LayerPass.free_device_memory

    def careless(self: LayerPass) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(HostPages, "wait", lambda *_: None)
            free(self)

    monkeypatch.setattr(LayerPass, "free_device_memory", careless)
    with pytest.raises(AssertionError, match="it was let go of before it was copied"):
        Model(1, 4, 4, cuda).both(0, 64)[0].backward()


def test_memory_that_is_read_before_it_is_back_is_found(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerPass, "wait_reloaded", LayerPass.start_reload)
    model = Model(1, 4, 4, cuda)
    for loss in model.both(0, 64):
        loss.backward()
    assert not model.equal()


@pytest.mark.parametrize("flight", [1, 2, 4])
@pytest.mark.parametrize(("layers", "count", "most"), [(6, 6, 2), (6, 3, 4), (6, 2, 5), (1, 1, 1), (4, 9, 2)])
def test_the_device_has_the_layers_that_stay_and_at_most_two(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, layers: int, count: int, most: int, flight: int
) -> None:
    """Compares peak memory with the plan (`planner.activations`); `flight` passes are open, as in a pipeline's
    stages."""
    table, saved = torch.rand(100, HIDDEN, dtype=torch.float64), dict[int, tuple[StorageWeakRef, int]]()
    hooks, seen = torch.autograd.graph.saved_tensors_hooks, list[int]()

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if len(t) == 100 and storage.data_ptr() != table.data_ptr():
            saved[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        look()
        return t

    def look(*_: Any) -> None:
        seen.append(sum(size for ref, size in saved.values() if not ref.expired()))

    def forward() -> Tensor:
        hidden = torch.randn(100, HIDDEN, dtype=torch.float64, requires_grad=True) * 1
        with hooks(note, lambda t: t):
            for layer in model.chunks[0]:
                hidden, _ = layer(hidden_states=hidden, rotary=table)
        return hidden.sum()

    monkeypatch.setattr(
        activation_offload, "saved_tensors_hooks", lambda save, back: hooks(lambda t: save(note(t)), back)
    )
    each = {0: 0, count: 0}
    for moving in each:
        saved.clear()
        seen.clear()
        model = Model(1, layers, moving, device)
        for layer in model.chunks[0]:
            layer.register_forward_hook(look)
            layer.register_full_backward_pre_hook(look)
        under_way = [forward() for _ in range(flight)]
        for _ in range(3):
            under_way.pop(0).backward()
            under_way.append(forward())
        each[moving] = max(seen)
    staying = max(0, layers - count)
    planned = (flight - 1) * staying + (most if layers > 1 else min(flight, 2))
    assert each[count] / each[0] == pytest.approx(planned / (flight * layers), rel=0.1)


@pytest.mark.parametrize(
    ("layers", "count", "moving"), [(6, 2, {0, 3}), (5, 3, {0, 1, 3}), (2, 9, {0, 1}), (3, 0, set())]
)
def test_what_moves_lies_evenly(layers: int, count: int, moving: set[int]) -> None:
    assert spread(layers, count) == moving


def test_what_is_not_the_memory_that_it_lies_in_stays(device: torch.device) -> None:
    """Offloads conjugate and negative views: these views carry a mark, differ from their memory, and must stay."""

    class Turned(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            turned = torch.complex(hidden_states, hidden_states.sin()).conj()
            return (turned * turned.imag.exp()).real

    torch.manual_seed(0)
    start, gradients = torch.randn(64, HIDDEN, dtype=torch.float64), []
    for count in (0, 1):
        layer = Turned()
        offload([[layer]], count, device)
        leaf = start.clone().requires_grad_()
        layer(leaf * 1).sum().backward()
        gradients.append(leaf.grad)
    assert gradients[0] is not None and gradients[1] is not None and torch.equal(gradients[0], gradients[1])


def test_pages_serve_rows_of_any_length(device: torch.device) -> None:
    """Compares the number of pages with the need of the largest pass."""
    model, most = Model(1, 4, 2, device), 0
    for rows in (10, 300, 40, 299, 300, 7):
        loss, _ = model.both(0, rows)
        loss.backward()
        most = max(most, model.pages.count)
    del loss
    assert model.pages.count == most
    smaller = Model(1, 4, 2, device)
    smaller.both(0, 300)[0].backward()
    assert most == smaller.pages.count
