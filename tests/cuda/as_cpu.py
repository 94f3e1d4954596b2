"""CUDA's device as the CPU's, in every torch call of a thread: `megatron.cpu` maps it only where a tensor is made."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from skyrl_mega.megatron.cpu import _FACTORIES, _TYPE_NAMES

CPU = torch.device("cpu")


class CudaAsCpu(TorchFunctionMode):
    """Maps CUDA's device to the CPU, whatever names it, and answers `Tensor.type()` with CUDA's name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _TYPE_NAMES.get(args[0].dtype, func(args[0]))
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        args = tuple(
            CPU
            if (isinstance(a, torch.device) and a.type == "cuda") or (isinstance(a, str) and a.startswith("cuda"))
            else a
            for a in args
        )
        return func(*args, **kwargs)


def unmapped() -> None:
    """Takes back for this process what `megatron.cpu.stand_in` makes of the factories: modes then see which device is
    named, and map it themselves. Idempotent."""
    for name in _FACTORIES:
        made = getattr(torch, name)
        setattr(torch, name, getattr(made, "__wrapped__", made))
