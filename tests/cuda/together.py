"""Collectives that are issued together, on gloo: one after another, and over as they are issued.

Gloo lays what comes together into one tensor of one type, where NCCL sends each as it is.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Done:
    """What came together, and is over."""

    def wait(self) -> None:
        """There is nothing to wait for."""


def one_by_one() -> None:
    """Transformer Engine's, and those of megatron-core's data parallelism. For this process, after their imports."""
    from megatron.core.distributed import param_and_grad_buffer

    modules: list[Any] = [torch.distributed, param_and_grad_buffer]
    for module in modules:
        module._coalescing_manager = lambda *_, **__: contextlib.nullcontext(Done())
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(modules[1], name, _at_once(getattr(modules[1], name)))


def _at_once(collective: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        collective(*args, **kwargs | {"async_op": False})

    return run
