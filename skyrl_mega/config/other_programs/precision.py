"""megatron-core's FP8 fields, by whatever name the other programs pass them on."""

from __future__ import annotations

from skyrl_mega.config.other_programs.entry import ALWAYS, Table, none, to

_KEPT = to("policy.precision.parameters", note="fp8 or model; true is fp8, with fp8_blockwise (docs/precision.md)")
_RECIPE = to(
    "policy.precision.recipe",
    values={
        "blockwise": to("policy.precision.recipe=fp8_blockwise"),
        "tensorwise": to("policy.precision.recipe=fp8_current"),
        "delayed": to("policy.precision.recipe=fp8_delayed"),
        "mxfp8": to("policy.precision.recipe=mxfp8"),
    },
)
_FORMAT = to("policy.precision.recipe", note="a recipe says its formats: E5M2 for gradients scaled by the tensor alone")

FIELDS: Table = {
    "fp8": _FORMAT,
    "fp8_recipe": _RECIPE,
    "fp8_amax_history_len": to("policy.precision.history"),
    "fp8_amax_compute_algo": none("the largest of policy.precision.history passes, which is max"),
    "fp8_param": _KEPT,
    "fp8_param_gather": _KEPT,
    "first_last_layers_bf16": to("policy.precision.first_layers", "policy.precision.last_layers"),
    "num_layers_at_start_in_bf16": to("policy.precision.first_layers"),
    "num_layers_at_end_in_bf16": to("policy.precision.last_layers"),
    "moe_router_padding_for_fp8": ALWAYS,
    "moe_router_padding_for_quantization": ALWAYS,
}
"""Of its TransformerConfig."""
FLAGS: Table = {
    "--fp8-format": _FORMAT,
    **{
        "--" + name.replace("_", "-"): entry
        for name, entry in FIELDS.items()
        if name not in ("fp8", "fp8_param", "fp8_param_gather")
    },
    "--fp8-param-gather": _KEPT,
}
"""Of its command line."""
