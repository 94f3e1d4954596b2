"""Qwen3.5's text model: gated delta nets, gated attention in every fourth layer, experts with a gated shared expert.

The layers are Qwen3-Next's, but the projections of a delta net are separate tensors. `qwen3_5_moe` has the layers in
files with a vision tower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyrl_mega.models.blocks.experts import Experts, SharedExpert
from skyrl_mega.models.blocks.gdn import GatedDeltaNet
from skyrl_mega.models.blocks.routing import ExpertRouter
from skyrl_mega.models.config_json import Hf, integer, unsupported, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder
from skyrl_mega.models.families import qwen3_next
from skyrl_mega.models.families.qwen3_next import (
    DEFAULTS,
    FULL,
    LINEAR,
    SHARED,
    gated_attention,
    layer_types,
    require_vllm_defaults,
)

CLASS = "Qwen3_5MoeForCausalLM"
"""The transformers class, by which vLLM selects the model."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a Qwen3.5 text model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    return of_experts(hf, Experts.read)


def of_experts(hf: Hf, read: Callable[..., Experts]) -> Decoder:
    """Returns the layers and sizes of a Qwen3.5 text model.

    Args:
        hf: Content of config.json.
        read: `Experts.read`, or that of a block with the same parameters: experts with other tensors on disk.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(hf, **DEFAULTS)
    require_vllm_defaults(hf)
    if hf.get("norm_topk_prob", True) is not True:  # null means False to vLLM, and nothing to transformers
        raise unsupported(hf, "norm_topk_prob", "True")
    shared = SharedExpert(integer(hf, "shared_expert_intermediate_size"), *SHARED, engine_whole=True)
    experts = read(hf, ExpertRouter("softmax", renormalize=True), shared, count=("num_experts",))
    mixers = {LINEAR: GatedDeltaNet.read(hf, separate=True), FULL: gated_attention(hf)}
    layers = [(mixers[layer], experts) for layer in layer_types(hf)]
    return read_decoder(hf, layers, zero_centered_norms=True)


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `num_hidden_layers`, `num_key_value_heads`
    or `moe_intermediate_size` is missing; other keys are not checked."""
    return qwen3_next.small(hf)
