"""A simulated CUDA device, in two variants.

`fake_cuda`: tensors on CUDA with shapes and types, but no memory. torch's `FakeTensorMode` runs every operation on
shapes and refuses to mix CPU with CUDA tensors. `Known` answers questions about values as for a full batch. Autograd's
engine needs a real device, so there is no backward pass.

`CpuAsCuda`: tensors with values on the CPU that report CUDA as the device. Code with a branch on the device takes the
GPU branch, including backward passes and optimizer steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from skyrl_mega.megatron import worker
from skyrl_mega.megatron.cpu import _TYPE_NAMES
from tests.cuda.as_cpu import CudaAsCpu

CUDA = torch.device("cuda", 0)


class Known(TorchFunctionMode):
    """Answers questions about values: every mask is true everywhere, and tokens are even over experts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if type(kwargs.get("device")) is int:  # torch would query a device for an integer
            kwargs["device"] = CUDA
        if func is torch.Tensor.nonzero:
            (x,) = args
            assert x.dim() == 1
            return torch.arange(len(x), device=x.device)[:, None]
        if func is torch.Tensor.cuda:
            return args[0].to(CUDA)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            assert args[0].device.type == "cuda", args[0]  # the name has no device here
            return _TYPE_NAMES[args[0].dtype]
        return func(*args, **kwargs)


class CpuAsCuda(CudaAsCpu):
    """Maps CUDA to the CPU like `CudaAsCpu`; tensors report CUDA as the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return CUDA
        return super().__torch_function__(func, types, args, kwargs)


class _Fake(FakeTensorMode):
    """Fake tensor mode without any initialisation of a device."""

    @property
    def avoid_device_init(self) -> bool:
        return True


def _same_device(*tensors: Any, **_: Any) -> None:
    """Checks that an NCCL collective gets CUDA tensors only."""
    assert all(t.device == CUDA for t in tensors if isinstance(t, torch.Tensor))


def _apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """Replaces each parameter by a new parameter. torch's own method swaps the data, and fake parameters refuse
    that."""
    for child in module.children():
        child._apply(fn)
    for name, p in module._parameters.items():
        if p is not None and (moved := fn(p)) is not p:
            new = torch.nn.Parameter(moved.detach(), p.requires_grad)
            new.__dict__.update({k: v for k, v in p.__dict__.items() if k not in new.__dict__})
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else fn(buffer)
    return module


@contextmanager
def _guarded() -> Iterator[None]:
    """Provides a device guard for CUDA. A tensor with a gradient needs the guard, and torch without CUDA has no such
    guard; the guard of meta does nothing and serves as a replacement.

    torch does the same in a CUDA build without a device.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    before, guards[cuda] = guards[cuda], guards[cuda] or guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Makes torch report an H100 within the context."""
    stream = mock.MagicMock(name="stream", device=CUDA)
    names: dict[str, Any] = dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        set_device=lambda *_: None,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        Stream=lambda *_, **__: stream,
        get_device_capability=lambda *_: (9, 0),
        get_device_properties=lambda *_: SimpleNamespace(multi_processor_count=132, major=9, minor=0),
        manual_seed=lambda *_: None,
        random=SimpleNamespace(get_rng_state=lambda *_, **__: torch.empty(16, dtype=torch.uint8, device="cpu")),
        get_rng_state=lambda *_, **__: torch.empty(16, dtype=torch.uint8, device="cpu"),
        set_rng_state=lambda *_, **__: None,
        default_generators=mock.MagicMock(name="generators"),
        _lazy_init=lambda: None,
    )
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    @contextmanager
    def coalesced(*_: Any, **__: Any) -> Iterator[Any]:
        yield mock.MagicMock(name="work")

    with (
        _guarded(),
        _Fake(allow_non_fake_inputs=True) as mode,
        mock.patch.multiple(torch.cuda, **names),
        # `fork` compares states of generators; random weights have no values here anyway.
        mock.patch.object(CudaRNGStatesTracker, "fork", return_value=nullcontext()),
        mock.patch.object(torch.nn.Module, "_apply", _apply),
        # Collectives move no values here, and the mode does not know these functions.
        mock.patch.object(buffers, "_coalescing_manager", coalesced),
        mock.patch.object(buffers, "dist_all_gather_func", _same_device),
        mock.patch.object(buffers, "dist_reduce_scatter_func", _same_device),
        mock.patch.object(dist, "all_reduce", _same_device),
        # The function reads the sequences' lengths one after the other.
        mock.patch.object(rope_utils, "_apply_rotary_pos_emb_thd", lambda t, *_, **__: t.clone()),
        # Packing runs in host memory, with values.
        mock.patch.object(worker, "pack", with_values(worker.pack)),
        Known(),
    ):
        yield mode


def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function wrapped to run outside the fake device."""

    def called(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily(), torch._C.DisableTorchFunction():
            return function(*args, **options)

    return called
