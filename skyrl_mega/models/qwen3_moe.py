"""Qwen3-MoE (arXiv:2505.09388): Qwen3 attention, experts without shared ones, softmax routing."""

from __future__ import annotations

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.values import shown
from skyrl_mega.models.decoder import Decoder, Experts, Hf, integer, read_decoder

EXPERT_COUNT = ("num_experts", "num_local_experts")
"""transformers 4 writes the first name, transformers 5 the second."""


def describe(hf: Hf) -> Decoder:
    """The model that `hf` asks for."""
    layers, step = integer(hf, "num_hidden_layers"), integer(hf, "decoder_sparse_step", 1)
    listed = hf.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise UserError(f"config.json: mlp_only_layers is {shown(listed)}; allowed is a list of layers")
    dense = set(listed)
    moe = frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if not moe:
        raise UserError(
            f"config.json: none of the {layers} layers has experts; give model_type qwen3 for a dense model"
        )
    count = integer(hf, next((key for key in EXPERT_COUNT if key in hf), EXPERT_COUNT[0]))
    per_token = integer(hf, "num_experts_per_tok")
    if per_token > count:
        raise UserError(f"config.json: num_experts_per_tok {per_token} is above the {count} experts; lower it")
    experts = Experts(
        count=count,
        per_token=per_token,
        width=integer(hf, "moe_intermediate_size"),
        renormalize=bool(hf.get("norm_topk_prob", False)),
        layers=moe,
    )
    return read_decoder(hf, qk_norm=True, qkv_bias=False, experts=experts)
