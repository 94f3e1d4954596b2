"""A vLLM model's parameters as they are at load time, open for writing while the live kernels keep their storage.

vLLM re-packs some weights for its kernels after loading. For an update its reload machinery remembers every
parameter's load-time shape (`model_loader/reload`). `LoadTimeParameters.open` gives tensors of those shapes: the live
ones where the kernel reads them as they were loaded, fresh ones elsewhere. `close` lets each layer process its fresh
weights again and copies the result into the live storage, whose addresses CUDA graphs hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

SUPPORTED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)


@dataclass
class _Layer:
    """A module with parameters of its own."""

    prefix: str
    module: Module
    live: dict[str, Parameter] = field(default_factory=dict)
    """What the kernels read, for parameters that are written elsewhere during an update."""
    aside: dict[str, Tensor] = field(default_factory=dict)
    """Buffers for live parameters whose type was changed after loading."""

    def name(self, parameter: str) -> str:
        return f"{self.prefix}.{parameter}" if self.prefix else parameter


class LoadTimeParameters:
    """The writable view of one worker's model.

    Args:
        model: The worker's loaded model.
        device: Where it lives.
        dtype: Type of its parameters at load time.

    Raises:
        NotImplementedError: A layer is quantised; its weights are no plain shard.
    """

    def __init__(self, model: Module, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.layers = [
            _Layer(prefix, module)
            for prefix, module in model.named_modules()
            if any(p is not None for p in module._parameters.values())
        ]
        for layer in self.layers:
            method = getattr(layer.module, "quant_method", None)
            if method is not None and not isinstance(method, SUPPORTED):
                raise NotImplementedError(f"weights of {layer.prefix} ({type(method).__name__}) cannot be synchronised")

    @torch.no_grad()
    def open(self) -> dict[str, Tensor]:
        """Name → tensor to be written, by the names of `model.named_parameters()` at load time."""
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()  # tied parameters appear once, under their first name
        for layer in self.layers:
            for name, parameter in list(layer.module._parameters.items()):
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                tensors[layer.name(name)] = self._writable(layer, name, parameter)
        return tensors

    def _writable(self, layer: _Layer, name: str, live: Parameter) -> Tensor:
        # vLLM keeps no metadata of a bias: it is never re-packed, but CPU kernels may turn it into float32.
        meta = get_layerwise_info(layer.module).restore_metadata[0].get(name)
        if meta is None:
            if live.dtype == self.dtype:
                return live.data
            return layer.aside.setdefault(name, torch.empty(live.shape, dtype=self.dtype, device=self.device))
        repacked = isinstance(getattr(layer.module, "quant_method", None), UnquantizedFusedMoEMethod)
        if not repacked and live.shape == meta.shape and live.dtype == meta.dtype:
            return live.data
        layer.live[name] = live
        with self.device:
            fresh = materialize_meta_tensor(restore_layer_refs(meta, layer.module))
        layer.module._parameters[name] = fresh
        return fresh.data

    @torch.no_grad()
    def close(self) -> None:
        """Puts everything that was written to work."""
        for layer in self.layers:
            for name, tensor in layer.aside.items():
                getattr(layer.module, name).data.copy_(tensor)
            layer.aside.clear()
            method = getattr(layer.module, "quant_method", None)
            if method is not None:
                _process(method, layer.module)
            for name, live in layer.live.items():
                live.data.copy_(getattr(layer.module, name).data)
                layer.module._parameters[name] = live
            layer.live.clear()


def _process(method: object, module: Module) -> None:
    """Runs a layer's own post-processing, as after its first load."""
    if isinstance(method, UnquantizedFusedMoEMethod) and current_platform.is_cpu():
        # vLLM 0.32 takes an existing kernel for a sign that only values changed and then skips `fused_experts.
        # process_weights_after_loading`, which on CPU is the re-packing itself: the experts would compute with
        # weights in the wrong order (log-probs off by 0.04 to 0.6). Without a kernel it takes the way of a first
        # load. No graph holds it on CPU.
        method.moe_kernel = None
    method.process_weights_after_loading(module)  # type: ignore[attr-defined]
