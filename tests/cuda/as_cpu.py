"""CUDA's device mapped to the CPU in every torch call of a thread. `megatron.cpu` maps the device only in tensor
factories."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from skyrl_mega.megatron.cpu import _FACTORIES, _TYPE_NAMES

CPU = torch.device("cpu")


class CudaAsCpu(TorchFunctionMode):
    """Maps CUDA's device to the CPU in every torch call, and answers `Tensor.type()` with CUDA's name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _TYPE_NAMES.get(args[0].dtype, func(args[0]))
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        if any(isinstance(a, torch.device | str) for a in args):
            args = tuple(
                CPU
                if (isinstance(a, torch.device) and a.type == "cuda") or (isinstance(a, str) and a.startswith("cuda"))
                else a
                for a in args
            )
        return func(*args, **kwargs)


def unmapped() -> None:
    """Undoes the change of `megatron.cpu.stand_in` to torch's factories for this process, so that modes see the named
    device and map the device themselves. Idempotent."""
    for name in _FACTORIES:
        factory = getattr(torch, name)
        setattr(torch, name, getattr(factory, "__wrapped__", factory))
