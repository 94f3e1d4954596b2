"""Copies of attention sinks that some of vLLM's attention backends (FlashInfer) make after loading, in float32.

After an update the kernels would read the copies of the old sinks. Other backends read the parameter itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.attention import Attention


def copied_sinks(model: Module) -> list[tuple[str, Any]]:
    """Returns (layer name, attention backend) for each backend (`Attention.impl`, or a variant of it) that reads a copy
    of the sinks. Leaves out backends that read the parameter itself."""
    return [
        (prefix, backend)
        for prefix, module in model.named_modules()
        if isinstance(module, Attention)
        for backend in module.impl.get_impl_variants()
        if getattr(backend, "_sinks_source", None) is not None and backend.sinks is not backend._sinks_source
    ]


@torch.no_grad()
def derive(backends: Sequence[tuple[str, Any]], dtype: torch.dtype) -> None:
    """Copies the present sinks again, in place, at the addresses held by CUDA graphs.

    Args:
        backends: Result of `copied_sinks`.
        dtype: Type of the model's parameters.
    """
    for _, backend in backends:
        backend.process_weights_after_loading(dtype)


@torch.no_grad()
def stale(backends: Sequence[tuple[str, Any]]) -> list[str]:
    """Returns the parameter names, `<layer>.sinks`, of the layers whose copy is not equal to the present sinks; [] if
    all are equal. Changes nothing.

    Args:
        backends: Result of `copied_sinks`.
    """
    return [
        f"{prefix}.sinks"
        for prefix, backend in backends
        if not torch.equal(backend.sinks, backend._sinks_source.to(backend.sinks.dtype))
    ]
