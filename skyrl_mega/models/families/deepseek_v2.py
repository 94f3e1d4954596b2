"""DeepSeek-V2-Lite (arXiv:2405.04434): latent attention, dense first layers, softmax routing, shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from skyrl_mega.models.blocks.experts import Experts, SharedExpert
from skyrl_mega.models.blocks.gated_mlp import GatedMlp
from skyrl_mega.models.blocks.mla import LatentAttention
from skyrl_mega.models.blocks.routing import ExpertRouter, dense_first_layers
from skyrl_mega.models.config_json import Hf, integer, require, unsupported, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder
from skyrl_mega.models.families.deepseek_v3 import COUNT, small_latent

CLASS = "DeepseekV2ForCausalLM"
"""The transformers class, by which vLLM selects the model."""
ROUTER = {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0}
"""The router of DeepSeek-V2-Lite."""
GROUPED = "group_limited_greedy"
"""`topk_method` of DeepSeek-V2 and V2.5."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a DeepSeek-V2-Lite model from its config.json.

    Raises:
        UserError: A key is missing or has an unsupported value.
    """
    hf = with_defaults(
        hf, max_position_embeddings=2048, q_lora_rank=1536, n_shared_experts=2, norm_topk_prob=False,
        first_k_dense_replace=0,
    )  # fmt: skip
    if hf.get("topk_method") == GROUPED:
        reason = "'greedy'; DeepSeek-V2 ranks a group by its best expert, and megatron-core by the sum of several"
        raise unsupported(hf, "topk_method", reason)
    for key, allowed in ROUTER.items():
        require(hf, key, allowed)
    for key in ("n_group", "topk_group"):
        if hf.get(key) != 1:
            raise unsupported(hf, key, "1, which the config.json of DeepSeek-V2-Lite contains")
    attention, dense = LatentAttention.read(hf), GatedMlp.read(hf)
    width = integer(hf, "moe_intermediate_size") * integer(hf, "n_shared_experts")
    shared = SharedExpert(width, engine_whole=True)
    experts = Experts.read(hf, ExpertRouter.softmax(hf), shared, count=COUNT)
    experts = replace(experts, engine_reads_router_dtype=True)
    layers = [(attention, experts if has_experts else dense) for has_experts in dense_first_layers(hf)]
    return read_decoder(hf, layers, engine_ties=False)


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `num_attention_heads`, `hidden_size`,
    `head_dim`, `num_experts` or `num_hidden_layers` is missing; other keys are not checked."""
    return small_latent(hf) | ROUTER
