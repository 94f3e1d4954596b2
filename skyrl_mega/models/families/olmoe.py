"""OLMoE (arXiv:2409.02060): RMSNorm over all query and all key heads together, experts in every layer."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.blocks.experts import Experts
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.blocks.routing import ExpertRouter
from skyrl_mega.models.config_json import Hf, integer, require, unsupported, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

EPS = 1e-5
"""The norms' epsilon, fixed in vLLM."""

CLASS = "OlmoeForCausalLM"
"""The transformers class, by which vLLM selects the model."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of an OLMoE model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(hf, max_position_embeddings=4096, norm_topk_prob=False, rms_norm_eps=EPS)
    if hf["rms_norm_eps"] != EPS:
        raise unsupported(hf, "rms_norm_eps", f"{EPS}, which vLLM always uses for this model_type")
    require(hf, "clip_qkv", None)
    require(hf, "head_dim", integer(hf, "hidden_size") // integer(hf, "num_attention_heads"))  # vLLM derives it
    require(hf, "norm_topk_prob", False)  # vLLM never renormalises
    attention = GroupedQueryAttention.read(hf, qk_norm="all_heads", qkv_bias=False)
    experts = Experts.read(hf, ExpertRouter.softmax(hf), width="intermediate_size")
    return read_decoder(hf, [(attention, experts)] * integer(hf, "num_hidden_layers"), engine_ties=False)


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `moe_intermediate_size` is missing; other
    keys are not checked."""
    own = {"intermediate_size": hf["moe_intermediate_size"], "norm_topk_prob": False, "rms_norm_eps": EPS}
    return {key: value for key, value in hf.items() if key != "moe_intermediate_size"} | own
