"""megatron-core's configuration class for each kind of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


@dataclass
class YarnConfig(TransformerConfig):
    """A configuration with YaRN (arXiv:2309.00071) in grouped-query attention; `models.blocks.rope.Yarn` describes the
    values. megatron-core 0.16 reads them, but none of its classes declares them."""

    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float | None = None
    """None: queries and keys are multiplied by 0.1 · ln(factor) + 1."""
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True


def config_class(settings: Mapping[str, Any]) -> tuple[type[TransformerConfig], dict[str, Any]]:
    """Returns the class that accepts these arguments (`MegatronSettings.transformer`): `MLATransformerConfig`,
    `YarnConfig` or `TransformerConfig`; and further arguments without which megatron-core computes wrong results, {} if
    no further argument is needed. `settings` stays unchanged."""
    # The fused rotation of latent attention computes YaRN alone; that of packed rows leaves YaRN's factor out.
    unfused = {"apply_rope_fusion": False}
    if settings.get("multi_latent_attention"):
        return MLATransformerConfig, unfused
    if "yarn_rotary_scaling_factor" in settings:
        return YarnConfig, unfused
    return TransformerConfig, {}
