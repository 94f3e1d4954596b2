"""A vLLM model's load-time parameters, open for writing while the live kernels keep the storage.

vLLM re-packs some weights for its kernels after loading. For updates, vLLM's reload machinery (`model_loader/reload`)
stores every parameter's load-time shape. An opened `LoadTimeParameters` provides tensors of these shapes: the live
tensor if the kernel reads the load-time format, else a fresh tensor. A layer with all parameters written processes the
fresh tensors, the result is copied into the live storage (at addresses held by CUDA graphs), and the fresh tensors are
freed. Only layers being written are ever staged.

Experts are padded at load time already if a kernel needs larger multiples of the width or hidden size. The weights are
written to separate tensors without padding, and copied between the padding when the layer closes.

Quantised layers are handled in the same way. A layer quantised by vLLM on loading (`quantization=fp8_per_block`) has
plain weights at load time: a wire of the model's type delivers these, for the layer to quantise again. A layer of an
FP8 checkpoint gets numbers and scales unchanged from an FP8 wire. Only block scales are supported: scales of whole
tensors need the maximum over all workers, a collective in the middle of an update, with layers closed in another order
by every worker.
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

from skyrl_mega.engines.vllm import latent, sinks
from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.weights.fp8.format import SUFFIX

SUPPORTED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels reading experts in load-time order."""
EXPERTS = ("w13_weight", "w2_weight")
BIASES = ("w13_bias", "w2_bias")
DELIVERABLE = {name + suffix for name in ("weight", *EXPERTS) for suffix in ("", SUFFIX)}
"""Load-time parameters of a quantised layer deliverable by a wire."""

CONVOLUTION = "_cpu_unpacked_conv_weight"
"""Attribute with vLLM's copy of the weight of a packed convolution, for draft tokens on a CPU."""
UNIT_VECTORS = 1024
"""Columns of a packed weight compared at once."""


@dataclass
class _Layer:
    """A module with parameters of its own."""

    prefix: str
    module: Module
    names: dict[str, str] = field(default_factory=dict)
    """Full name → name in the module; a tied parameter counts for the first layer only."""
    live: dict[str, Parameter] = field(default_factory=dict)
    """Tensors read by the kernels, for parameters with a separate write target at present."""
    separate: dict[str, Tensor] = field(default_factory=dict)
    """Write targets outside the module."""
    missing: set[str] = field(default_factory=set)
    """Full names of the parameters still to be written."""

    def zeros(self) -> list[str]:
        """Returns the full names of the parameters that are zero with any weights: the bias of the second projection
        of experts split by columns, but on the first worker, because the workers' results are summed."""
        is_split = isinstance(self.module, RoutedExperts) and self.module.moe_config.moe_parallel_config.tp_rank > 0
        return [name for name, local_name in self.names.items() if is_split and local_name == "w2_bias"]


class LoadTimeParameters(Mapping[str, Tensor]):
    """The writable view of a worker's model: tensors by the names of `model.named_parameters()` at load time.

    Args:
        model: The worker's loaded model.
        device: Device of the model.
        dtype: Type of the model's parameters at load time.
        float32: Names of the parameters in float32 at load time and on the wire.

    Raises:
        NotImplementedError: A quantised layer is neither linear nor a layer of experts, or needs data not delivered by
            any wire.
    """

    def __init__(
        self, model: Module, device: torch.device, dtype: torch.dtype, float32: frozenset[str] = frozenset()
    ) -> None:
        self.device, self.dtype, self.float32 = device, dtype, float32
        self.layers: list[_Layer] = []
        self.followers: list[_Layer] = []
        """Layers with all parameters tied to other layers; derived data is computed again after an update."""
        self.layer_of: dict[str, _Layer] = {}
        self.checking = False
        self.undefined = False
        """True if the layers' weights were dropped, so that the next update must deliver all of them."""
        self.different: list[str] = []
        self.latent = latent.latent_attentions(model)
        """Layers with parameters derived from other layers' weights; computed again after an update."""
        self.sinks = sinks.copied_sinks(model)
        """Attention backends with copies of sinks; copied again after an update."""
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            if prefix in self.latent:
                continue
            layer = _Layer(prefix, module)
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    layer.names[f"{prefix}.{name}" if prefix else name] = name
            if all(parameter is None for parameter in module._parameters.values()):
                continue
            if _quantised(module):
                load_time = get_layerwise_info(module).restore_metadata[0]
                if not isinstance(module, LinearBase | RoutedExperts) or not load_time.keys() <= DELIVERABLE:
                    method = f"{type(module.quant_method).__name__}: {', '.join(load_time)}"
                    raise NotImplementedError(
                        f"weights of {prefix} ({method}) cannot be synchronised; give no quantization"
                    )
                if getattr(module, "weight_block_size", None) is None:
                    method = type(module.quant_method).__name__
                    raise NotImplementedError(
                        f"weights of {prefix}: {method} has one scale for the parts of all workers; "
                        "allowed is rollout.options.quantization=fp8_per_block"
                    )
                _check_blocks(prefix, module, load_time)
                # The parameters are not the load-time ones now; a bias is missing in vLLM's metadata, and stays.
                local_names = [*load_time, *(name for name in layer.names.values() if name == "bias")]
                layer.names = {f"{prefix}.{name}" if prefix else name: name for name in local_names}
            (self.layers if layer.names else self.followers).append(layer)
            self.layer_of |= dict.fromkeys(layer.names, layer)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layer_of)

    def __len__(self) -> int:
        return len(self.layer_of)

    def __contains__(self, name: object) -> bool:
        return name in self.layer_of  # without opening anything

    def open(self, *, check: bool = False) -> None:
        """Begins an update of all parameters: none counts as written. Changes no weights itself. From here on,
        `params[name]` is the tensor to write, `mark_written` reports the end of writing it, and `close` or `abandon`
        ends the update.

        Args:
            check: True to leave live weights unchanged, for comparison with the written data.
        """
        self.checking, self.different = check, []
        for layer in self.layers:
            layer.missing = set(layer.names) - set(layer.zeros())

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        """Returns the tensor to write for the parameter `name`, without padding: the live tensor if its kernel reads
        the load-time format, else a separate tensor. Elements outside all shards are 0 or keep the old value. Raises
        KeyError for a name that the model does not have at load time."""
        layer = self.layer_of[name]
        local_name = layer.names[name]
        if local_name not in layer.separate:
            loaded = self._load_time(layer, local_name)
            part, is_fresh = unpadded(layer.module, local_name, loaded), local_name in layer.live
            written = torch.float32 if name in self.float32 else self.dtype
            if part is loaded and (is_fresh or (not self.checking and loaded.dtype == written)):
                return loaded
            shape = part.flatten(1, 2).shape if part.dim() > loaded.dim() else part.shape
            layer.separate[local_name] = torch.zeros(
                shape, dtype=loaded.dtype if is_fresh else written, device=self.device
            )
            if self.checking and not is_fresh:  # elements that are never written must compare equal
                layer.separate[local_name].view(part.shape).copy_(part)
        return layer.separate[local_name]

    def _load_time(self, layer: _Layer, local_name: str) -> Tensor:
        """Returns a parameter in load-time shape, padding included: the live tensor, or a fresh replacement."""
        # vLLM keeps no metadata of a bias: it is never re-packed, but CPU kernels may convert it to float32.
        meta = get_layerwise_info(layer.module).restore_metadata[0].get(local_name)
        if meta is not None and not layer.live and _quantised(layer.module):
            self._install_load_time(layer)
        current = layer.module._parameters[local_name]
        assert current is not None
        if meta is None or local_name in layer.live or _quantised(layer.module):
            return current.data
        if current.shape == meta.shape and not _repacked(layer.module):
            return current.data
        layer.live[local_name] = current
        layer.module._parameters[local_name] = fresh = self._fresh(meta, layer.module)
        return fresh.data

    def _fresh(self, meta: Tensor, module: Module) -> Parameter:
        with self.device:
            fresh: Parameter = materialize_meta_tensor(restore_layer_refs(meta, module))
        fresh.data.zero_()
        return fresh

    def _install_load_time(self, layer: _Layer) -> None:
        """Replaces the kernel's parameters of a quantised layer by all load-time parameters."""
        metas, parameters = get_layerwise_info(layer.module).restore_metadata[0], layer.module._parameters
        for local_name in [local_name for local_name in parameters if local_name != "bias"]:
            live = parameters.pop(local_name)
            if live is not None:
                layer.live[local_name] = live
        for local_name, meta in metas.items():
            parameters[local_name] = self._fresh(meta, layer.module)

    def mark_written(self, name: str) -> None:
        """Marks a parameter as completely written.

        The last parameter of a layer installs the layer: vLLM's post-load processing runs on the written data, and the
        result is copied into the tensors read by the kernels. After `open(check=True)` the result is only compared with
        these tensors; `close` returns the differences.

        Args:
            name: Name of the parameter at load time; KeyError for another name.
        """
        layer = self.layer_of[name]
        layer.missing.discard(name)
        if not layer.missing:
            self._close_layer(layer)

    def close(self) -> list[str]:
        """Ends the update: installs the layers not yet installed, and computes derived tensors again. A layer that
        received only some of its parameters keeps the old values of the others, and a layer without any is left as
        before.

        Returns:
            [] after an update. After `open(check=True)`, when nothing is changed, the names of parameters and derived
            tensors that differ from the live data.

        Raises:
            RuntimeError: A layer that processes its weights, or has dropped them, did not receive all of them; names
                the missing parameters.
        """
        for layer in self.layers:
            if layer.missing:
                if self.undefined or (layer.live and (_quantised(layer.module) or _repacked(layer.module))):
                    brings = "; give weights.wire=fp8, which sends scales" if _quantised(layer.module) else ""
                    raise RuntimeError(f"the engine did not receive {', '.join(sorted(layer.missing))}{brings}")
                untouched = layer.missing == set(layer.names) - set(layer.zeros())
                layer.missing.clear()
                if not untouched or layer.separate or layer.live:
                    self._close_layer(layer)
        if not self.checking:
            for layer in self.followers:
                self._close_layer(layer)
            latent.derive(self.latent, self.dtype)
            sinks.derive(self.sinks, self.dtype)
            self.undefined = False
        else:
            self.different += latent.stale(self.latent, self.dtype) + sinks.stale(self.sinks)
        return self.different

    def abandon(self) -> None:
        """Ends an update early. Data in separate tensors is discarded, and data already written in place stays, so the
        weights may be of two versions. Does nothing without an update."""
        for layer in self.layers:
            layer.separate.clear()
            layer.missing.clear()
            self._restore_live(layer)

    def _restore_live(self, layer: _Layer) -> None:
        """Restores the parameters read by the kernel."""
        if layer.live and _quantised(layer.module):
            for local_name in [local_name for local_name in layer.module._parameters if local_name != "bias"]:
                del layer.module._parameters[local_name]
        layer.module._parameters.update(layer.live)
        layer.live.clear()

    @torch.no_grad()
    def _close_layer(self, layer: _Layer) -> None:
        for name in layer.zeros():
            self[name].zero_()
        full_names = {local_name: name for name, local_name in layer.names.items()}
        for local_name, tensor in layer.separate.items():
            place = unpadded(layer.module, local_name, getattr(layer.module, local_name).data)
            if local_name in layer.live or not self.checking:
                place.copy_(tensor.view(place.shape))
            elif not torch.equal(place, tensor.view(place.shape).to(place.dtype)):
                self.different.append(full_names[local_name])
        layer.separate.clear()
        if self.checking and _packed(layer):
            self._compare_packed(layer, full_names["weight"])
            return
        method = getattr(layer.module, "quant_method", None)
        if method is None or (
            not layer.live and (self.checking or _quantised(layer.module) or _repacked(layer.module))
        ):
            return
        kernel = getattr(method, "moe_kernel", None), getattr(method, "moe_quant_config", None)
        copied = vars(layer.module).get(CONVOLUTION)
        _process(method, layer.module)
        if self.checking and copied is not None:
            setattr(layer.module, CONVOLUTION, copied)
        for local_name, live in layer.live.items():
            processed = getattr(layer.module, local_name).data
            if not self.checking:
                live.data.copy_(processed)
            elif not _equal(live.data, processed):
                self.different.append(full_names.get(local_name, f"{layer.prefix}.{local_name}"))
        self._restore_live(layer)
        if isinstance(method, FusedMoEMethodBase) and (self.checking or _quantised(layer.module)):
            # A quantised layer's new kernel would hold fresh scales; the kernel known to CUDA graphs holds the live
            # ones.
            method.moe_kernel, method.moe_quant_config = kernel

    def _compare_packed(self, layer: _Layer, name: str) -> None:
        """Compares the written weight of a packed linear layer with the products of the kernel and unit vectors.

        Post-load processing would replace the packed weight by the written weight, unseen.
        """
        written = layer.module._parameters["weight"]
        assert written is not None
        self._restore_live(layer)
        kernel, empty, columns = vars(layer.module)["cpu_linear"], layer.module._parameters["weight"], written.shape[1]
        for part in torch.arange(columns).split(UNIT_VECTORS):
            units = torch.nn.functional.one_hot(part, columns).to(written.dtype)
            if not torch.equal(kernel(units, empty, None).T, written.data[:, part]):
                self.different.append(name)
                return


def _check_blocks(prefix: str, module: Module, loaded: Mapping[str, Tensor]) -> None:
    """Checks that a worker's columns of experts with FP8 scales are whole blocks; otherwise vLLM makes smaller blocks.

    Raises:
        NotImplementedError: The columns are not a multiple of the block size.
    """
    if not isinstance(module, RoutedExperts) or EXPERTS[0] + SUFFIX not in loaded:
        return
    width = module.moe_config.intermediate_size_per_partition_unpadded
    if width % BLOCK:
        raise NotImplementedError(
            f"weights of {prefix}: a worker has {width} columns of an expert, and a scale of an FP8 checkpoint is for "
            f"{BLOCK}; allowed is a rollout.tensor that leaves a multiple of {BLOCK}, or "
            "rollout.options.quantization=fp8_per_block without hf_overrides"
        )


def unpadded(module: Module, local_name: str, loaded: Tensor) -> Tensor:
    """Returns a load-time parameter without padding: `loaded` itself if there is none, else a view.

    The view of padded experts [E, 2·W, H] is [E, 2, width, hidden]; of the second projection [E, H, W], [E, hidden,
    width]. Experts with biases have gate and up in turn, [E, 2·width, hidden].

    Args:
        module: The layer that owns the parameter.
        local_name: Name of the parameter within the layer.
        loaded: The parameter, as at load time.
    """
    if not isinstance(module, RoutedExperts) or local_name not in (*EXPERTS, *BIASES):
        return loaded
    sizes = module.moe_config
    width, hidden = sizes.intermediate_size_per_partition_unpadded, sizes.hidden_dim_unpadded
    if BIASES[0] in module._parameters:
        part = (2 * width, hidden) if "w13" in local_name else (hidden, width)
        inner = part[: loaded.dim() - 1]
        return loaded if loaded.shape[1:] == inner else loaded[(slice(None), *(slice(n) for n in inner))]
    if local_name == "w2_weight":
        return loaded if loaded.shape[1:] == (hidden, width) else loaded[:, :hidden, :width]
    if loaded.shape[1:] == (2 * width, hidden):
        return loaded
    return loaded.unflatten(1, (2, -1))[:, :, :width, :hidden]


def default_cache_scales(model: Module) -> None:
    """Sets the scales of an FP8 cache to 1 in all attention layers of a model, and leaves other layers alone. vLLM
    takes these scales from random dummy weights, and no policy has any."""
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            set_default_quant_scales(module)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Returns True if tensors are equal bit for bit; torch cannot compare FP8."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype.itemsize == 1 else torch.equal(a, b)


def _quantised(module: Module) -> bool:
    method = getattr(module, "quant_method", None)
    return method is not None and not isinstance(method, SUPPORTED)


def _repacked(module: Module) -> bool:
    """Returns True if the layer's kernel reads weights in another order than the load-time order."""
    method = getattr(module, "quant_method", None)
    return isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend not in AS_LOADED


def _packed(layer: _Layer) -> bool:
    """Returns True if a linear layer on a CPU holds its weight only in packed form, and the parameter is empty."""
    live = layer.live.get("weight")
    return live is not None and not live.numel() and "cpu_linear" in vars(layer.module) and not _quantised(layer.module)


def _process(method: object, module: Module) -> None:
    """Runs a layer's own post-processing, as after the first load."""
    if isinstance(method, UnquantizedFusedMoEMethod) and current_platform.is_cpu():
        # For vLLM 0.32 an existing kernel means that only values changed, and it skips
        # `fused_experts.process_weights_after_loading`, which on CPU is the re-packing itself: the experts would
        # compute with weights in the wrong order (log-probs off by 0.04 to 0.6). Without a kernel vLLM proceeds as
        # after a first load. No graph holds the kernel on CPU.
        method.moe_kernel = None
    vars(module).pop("_already_called_process_weights_after_loading", None)  # set by a quantised layer's first load
    method.process_weights_after_loading(module)  # type: ignore[attr-defined]
