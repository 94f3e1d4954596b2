"""A vLLM model's parameters as they are at load time, open for writing while the live kernels keep their storage.

vLLM re-packs some weights for its kernels after loading. For an update its reload machinery remembers every
parameter's load-time shape (`model_loader/reload`). An opened `LoadTimeParameters` gives tensors of those shapes: the
live ones where the kernel reads them as they were loaded, fresh ones elsewhere. A layer whose parameters are all
written processes its fresh ones again, the result is copied into the live storage, whose addresses CUDA graphs hold,
and the fresh ones are freed: no more than the layers that are being written is ever staged.

Experts whose width or hidden size a kernel wants in larger multiples are padded at load time already. They are written
aside in their own size and put between the padding when the layer closes.

A quantised layer is such a layer too. One that vLLM quantises itself when it loads (`quantization=fp8_per_block`) has
plain weights at load time, so a wire of the model's type brings those and the layer quantises them again; one of an FP8
checkpoint has numbers and scales, which an FP8 wire brings as they are. Scales are of blocks: those of whole tensors
want the maximum over all workers, a collective in the middle of an update whose layers every worker closes in an order
of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.weights.fp8.format import SUFFIX

SUPPORTED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that read the experts in their load-time order."""
EXPERTS = ("w13_weight", "w2_weight")
BROUGHT = {name + suffix for name in ("weight", *EXPERTS) for suffix in ("", SUFFIX)}
"""Load-time parameters of a quantised layer that a wire can bring."""


@dataclass
class _Layer:
    """A module with parameters of its own."""

    prefix: str
    module: Module
    names: dict[str, str] = field(default_factory=dict)
    """Full name → the module's own; a tied parameter counts for the first layer that has it."""
    live: dict[str, Parameter] = field(default_factory=dict)
    """What the kernels read, for parameters that are written elsewhere at present."""
    aside: dict[str, Tensor] = field(default_factory=dict)
    """Where such a parameter is written, if it is not a parameter of the module meanwhile."""
    missing: set[str] = field(default_factory=set)
    """Full names of what is still to be written."""


class LoadTimeParameters(Mapping[str, Tensor]):
    """The writable view of one worker's model: name → tensor, by the names of `model.named_parameters()` at load time.

    Args:
        model: The worker's loaded model.
        device: Where it lives.
        dtype: Type of its parameters at load time.

    Raises:
        NotImplementedError: A quantised layer is neither linear nor one of experts, or wants what no wire brings.
    """

    def __init__(self, model: Module, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.layers: list[_Layer] = []
        self.followers: list[_Layer] = []
        """All of their parameters are tied to other layers'; what was derived from those is derived again."""
        self.layer_of: dict[str, _Layer] = {}
        self.checking = False
        self.undefined = False
        """Whether what the layers hold has been dropped, so that the next update must bring all of it."""
        self.different: list[str] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            layer = _Layer(prefix, module)
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    layer.names[f"{prefix}.{name}" if prefix else name] = name
            if all(parameter is None for parameter in module._parameters.values()):
                continue
            if _quantised(module):
                first = get_layerwise_info(module).restore_metadata[0]
                if not isinstance(module, LinearBase | RoutedExperts) or not first.keys() <= BROUGHT:
                    method = f"{type(module.quant_method).__name__}: {', '.join(first)}"
                    raise NotImplementedError(f"weights of {prefix} ({method}) cannot be synchronised")
                if getattr(module, "weight_block_size", None) is None:
                    method = type(module.quant_method).__name__
                    raise NotImplementedError(
                        f"weights of {prefix}: {method} has one scale for the parts of all workers; "
                        "allowed is rollout.options.quantization=fp8_per_block"
                    )
                _check_blocks(prefix, module, first)
                # Its parameters are other ones now; a bias is not among vLLM's metadata, and stays.
                own = [*first, *(name for name in layer.names.values() if name == "bias")]
                layer.names = {f"{prefix}.{name}" if prefix else name: name for name in own}
            (self.layers if layer.names else self.followers).append(layer)
            self.layer_of |= dict.fromkeys(layer.names, layer)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layer_of)

    def __len__(self) -> int:
        return len(self.layer_of)

    def __contains__(self, name: object) -> bool:
        return name in self.layer_of  # and opens nothing

    def open(self, *, check: bool = False) -> None:
        """Begins an update. With `check` nothing live is changed: what is written is compared with it."""
        self.checking, self.different = check, []
        for layer in self.layers:
            layer.missing = set(layer.names)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        """The tensor to be written; what no shard covers of it is 0 or keeps its value."""
        layer = self.layer_of[name]
        own = layer.names[name]
        if own not in layer.aside:
            loaded = self._load_time(layer, own)
            part, fresh = _unpadded(layer.module, own, loaded), own in layer.live
            if part is loaded and (fresh or (not self.checking and loaded.dtype == self.dtype)):
                return loaded
            shape = part.flatten(1, 2).shape if part.dim() > loaded.dim() else part.shape
            layer.aside[own] = torch.zeros(shape, dtype=loaded.dtype if fresh else self.dtype, device=self.device)
            if self.checking and not fresh:  # where nobody writes there is nothing to compare
                layer.aside[own].view(part.shape).copy_(part)
        return layer.aside[own]

    def _load_time(self, layer: _Layer, own: str) -> Tensor:
        """A parameter in its load-time shape, padding included: the live one, or a fresh one in its place."""
        # vLLM keeps no metadata of a bias: it is never re-packed, but CPU kernels may turn it into float32.
        meta = get_layerwise_info(layer.module).restore_metadata[0].get(own)
        if meta is not None and not layer.live and _quantised(layer.module):
            self._lay_out(layer)
        here = layer.module._parameters[own]
        assert here is not None
        if meta is None or own in layer.live or _quantised(layer.module):
            return here.data
        if here.shape == meta.shape and not _repacked(layer.module):
            return here.data
        layer.live[own] = here
        layer.module._parameters[own] = fresh = self._fresh(meta, layer.module)
        return fresh.data

    def _fresh(self, meta: Tensor, module: Module) -> Parameter:
        with self.device:
            fresh: Parameter = materialize_meta_tensor(restore_layer_refs(meta, module))
        fresh.data.zero_()
        return fresh

    def _lay_out(self, layer: _Layer) -> None:
        """Puts all load-time parameters of a quantised layer in the place of those that its kernel reads."""
        metas, parameters = get_layerwise_info(layer.module).restore_metadata[0], layer.module._parameters
        for own in [own for own in parameters if own != "bias"]:
            live = parameters.pop(own)
            if live is not None:
                layer.live[own] = live
        for own, meta in metas.items():
            parameters[own] = self._fresh(meta, layer.module)

    def written(self, name: str) -> None:
        """All of this parameter is there. A layer of which that is true goes to work with it, and is closed."""
        layer = self.layer_of[name]
        layer.missing.discard(name)
        if not layer.missing:
            self._finish(layer)

    def close(self) -> list[str]:
        """Ends the update. Returns, where it was a check, the parameters that differ from the live ones.

        Raises:
            RuntimeError: A layer that processes its weights, or has dropped them, has not all of them.
        """
        for layer in self.layers:
            if layer.missing:
                if self.undefined or (layer.live and (_quantised(layer.module) or _repacked(layer.module))):
                    brings = "; weights.wire=fp8 brings scales" if _quantised(layer.module) else ""
                    raise RuntimeError(f"{', '.join(sorted(layer.missing))}: did not arrive{brings}")
                layer.missing.clear()
                self._finish(layer)
        if not self.checking:
            for layer in self.followers:
                self._finish(layer)
            self.undefined = False
        return self.different

    def abandon(self) -> None:
        """Drops what was written aside; what was written in place stays."""
        for layer in self.layers:
            layer.aside.clear()
            layer.missing.clear()
            self._put_back(layer)

    def _put_back(self, layer: _Layer) -> None:
        """What the kernel reads is in its place again."""
        if layer.live and _quantised(layer.module):
            for own in [own for own in layer.module._parameters if own != "bias"]:
                del layer.module._parameters[own]
        layer.module._parameters.update(layer.live)
        layer.live.clear()

    @torch.no_grad()
    def _finish(self, layer: _Layer) -> None:
        full = {own: name for name, own in layer.names.items()}
        for own, tensor in layer.aside.items():
            place = _unpadded(layer.module, own, getattr(layer.module, own).data)
            if own in layer.live or not self.checking:
                place.copy_(tensor.view(place.shape))
            elif not torch.equal(place, tensor.view(place.shape).to(place.dtype)):
                self.different.append(full[own])
        layer.aside.clear()
        method = getattr(layer.module, "quant_method", None)
        if method is None or (
            not layer.live and (self.checking or _quantised(layer.module) or _repacked(layer.module))
        ):
            return
        kernel = getattr(method, "moe_kernel", None), getattr(method, "moe_quant_config", None)
        _process(method, layer.module)
        for own, live in layer.live.items():
            processed = getattr(layer.module, own).data
            if not self.checking:
                live.data.copy_(processed)
            elif not _equal(live.data, processed):
                self.different.append(full.get(own, f"{layer.prefix}.{own}"))
        self._put_back(layer)
        if isinstance(method, FusedMoEMethodBase) and (self.checking or _quantised(layer.module)):
            # A quantised layer's new kernel would hold fresh scales; the one that graphs know holds the live ones.
            method.moe_kernel, method.moe_quant_config = kernel


def _check_blocks(prefix: str, module: Module, loaded: Mapping[str, Tensor]) -> None:
    """Of experts that come with scales vLLM makes smaller blocks where a worker's columns are no whole ones."""
    if not isinstance(module, RoutedExperts) or EXPERTS[0] + SUFFIX not in loaded:
        return
    width = module.moe_config.intermediate_size_per_partition_unpadded
    if width % BLOCK:
        raise NotImplementedError(
            f"weights of {prefix}: a worker has {width} columns of an expert, and a scale of an FP8 checkpoint is for "
            f"{BLOCK}; allowed is a rollout.tensor that leaves a multiple of {BLOCK}, or "
            "rollout.options.quantization=fp8_per_block without hf_overrides"
        )


def _unpadded(module: Module, own: str, loaded: Tensor) -> Tensor:
    """A load-time parameter without its padding: `loaded` itself where it has none, else a view of it.

    Experts [E, 2·W, H] are then [E, 2, width, hidden], their second projection [E, H, W] is [E, hidden, width].
    """
    if not isinstance(module, RoutedExperts) or own not in EXPERTS:
        return loaded
    sizes = module.moe_config
    width, hidden = sizes.intermediate_size_per_partition_unpadded, sizes.hidden_dim_unpadded
    if own == "w2_weight":
        return loaded if loaded.shape[1:] == (hidden, width) else loaded[:, :hidden, :width]
    if loaded.shape[1:] == (2 * width, hidden):
        return loaded
    return loaded.unflatten(1, (2, -1))[:, :, :width, :hidden]


def default_cache_scales(model: Module) -> None:
    """Scales of an FP8 cache are 1 again: vLLM takes those of its random dummy weights, and no policy has any."""
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            set_default_quant_scales(module)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; torch compares no FP8."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype.itemsize == 1 else torch.equal(a, b)


def _quantised(module: Module) -> bool:
    method = getattr(module, "quant_method", None)
    return method is not None and not isinstance(method, SUPPORTED)


def _repacked(module: Module) -> bool:
    """Whether a kernel reads this layer's weights in another order than they were loaded in."""
    method = getattr(module, "quant_method", None)
    return isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend not in AS_LOADED


def _process(method: object, module: Module) -> None:
    """Runs a layer's own post-processing, as after its first load."""
    if isinstance(method, UnquantizedFusedMoEMethod) and current_platform.is_cpu():
        # vLLM 0.32 takes an existing kernel for a sign that only values changed and then skips `fused_experts.
        # process_weights_after_loading`, which on CPU is the re-packing itself: the experts would compute with
        # weights in the wrong order (log-probs off by 0.04 to 0.6). Without a kernel it takes the way of a first
        # load. No graph holds it on CPU.
        method.moe_kernel = None
    vars(module).pop("_already_called_process_weights_after_loading", None)  # a quantised layer's, of its first load
    method.process_weights_after_loading(module)  # type: ignore[attr-defined]
