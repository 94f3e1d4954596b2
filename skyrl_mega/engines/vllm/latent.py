"""Tensors that vLLM's latent attention derives from the up-projection of keys and values (`kv_b_proj`).

Decoding multiplies queries and results by parts of this projection, `W_UK_T` and `W_UV`. Without quantisation both are
views of the projection's weight. With quantisation both are copies: unless copied again after an update, prefill
computes with the new weights and decoding with the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, split_kv_b_proj


def latent_attentions(model: Module) -> dict[str, MLAAttention]:
    """Returns the model's layers of latent attention by name; {} without any.

    Raises:
        NotImplementedError: vLLM has packed the projection of a layer for AMX, and dropped the weight; names the layer
            and the option to set.
    """
    layers = {prefix: module for prefix, module in model.named_modules() if isinstance(module, MLAAttention)}
    for prefix, module in layers.items():
        if module.is_amx_bmm_enabled:
            raise NotImplementedError(
                f"weights of {prefix}, packed for AMX, cannot be synchronised; allowed is "
                "rollout.options.attention_config={backend: CPU_MLA}"
            )
    return layers


@torch.no_grad()
def derive(layers: Mapping[str, MLAAttention], dtype: torch.dtype) -> None:
    """Computes the derived tensors (`W_UK_T`, `W_UV`) of all layers again, in place, at the addresses held by CUDA
    graphs.

    Args:
        layers: Result of `latent_attentions`, with the projections' new weights in place.
        dtype: Type of the model's parameters.
    """
    for module in layers.values():
        module.process_weights_after_loading(dtype)


@torch.no_grad()
def stale(layers: Mapping[str, MLAAttention], dtype: torch.dtype) -> list[str]:
    """Returns the names of derived tensors (`W_UK_T`, `W_UV`) not equal to the tensors computed from the present
    projections; [] if all are equal. Changes nothing.

    Args:
        layers: Result of `latent_attentions`.
        dtype: Type of the model's parameters.
    """
    return [
        f"{prefix}.{name}"
        for prefix, module in layers.items()
        for name, expected in _expected(module, dtype).items()
        if not torch.equal(getattr(module, name), expected)
    ]


def _expected(module: MLAAttention, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the derived tensors by name, computed from the projection: [heads, latent, value] and [heads, plain,
    latent]."""
    keys, values = split_kv_b_proj(
        module.kv_b_proj, dtype, module.kv_lora_rank, module.num_heads, module.qk_nope_head_dim, module.v_head_dim
    )
    return {"W_UV": values.transpose(0, 1), "W_UK_T": keys.permute(1, 2, 0)}
