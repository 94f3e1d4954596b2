"""The CPU stand-in for CUDA: the names of `torch.cuda` required by megatron-core 0.16, on machines without CUDA.

megatron-core asks `torch.cuda` for devices, streams and random state, and names the device "cuda" outright. `stand_in`
replaces those names for the process and maps that device in every tensor factory. No other part of the project depends
on running on a CPU, and this module is never used on a machine with CUDA.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}

_CUDA_ONLY = ("transformer_engine", "apex", "flashinfer")
"""Packages that megatron-core uses whenever importable (for example for Adam), but that cannot compute on a CPU."""


class _Stream:
    """A stream or an event on a device with a single queue, so every wait is over at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True


_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros",
    "zeros_like",
)  # fmt: skip
"""Tensor factories with a device argument. A mode (`torch.overrides`) would map the device in every call instead, at 25
% of a small model's time."""


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `make` with CUDA devices mapped to the CPU, and without pinned memory."""

    @wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return wrapper


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Tensor.type` and returns CUDA's type names, which megatron-core expects."""
    if args or kwargs:
        return _original_type(tensor, *args, **kwargs)
    return _TYPE_NAMES.get(tensor.dtype) or _original_type(tensor)


_original_type = torch.Tensor.type


def _no_compile(function: Any = None, **_: Any) -> Any:
    """Replaces `torch.compile` during megatron-core's import and returns the function uncompiled.

    The compiler takes half of the import's time. The decorated functions called by layers of `policy.spec: local`
    compute the same uncompiled.
    """
    return function if function is not None else _no_compile


def stand_in() -> None:
    """Makes megatron-core run without CUDA: replaces the names of `torch` and `torch.cuda` that megatron-core uses, for
    this process, and imports parts of megatron-core.

    Call on machines without CUDA only, before the first import of megatron-core: modules imported earlier keep the
    original names. Repeated calls do nothing.
    """
    tensor: Any = torch.Tensor
    if tensor.type is _type:
        return
    tensor.type = _type
    _device_constructors()  # fills torch's cache with the original factories, for `with torch.device(…)`
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    modules: dict[str, Any] = sys.modules
    for name in _CUDA_ONLY:
        modules.setdefault(name, None)  # makes every later import fail
    stream = _Stream()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=1)
    tensor.cuda = lambda self, *_, **__: self
    tensor.record_stream = lambda self, *_: None
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_: self

    torch_module: Any = torch
    original_compile, torch_module.compile = torch.compile, _no_compile
    try:
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils, token_dispatcher
    finally:
        torch_module.compile = original_compile

    module_to_patch: Any = random
    module_to_patch._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    module_to_patch._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    module_to_patch = moe_utils
    if not hasattr(moe_utils, "te_general_gemm"):
        module_to_patch.te_general_gemm = None  # used without a guard if Transformer Engine is absent
    module_to_patch = token_dispatcher
    module_to_patch.maybe_move_tensor_to_cpu = _to_host


def _to_host(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces megatron-core's function, which leaves a CPU tensor unchanged even if asked for a numpy array."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
