"""Checks of the weight format on the way to engines: formats not supported by the weight sync."""

from __future__ import annotations

from typing import Any

from skyrl_mega.config.derived import ONLINE_FP8, fp8_parameters
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.config.values import shown

CHECKPOINT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""Required entries of a `quantization_config` for parameters sent with an FP8 wire (`kernels.block_fp8.BLOCK`)."""
ONLINE_SETTING = f"rollout.options.quantization={ONLINE_FP8}"


def check_wire(c: Config) -> None:
    """Checks that the weight sync supports the engines' parameters.

    Raises:
        UserError: The engines quantise weights in another way than the weight sync.
    """
    options = c.rollout.options
    kind = options.get("quantization")
    if options.get("quantization_config"):
        raise UserError(
            "vLLM would quantise layers otherwise than a weight sync brings them",
            key="rollout.options.quantization_config",
            fix=f"leave it out, and give {ONLINE_SETTING} for engines that quantise what arrives (docs/weight-sync.md)",
        )
    if fp8_parameters(c.rollout):
        _check_checkpoint(c, kind, options["hf_overrides"]["quantization_config"])
    elif kind not in (None, ONLINE_FP8):
        raise UserError(
            "a weight sync brings blocks with a scale each, and no other quantised weights; "
            f"allowed is {ONLINE_FP8} (docs/weight-sync.md), or leave it out",
            key="rollout.options.quantization",
            value=shown(kind),
        )


def _check_checkpoint(c: Config, kind: Any, quantization: Any) -> None:
    """Checks engines with the parameters of a quantized checkpoint; `kind`: `rollout.options.quantization`."""
    key = "rollout.options.hf_overrides.quantization_config"
    if not isinstance(quantization, dict) or any(quantization.get(name) != value for name, value in CHECKPOINT.items()):
        raise UserError(
            "a weight sync brings FP8 numbers with a scale for each block of 128 × 128, and no other quantised weights",
            key=key,
            value=shown(quantization),
            fix=f"give it {shown(CHECKPOINT)[1:-1]}, or leave it out and give {ONLINE_SETTING}",
        )
    if kind not in (None, CHECKPOINT["quant_method"]):
        raise UserError(
            f"{key} says fp8, and vLLM ends where they differ",
            key="rollout.options.quantization",
            value=shown(kind),
            fix="leave one of them out",
        )
    if c.weights.wire != "fp8":
        raise UserError(
            f"allowed is fp8 where {key} makes engines that take FP8 numbers and scales; or let "
            f"them quantise what arrives, with {ONLINE_SETTING}",
            key="weights.wire",
            value=c.weights.wire,
        )
