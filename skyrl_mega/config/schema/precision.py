"""What the policy's linear layers compute in."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.schema.fields import MOST, at_least, between, one_of


@dataclass
class PrecisionConfig:
    """What linear layers of attention, experts and feed-forward parts compute in. Router, head, embedding and norms
    compute in `model.dtype`, and so do attention and all sums ([precision.md](precision.md))."""

    recipe: str = one_of("model", "fp8_blockwise", "fp8_current", "fp8_delayed", "mxfp8")
    """Numbers, and what has a scale of its own. model: `model.dtype`. fp8_blockwise: E4M3, activations and gradients by
    1 × 128, weights by 128 × 128, as FP8 engines (Hopper). fp8_current: E4M3, gradients E5M2, a tensor by its present
    magnitude. fp8_delayed: the same, by its magnitude in passes before. mxfp8: E4M3 by 1 × 32 with powers of two
    (Blackwell). On a CPU the numbers are rounded so and multiplied in `model.dtype`."""
    first_layers: int = at_least(0, 0)
    """Layers at the model's start that compute in `model.dtype` all the same."""
    last_layers: int = at_least(0, 0)
    """Layers at its end that do."""
    history: int = between(1, MOST, 16)
    """Passes whose largest magnitude gives the scale (fp8_delayed)."""
    parameters: str = one_of("model", "fp8")
    """What these layers' weights are kept and gathered in, beside float32 master weights. fp8: as fp8_blockwise
    multiplies them, which weight sync takes as they are; half the bytes of a gather, and no copies in a pass (GPUs)."""
