"""Notes about valid but notable FP8 settings."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_mega.config.derived import fp8_weights
from skyrl_mega.config.schema import Config

BLACKWELL_GIB = 150.0
"""Memory limit to distinguish GPUs of compute capability 10.x (B200: 178 GiB) from earlier GPUs (H200: 139 GiB)."""


def fp8_notes(config: Config) -> Iterator[str]:
    """Yields notes for a run on GPUs."""
    recipe, wire, size = config.policy.precision.recipe, config.weights.wire, config.cluster.gpu_memory_gib
    trains, serves = recipe != "model", fp8_weights(config.rollout)
    if size is not None and recipe == "mxfp8" and size < BLACKWELL_GIB:
        yield (
            "policy.precision.recipe=mxfp8 is multiplied by Blackwell (B200) alone, and "
            f"cluster.gpu_memory_gib={size:g} is the memory of another GPU: a run ends as it starts there; Hopper "
            "multiplies fp8_blockwise"
        )
    if size is not None and recipe == "fp8_blockwise" and size >= BLACKWELL_GIB:
        yield (
            f"policy.precision.recipe=fp8_blockwise is multiplied by Hopper (H100, H200) alone, and "
            f"cluster.gpu_memory_gib={size:g} is the memory of a later GPU: a run ends as it starts there; Blackwell "
            "multiplies mxfp8"
        )
    serving = "rollout.options.quantization=fp8_per_block has them serve FP8 (docs/precision.md)"
    if trains and not serves:
        yield (
            f"policy.precision.recipe={recipe}: engines compute in {config.model.dtype}, and round otherwise than the "
            f"policy (mismatch/*); {serving}"
        )
    if wire == "fp8" and not serves:
        yield (
            f"weights.wire=fp8: engines compute in {config.model.dtype}, and hold what FP8 has left of the policy's "
            f"weights; {serving}, or give weights.wire=auto"
        )
    if trains or serves:
        yield (
            "FP8 counts in the memory, in the sync and in what rows are padded with; the seconds of its products are "
            "those of bfloat16, so it looks slower than it is"
        )
