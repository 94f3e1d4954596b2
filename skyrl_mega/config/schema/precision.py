"""Settings of the policy's FP8 training."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.schema.fields import at_least, one_of


@dataclass
class PrecisionConfig:
    """Number format of the linear layers in attention, experts and feed-forward parts. Router, head, embedding and
    norms compute in `model.dtype`, as do attention itself and all sums ([precision.md](precision.md))."""

    recipe: str = one_of("model", "fp8_blockwise", "fp8_current", "mxfp8")
    """Number format and scaling. model: `model.dtype`. fp8_blockwise: E4M3 with a scale per 1 × 128 values of
    activations and gradients and per 128 × 128 weights, like FP8 engines (Hopper). fp8_current: E4M3 (gradients E5M2)
    with a scale per tensor from the current magnitude. mxfp8: E4M3 with a power-of-two scale per 1 × 32 values
    (Blackwell). On a CPU, values are rounded to these formats and multiplied in `model.dtype`."""
    first_layers: int = at_least(0, 0)
    """Number of layers at the start of the model that compute in `model.dtype`."""
    last_layers: int = at_least(0, 0)
    """Number of layers at the end of the model that compute in `model.dtype`."""
    parameters: str = one_of("model", "fp8")
    """Storage format of these layers' weights, in addition to float32 master weights. fp8: stored, gathered and sent in
    the weight sync in the format of fp8_blockwise; half the bytes per gather, and no conversion in a pass (GPUs)."""
