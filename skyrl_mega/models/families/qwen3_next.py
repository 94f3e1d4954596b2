"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts with a gated shared expert.

Files also contain layers for multi-token prediction (`mtp.*`), which are neither read nor trained.
"""

from __future__ import annotations

from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.models.blocks.experts import Experts, SharedExpert
from skyrl_mega.models.blocks.gated_mlp import GatedMlp
from skyrl_mega.models.blocks.gdn import GatedDeltaNet
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.blocks.routing import ExpertRouter, sparse_step_layers
from skyrl_mega.models.config_json import Hf, integer, require, with_defaults
from skyrl_mega.models.decoder import Decoder, read_decoder

CLASS = "Qwen3NextForCausalLM"
"""The transformers class, by which vLLM selects the model."""
DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Defaults of the transformers class, with those shared by Qwen3.5."""
SHARED = ("mlp.shared_expert", "mlp.shared_expert_gate.weight")
"""Names of the shared expert and of its gate."""
ROTATED = 0.25
"""Default of `partial_rotary_factor`."""
READ_BY_VLLM = (("attn_output_gate", True), ("layer_scale", False), ("qkv_bias", False), ("is_causal", True))
"""Keys that vLLM's classes of Qwen3-Next and Qwen3.5 read and transformers' do not, with their defaults."""
LINEAR, FULL = "linear_attention", "full_attention"
"""Entries of `layer_types`."""


def describe(hf: Hf) -> Decoder:
    """Returns the layers and sizes of a Qwen3-Next model from its config.json.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    hf = with_defaults(hf, **DEFAULTS, decoder_sparse_step=1, norm_topk_prob=True)
    require_vllm_defaults(hf)
    moe = sparse_step_layers(hf)
    shared = SharedExpert(integer(hf, "shared_expert_intermediate_size"), *SHARED, engine_whole=True)
    experts = Experts.read(hf, ExpertRouter.softmax(hf), shared, count=("num_experts",))
    dense = experts if all(moe) else GatedMlp.read(hf)
    mixers = {LINEAR: GatedDeltaNet.read(hf, separate=False), FULL: gated_attention(hf)}
    kinds = {(kind, routed): (mixer, experts if routed else dense) for kind, mixer in mixers.items() for routed in moe}
    layers = [kinds[layer] for layer in zip(layer_types(hf), moe, strict=True)]
    return read_decoder(hf, layers, engine_ties=False, zero_centered_norms=True)


def require_vllm_defaults(hf: Hf) -> None:
    """Raises an error for keys with which vLLM would compute another model than transformers.

    Raises:
        UserError: A key has another value than vLLM's default.
    """
    for key, value in READ_BY_VLLM:
        require(hf, key, value)
    if hf.get("output_gate_type") != "swish":  # another name of silu
        require(hf, "output_gate_type", "silu")


def gated_attention(hf: Hf) -> GroupedQueryAttention:
    """Returns the attention of Qwen3-Next and Qwen3.5, with a gate on the result and partly rotated heads.

    Raises:
        UserError: A key is missing, or a value is not supported.
    """
    for key in ("num_key_value_heads", "head_dim"):
        integer(hf, key)  # null is refused by the transformers class
    return GroupedQueryAttention.read(hf, qk_norm="head", qkv_bias=False, part=ROTATED, output_gate=True)


def layer_types(hf: Hf) -> list[str]:
    """Returns `LINEAR` or `FULL` for each layer: `layer_types`, or by default full attention in every
    `full_attention_interval`-th layer (absent: 4).

    Raises:
        UserError: `num_hidden_layers` is missing, a value is not supported, or all layers have the same type.
    """
    layers = integer(hf, "num_hidden_layers")
    interval = integer({"full_attention_interval": 4, **hf}, "full_attention_interval")
    types = hf.get("layer_types") or [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or {*map(str, types)} != {LINEAR, FULL}:
        raise UserError(
            f"layer_types is {shown(types)}; skyrl_mega supports a list of {layers} entries with both {LINEAR} and "
            f"{FULL}",
            key="config.json",
        )
    return types


def small(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a small model of this family, from a config.json with the common keys and Qwen3-MoE's
    keys for the sizes of experts. `hf` stays unchanged. Raises KeyError if `num_hidden_layers`, `num_key_value_heads`
    or `moe_intermediate_size` is missing; other keys are not checked.

    The last layer has full attention. A head of the delta net has the width that kernels need.
    """
    layers = hf["num_hidden_layers"]
    own = {
        "layer_types": [LINEAR] * (layers - 1) + [FULL],
        "linear_num_key_heads": hf["num_key_value_heads"],
        "linear_num_value_heads": 2 * hf["num_key_value_heads"],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": hf["moe_intermediate_size"],
        "partial_rotary_factor": ROTATED,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return hf | own
