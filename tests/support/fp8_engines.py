"""vLLM's FP8 quantization on a CPU: everything is vLLM's except the matrix products, available only on GPUs.

`register` is a vLLM plugin (made by `plugin`) and runs in each of vLLM's processes. vLLM's classes quantize, keep and
load the weights; instead of an FP8 kernel, the values times their scales are multiplied in the activations' dtype.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from skyrl_mega.kernels.block_fp8 import dequantise_reference

ROOT = Path(__file__).parents[2]


def plugin(folder: Path) -> dict[str, str]:
    """Returns environment variables to make vLLM find `register`; writes the package metadata into `folder`."""
    about = folder / "fp8_engines-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8_engines\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\nfp8_engines = {__name__}:register\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}", "VLLM_PLUGINS": "skyrl_mega,fp8_engines"}


class LinearKernel:
    """A replacement for vLLM's FP8 matrix product."""

    def __init__(self, **_: Any) -> None:
        pass

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Does nothing: weights need no repacking."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, dequantise_reference(layer.weight.data, layer.weight_scale_inv.data, dtype=x.dtype), bias)


class ExpertsKernel:
    """A replacement for vLLM's fused experts."""

    is_monolithic = can_overlap_shared_experts = False
    prepare_finalize = SimpleNamespace(topk_indices_dtype=lambda: None)
    fused_experts = SimpleNamespace(consumes_expert_mask=False)

    def __init__(self, scales: SimpleNamespace) -> None:
        self.scales = scales

    def output_is_reduced(self) -> bool:
        return False

    def apply(
        self, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, *, expert_map: Tensor | None, **_: Any
    ) -> Tensor:
        first = dequantise_reference(w13.data, self.scales.w1_scale.data, dtype=x.dtype)
        second = dequantise_reference(w2.data, self.scales.w2_scale.data, dtype=x.dtype)
        ids = ids if expert_map is None else expert_map[ids]
        out = torch.zeros_like(x)
        for expert in range(len(first)):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            gate, up = linear(x[token], first[expert]).chunk(2, -1)
            out.index_add_(0, token, linear(silu(gate) * up, second[expert]) * weights[token, choice, None].to(x.dtype))
        return out


def register() -> None:
    """Installs the replacements in this process."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization import fp8 as checkpoint
    from vllm.model_executor.layers.quantization.online import base
    from vllm.model_executor.layers.quantization.online import fp8 as online

    for config in (base.OnlineQuantizationConfig, checkpoint.Fp8Config):
        config.get_supported_act_dtypes = classmethod(  # float32 shows smaller errors than bfloat16
            lambda cls: [torch.bfloat16, torch.float32]
        )
    for module in (online, checkpoint):
        module.init_fp8_linear_kernel = LinearKernel
        module.select_fp8_moe_backend = lambda **_: (None, SimpleNamespace(is_monolithic=lambda: False))
    for module in (oracle, checkpoint):
        module.convert_to_fp8_moe_kernel_format = lambda *, w13, w2, w13_scale, w2_scale, **_: (
            w13,
            w2,
            w13_scale,
            w2_scale,
        )
        module.make_fp8_moe_quant_config = lambda **given: SimpleNamespace(**given)
        module.make_fp8_moe_kernel = lambda *, moe_quant_config, **_: ExpertsKernel(moe_quant_config)
