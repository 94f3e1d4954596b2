"""The CPU stand-in for CUDA: what megatron-core 0.16 takes for granted, when there is no CUDA device.

megatron-core asks `torch.cuda` for devices, streams and random state, and names the device "cuda" outright.
`stand_in` replaces those names for the process, and `CudaAsCpu` maps the device in every torch call of the thread
that enters it. Nothing else in the project knows that it runs on a CPU; on a machine with CUDA this module is never
entered.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}

_CUDA_ONLY = ("transformer_engine", "apex", "flashinfer")
"""megatron-core takes them wherever they can be imported: their Adam for torch's, and so on. None computes on a CPU."""


class _Stream:
    """A stream or an event on a device that has one queue: all waits are over at once."""

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


class CudaAsCpu(TorchFunctionMode):
    """Maps `device="cuda"` to the CPU and answers `Tensor.type()` with the CUDA name, which megatron-core compares
    with.

    A mode belongs to a thread: enter it in the one that runs Megatron.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _TYPE_NAMES.get(args[0].dtype, func(args[0]))
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        args = tuple(
            _CPU
            if (isinstance(a, torch.device) and a.type == "cuda") or (isinstance(a, str) and a.startswith("cuda"))
            else a
            for a in args
        )
        return func(*args, **kwargs)


def stand_in() -> None:
    """Replaces for this process what megatron-core expects of CUDA, before its first import. Idempotent."""
    modules: dict[str, Any] = sys.modules
    for name in _CUDA_ONLY:
        modules.setdefault(name, None)  # nobody of this process can import it from now on
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
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.record_stream = lambda self, *_: None
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_: self

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    patch: Any = random
    patch._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    patch._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    patch = moe_utils
    if not hasattr(moe_utils, "te_general_gemm"):
        patch.te_general_gemm = None  # named without a guard where Transformer Engine is absent
    patch = token_dispatcher
    patch.maybe_move_tensor_to_cpu = _to_host


def _to_host(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """megatron-core's own leaves a CPU tensor as it is, where its caller wants numpy."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
