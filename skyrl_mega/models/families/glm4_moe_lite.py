"""GLM-4.7-Flash: DeepSeek-V3's latent attention and sigmoid routing, with names as in GLM-4.5."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.blocks.routing import dense_first_layers
from skyrl_mega.models.config_json import Hf, unsupported, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder
from skyrl_mega.models.families.deepseek_v3 import latent_layers, small_latent

CLASS = "Glm4MoeLiteForCausalLM"
"""The transformers class, by which vLLM selects the model."""
PARTS = {False: "dense", True: "sparse"}
"""Entries of `mlp_layer_types`, by whether a layer has experts."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a GLM-4.7-Flash model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(
        hf,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        q_lora_rank=768,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
    )
    moe = dense_first_layers(hf)  # vLLM has no default for first_k_dense_replace
    listed = hf.get("mlp_layer_types")  # transformers reads the list, vLLM the number
    if listed is not None and listed != [PARTS[has_experts] for has_experts in moe]:
        raise unsupported(hf, "mlp_layer_types", "dense for the first first_k_dense_replace layers, then sparse")
    return read_decoder(hf, latent_layers(hf, moe, engine_float32_router=True), engine_ties=False)


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `num_attention_heads`, `hidden_size`,
    `head_dim`, `num_experts` or `num_hidden_layers` is missing; other keys are not checked."""
    return small_latent(hf)
