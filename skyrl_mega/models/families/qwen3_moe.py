"""Qwen3-MoE (arXiv:2505.09388): Qwen3 attention, routed experts without shared experts, softmax routing."""

from __future__ import annotations

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.models.blocks.experts import Experts
from skyrl_mega.models.blocks.gated_mlp import GatedMlp
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.config_json import Hf, integer, with_defaults
from skyrl_mega.models.decoder import Decoder, Layer, read_decoder


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a Qwen3-MoE model from its config.json.

    Raises:
        UserError: A key is missing or has an unsupported value.
    """
    hf = with_defaults(
        hf, max_position_embeddings=32768, num_key_value_heads=4, decoder_sparse_step=1, norm_topk_prob=False
    )
    integer(hf, "num_key_value_heads")  # unlike related classes, Qwen3-MoE's refuses null
    moe = _moe_layers(hf)
    attention = GroupedQueryAttention.read(hf, qk_norm=True, qkv_bias=False)
    experts, dense = Experts.read(hf), GatedMlp.read(hf)
    kinds: dict[bool, Layer] = {True: (attention, experts), False: (attention, dense)}
    return read_decoder(hf, [kinds[has_experts] for has_experts in moe])


def _moe_layers(hf: Hf) -> list[bool]:
    """Returns True for each layer with experts."""
    layers, step = integer(hf, "num_hidden_layers"), integer(hf, "decoder_sparse_step")
    listed = hf.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise UserError(f"mlp_only_layers is {shown(listed)}; allowed is a list of layers", key="config.json")
    moe = [layer not in listed and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(moe):
        raise UserError(
            f"none of the {layers} layers has experts; give model_type qwen3 for a dense model", key="config.json"
        )
    return moe
