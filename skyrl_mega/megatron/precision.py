"""Translation of `policy.precision` to megatron-core's settings, for Transformer Engine's layers."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from skyrl_mega.config.schema import PrecisionConfig

RECIPES = MappingProxyType(
    {
        "fp8_blockwise": ("e4m3", "blockwise"),
        "fp8_current": ("hybrid", "tensorwise"),
        "mxfp8": ("e4m3", "mxfp8"),
    }
)
"""Recipe → `fp8` and `fp8_recipe` of TransformerConfig; "hybrid" keeps gradients in E5M2."""


def transformer_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """Returns the FP8 arguments of megatron-core's TransformerConfig; {} if all layers compute in `model.dtype`.

    Router, head, embedding and norms never compute in FP8.

    FP8 needs a padded number of tokens per expert. megatron-core adds the padding inside the grouped linear layers, as
    tokens with routing probability 0. `moe_router_padding_for_quantization` stays off: it would send the padding
    through the router and change the token counts.
    """
    if precision.recipe == "model":
        return {}
    numbers, recipe = RECIPES[precision.recipe]
    return dict(
        fp8=numbers,
        fp8_recipe=recipe,
        fp8_param=precision.parameters == "fp8",
        first_last_layers_bf16=bool(precision.first_layers or precision.last_layers),
        num_layers_at_start_in_bf16=precision.first_layers,
        num_layers_at_end_in_bf16=precision.last_layers,
    )


def drop_fp8_copies(chunks: Sequence[Any]) -> None:
    """Frees the FP8 copies of weights kept by Transformer Engine for a pass's later micro-batches. Does nothing for
    layers without copies. `chunks` are the rank's model chunks.

    The first micro-batch of the next pass creates new copies. Without this call up to 2 bytes per weight would outlive
    the pass.
    """
    for chunk in chunks:
        for module in chunk.modules():
            copies = getattr(module, "_fp8_workspaces", None)
            if copies:
                copies.clear()
