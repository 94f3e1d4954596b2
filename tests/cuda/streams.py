"""Simulated CUDA for a process on a CPU, for the GPU code in `weights/`: streams, events, NCCL, CUDA IPC and kernels.

Every replacement is stricter than the original. The bytes of a message arrive at the wait for the message; until then
the receiver's buffer holds garbage. Sent bytes must not change before the wait. An event must be recorded before a
query, and the first query always says no. A kernel must be launched on the exchange's stream, after a wait for the
earlier work of the current stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.cuda.as_cpu import CudaAsCpu

CUDA = torch.device("cuda")
"""CUDA device without an index, so that code must ask for the current device."""
FIRST = torch.device("cuda", 0)
RUBBISH = 0xEE


class Stream:
    """Stream with a count of work, and the counts of awaited streams."""

    made: ClassVar[list[Stream]] = []
    current: ClassVar[Stream]

    def __init__(self, device: Any = None) -> None:
        Stream.made.append(self)
        self.count = 0
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen | {other: other.count}

    def synchronize(self) -> None:
        self.count += 1


MAIN = Stream.current = Stream()


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Replacement of `torch.cuda.stream`."""
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


class Event:
    """Event, complete at the third query after the recording, unless the device hangs."""

    hang = False

    def __init__(self) -> None:
        self.left = -1

    def record(self) -> None:
        self.left = 2

    def query(self) -> bool:
        assert self.left >= 0, "nobody has recorded it"
        if not Event.hang:
            self.left = max(0, self.left - 1)
        return self.left == 0


def touched() -> None:
    """Adds work to the current stream and checks that the stream is allowed to touch parameters."""
    stream = Stream.current
    assert stream is not MAIN, "it belongs on the exchange's stream"
    assert stream.seen.get(MAIN) == MAIN.count, "the parameters may still be written"
    stream.count += 1


class Launched:
    """Kernel in Triton's interpreter that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            touched()
            self.launches += 1
            with torch._C.DisableTorchFunction(), no_cuda():
                self.kernel[grid](*args, **kwargs)

        return launch


class Work:
    """Pending messages. `wait` makes the current stream wait, as with NCCL; here the messages are then complete."""

    def __init__(self, works: list[Any], arriving: list[tuple[Tensor, Tensor]], leaving: list[tuple[Tensor, Tensor]]):
        self.works, self.arriving, self.leaving = works, arriving, leaving

    def wait(self, *timeout: Any) -> bool:
        assert not timeout, "with a timeout NCCL blocks the host"
        for work in self.works:
            work.wait()
        for buffer, brought in self.arriving:
            buffer.copy_(brought)
        for buffer, sent in self.leaving:
            assert torch.equal(buffer, sent), "it was written to while it was sent"
        self.works, self.arriving, self.leaving = [], [], []
        if Stream.current is not MAIN:
            touched()
        return True


class Options:
    """Replacement of `ProcessGroupNCCL.Options`."""

    _timeout: Any = None


class Nccl:
    """Replacement of `ProcessGroupNCCL` over gloo."""

    Options = Options
    aborted = 0

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        backend: Any = dist.ProcessGroupGloo
        gloo = backend._Options()
        gloo._timeout = options._timeout
        gloo._devices = [backend.create_device(hostname="127.0.0.1")]
        self.group = backend(store, rank, size, gloo)
        self.together: Work | None = None

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        return self.group.allreduce(tensors, options)

    def _start_coalescing(self) -> None:
        assert self.together is None
        self.together = Work([], [], [])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        (buffer,) = tensors
        assert self.together is not None, "alone, a message of NCCL's would need the other's"
        touched()
        brought = torch.empty_like(buffer)
        buffer.fill_(RUBBISH)
        self.together.works.append(self.group.recv([brought], source, tag))
        self.together.arriving.append((buffer, brought))

    def send(self, tensors: list[Tensor], target: int, tag: int) -> None:
        (buffer,) = tensors
        assert self.together is not None, "alone, a message of NCCL's would need the other's"
        touched()
        sent = buffer.clone()
        self.together.works.append(self.group.send([sent], target, tag))
        self.together.leaving.append((buffer, sent))

    def _end_coalescing(self) -> Work:
        work, self.together = self.together, None
        assert work is not None
        return work

    def abort(self) -> None:
        Nccl.aborted += 1
        self.group = None


class Pool:
    """Replacement of `torch.cuda.MemPool` and of torch's allocator settings; records the settings at each use of a
    pool."""

    settings = "max_split_size_mb:512,expandable_segments:True"
    taken: ClassVar[list[str]] = []

    @classmethod
    def snapshot(cls) -> dict[str, Any]:
        """Returns the allocator settings as reported by torch 2.11 and 2.13."""
        expand = cls.settings.rpartition("expandable_segments:")[2] == "True"
        return {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": cls.settings, "expandable_segments": expand}}


@contextmanager
def pooled(pool: Pool, device: Any) -> Iterator[None]:
    """Replacement of `torch.cuda.use_mem_pool`."""
    assert isinstance(pool, Pool)
    assert device is None or isinstance(device, int), "torch refuses a device without a number"
    Pool.taken.append(Pool.settings)
    yield


def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Shares a storage through a file in shared memory; replaces `_share_cuda_`."""
    assert Pool.taken and Pool.taken[-1].endswith("expandable_segments:False"), "CUDA IPC cannot open it"
    manager, handle, size = storage._share_filename_cpu_()  # type: ignore[misc]
    return 0, handle, size, 0, manager, 0, b"event", False


def open_shared(device: int, handle: bytes, size: int, offset: int, manager: bytes, *_: Any) -> torch.UntypedStorage:
    """Opens a shared storage; replaces `_new_shared_cuda`."""
    assert device == 0 and isinstance(handle, bytes) and isinstance(manager, bytes)
    return torch.UntypedStorage._new_shared_filename_cpu(manager, handle, size)


_pretending = False


@contextmanager
def no_cuda() -> Iterator[None]:
    """Makes tensors report the real device within the context."""
    global _pretending
    before, _pretending = _pretending, False
    try:
        yield
    finally:
        _pretending = before


_device, _is_cuda = torch.Tensor.device, torch.Tensor.is_cuda


@contextmanager
def pretended() -> Iterator[dict[str, Launched]]:
    """Simulates a GPU in this process and yields the kernels by name. The changes are permanent, for processes that
    end."""
    global _pretending
    from skyrl_mega.kernels import block_fp8_triton, boxes_triton

    cuda, tensor, c = torch.cuda, torch.Tensor, torch._C
    replaced: Any = cuda
    replaced.Stream, replaced.Event, replaced.stream = Stream, Event, on
    replaced.current_stream = lambda *_: Stream.current
    replaced.current_device = lambda: 0
    replaced.MemPool, replaced.use_mem_pool = Pool, pooled
    replaced.memory._snapshot = Pool.snapshot
    replaced = tensor
    replaced.device = property(lambda self: FIRST if _pretending else _device.__get__(self))
    replaced.is_cuda = property(lambda self: _pretending or _is_cuda.__get__(self))
    replaced.pin_memory = lambda self: self
    replaced = torch.UntypedStorage
    replaced._share_cuda_, replaced._new_shared_cuda = share, staticmethod(open_shared)
    replaced = c
    replaced._accelerator_setAllocatorSettings = lambda text: setattr(Pool, "settings", text)
    replaced = dist
    replaced.ProcessGroupNCCL = Nccl
    kernels = {}
    for module, names in ((boxes_triton, ("_copy", "_sum")), (block_fp8_triton, ("_amax", "_quantise", "_dequantise"))):
        for name in names:
            kernels[name] = Launched(getattr(module, name))
            setattr(module, name, kernels[name])
    _pretending = True
    with CudaAsCpu():
        yield kernels
