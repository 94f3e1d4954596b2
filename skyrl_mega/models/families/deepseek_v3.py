"""DeepSeek-V3 and R1 (arXiv:2412.19437), and Moonlight (arXiv:2502.16982): latent attention, dense first layers,
sigmoid routing with a correction bias and groups, shared experts."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.blocks.experts import Experts, SharedExpert
from skyrl_mega.models.blocks.gated_mlp import GatedMlp
from skyrl_mega.models.blocks.mla import CPU_WIDTHS, LatentAttention
from skyrl_mega.models.blocks.routing import ExpertRouter, dense_first_layers
from skyrl_mega.models.config_json import Hf, integer, require_given, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

CLASS = "DeepseekV3ForCausalLM"
"""The transformers class, by which vLLM selects the model."""
COUNT = ("n_routed_experts", "num_local_experts")
ENGINE_KEYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Keys of the router that transformers leaves out when it saves a configuration. vLLM then routes differently."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a DeepSeek-V3 model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    for key, needed in ENGINE_KEYS.items():
        require_given(hf, key, needed)
    hf = with_defaults(
        hf,
        max_position_embeddings=4096,
        q_lora_rank=1536,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
    )
    layers = dense_first_layers(hf)
    return read_decoder(hf, latent_layers(hf, layers, engine_whole=True), engine_ties=False)


def latent_layers(
    hf: Hf, moe: list[bool], *, engine_float32_router: bool = False, engine_whole: bool = False
) -> list[tuple[LatentAttention, Experts | GatedMlp]]:
    """Returns the blocks of each layer in order: latent attention, then experts where `moe` is True, else a dense part.

    Args:
        hf: Content of config.json.
        moe: True for each layer with experts.
        engine_float32_router: True if vLLM keeps the router's weight in float32.
        engine_whole: Value of `SharedExpert.engine_whole`.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    attention, dense = LatentAttention.read(hf), GatedMlp.read(hf)
    width = integer(hf, "moe_intermediate_size") * integer(hf, "n_shared_experts")
    shared = SharedExpert(width, engine_whole=engine_whole)
    router = ExpertRouter.sigmoid(hf, integer(hf, "num_experts_per_tok"))
    experts = Experts.read(hf, router, shared, engine_float32_router=engine_float32_router, count=COUNT)
    return [(attention, experts if has_experts else dense) for has_experts in moe]


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `num_attention_heads`, `hidden_size`,
    `head_dim`, `num_experts` or `num_hidden_layers` is missing; other keys are not checked."""
    return small_latent(hf) | ENGINE_KEYS


def small_latent(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of `hf` with the keys of latent attention and of a sigmoid router instead of Qwen3-MoE's, with
    widths supported by vLLM on a CPU. Raises KeyError if `num_attention_heads`, `hidden_size`, `head_dim`,
    `num_experts` or `num_hidden_layers` is missing; other keys are not checked."""
    own = {
        "num_key_value_heads": hf["num_attention_heads"],
        "q_lora_rank": hf["hidden_size"],
        "kv_lora_rank": CPU_WIDTHS[0],
        "qk_rope_head_dim": CPU_WIDTHS[1],
        "qk_nope_head_dim": hf["head_dim"],
        "v_head_dim": hf["head_dim"],
        "n_routed_experts": hf["num_experts"],
        "n_shared_experts": 1,
        "first_k_dense_replace": int(hf["num_hidden_layers"] > 1),
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }
    return {key: value for key, value in hf.items() if key not in ("num_experts", "head_dim")} | own
