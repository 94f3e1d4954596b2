"""GLM-4.5 to 4.7 and GLM-4.5-Air (arXiv:2508.06471): partial rotary positions, dense first layers, sigmoid routing
with a correction bias, a shared expert."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.blocks.experts import Experts, SharedExpert
from skyrl_mega.models.blocks.gated_mlp import GatedMlp
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.blocks.routing import ExpertRouter, dense_first_layers
from skyrl_mega.models.config_json import Hf, flag, integer, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

COUNT = ("n_routed_experts", "num_local_experts")

CLASS = "Glm4MoeForCausalLM"
"""The transformers class, by which vLLM selects the model."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a GLM-4.5 model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(
        hf,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        attention_bias=False,
        use_qk_norm=False,
        norm_topk_prob=True,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
    )
    integer(hf, "head_dim")  # vLLM reads it
    integer(hf, "num_key_value_heads")  # null is refused by the transformers class
    attention = GroupedQueryAttention.read(
        hf,
        qk_norm="head" if flag(hf, "use_qk_norm") else "none",
        qkv_bias=flag(hf, "attention_bias"),
        bias_key=None,
        part=0.5,
    )
    shared = SharedExpert(integer(hf, "moe_intermediate_size") * integer(hf, "n_shared_experts"))
    router = ExpertRouter.sigmoid(hf, integer(hf, "num_experts_per_tok"))
    experts = Experts.read(hf, router, shared, engine_float32_router=True, count=COUNT)
    dense = GatedMlp.read(hf)
    return read_decoder(
        hf,
        [(attention, experts if has_experts else dense) for has_experts in dense_first_layers(hf)],
        engine_ties=False,
    )


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `num_experts` is missing; other keys are not
    checked."""
    own = {
        "n_routed_experts": hf["num_experts"],
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 0,
    }
    return {key: value for key, value in hf.items() if key != "num_experts"} | own
