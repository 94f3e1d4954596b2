"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): bias on q, k and v, and a gated shared expert."""

from __future__ import annotations

from typing import Any

from skyrl_mega.models.blocks.experts import Experts, SharedExpert
from skyrl_mega.models.blocks.gated_mlp import GatedMlp
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.blocks.routing import ExpertRouter, sparse_step_layers
from skyrl_mega.models.config_json import Hf, flag, integer, require, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

CLASS = "Qwen2MoeForCausalLM"
"""The transformers class, by which vLLM selects the model."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a Qwen2-MoE model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(
        hf,
        max_position_embeddings=32768,
        num_key_value_heads=16,
        decoder_sparse_step=1,
        norm_topk_prob=False,
        qkv_bias=True,
    )
    require(hf, "head_dim", integer(hf, "hidden_size") // integer(hf, "num_attention_heads"))  # vLLM derives it
    moe = sparse_step_layers(hf)
    integer(hf, "num_key_value_heads")  # null is refused by the transformers class
    attention = GroupedQueryAttention.read(hf, qk_norm="none", qkv_bias=flag(hf, "qkv_bias"))
    shared = SharedExpert(
        integer(hf, "shared_expert_intermediate_size"), "mlp.shared_expert", "mlp.shared_expert_gate.weight"
    )
    experts, dense = Experts.read(hf, ExpertRouter.softmax(hf), shared, count=("num_experts",)), GatedMlp.read(hf)
    return read_decoder(hf, [(attention, experts if has_experts else dense) for has_experts in moe])


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `intermediate_size` is missing; other keys
    are not checked."""
    shared = {"shared_expert_intermediate_size": hf["intermediate_size"], "norm_topk_prob": False}
    hf = {key: value for key, value in hf.items() if key != "attention_bias"}
    return hf | shared | {"decoder_sparse_step": 1, "mlp_only_layers": []}
