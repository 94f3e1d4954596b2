"""Coalesced collectives on gloo, run in sequence and complete when issued.

gloo would merge coalesced tensors into a single tensor of a single dtype; NCCL sends each tensor unchanged.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Done:
    """Handle of coalesced collectives, already complete."""

    def wait(self) -> None:
        """Returns at once."""


def one_by_one() -> None:
    """Replaces the coalesced collectives of Transformer Engine and of megatron-core's data parallelism in this process.
    Must run after both imports."""
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
