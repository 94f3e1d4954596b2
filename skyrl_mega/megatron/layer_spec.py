"""The modules of a decoder layer for `policy.spec`: Transformer Engine's, or megatron-core's local modules with two
replacements.

megatron-core's local spec lacks packed (THD) and context-parallel attention, and a norm for sequence parallelism.
`PackedAttention` and `RMSNorm` fill those gaps on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from skyrl_mega.megatron.gated_delta import PackedDeltaNet
from skyrl_mega.megatron.norms import AllHeadsRMSNorm, RMSNorm
from skyrl_mega.megatron.packed_attention import PackedAttention
from skyrl_mega.models.blocks.base import LayerModules
from skyrl_mega.models.megatron import Spec


def decoder_spec(
    config: TransformerConfig,
    modules: Sequence[LayerModules],
    spec: Spec,
    vp_stage: int | None,
    *,
    shared_prefixes: bool = False,
) -> TransformerBlockSubmodules:
    """Returns megatron-core's specification of the layers on this rank's pipeline stage (and virtual stage), with a
    copy for each layer.

    Args:
        config: Megatron's configuration.
        modules: The modules of each of these layers (`models.megatron.layer_modules`).
        spec: Kind of the layers: "te" for Transformer Engine's, "local" for megatron-core's own.
        vp_stage: Index of the virtual stage; None without virtual stages.
        shared_prefixes: True if rows have shared prefixes (`policy.share_prefixes`), which Transformer Engine's
            attention cannot read.

    Raises:
        ValueError: `modules` has another length than the stage has layers.
    """
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=spec == "te", normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_specs = [deepcopy(layer) for layer in block.layer_specs]  # equal layers share an object
    for layer, wanted in zip(block.layer_specs, modules, strict=True):
        sub: Any = layer.submodules
        attention = sub.self_attention.submodules
        if spec == "local":
            sub.input_layernorm = sub.pre_mlp_layernorm = RMSNorm
            if config.add_bias_linear and config.num_moe_experts:
                use_biased_experts(sub.mlp)
            attention.core_attention = PackedAttention
            if isinstance(attention, MLASelfAttentionSubmodules):
                _use_local_modules(attention)
            elif attention.q_layernorm is not IdentityOp:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
        if wanted.sinks or wanted.window or shared_prefixes:
            # Transformer Engine's own has no sinks with a ring of context ranks, and with an all-to-all every context
            # rank gets the sinks' whole gradient, which megatron-core sums over these ranks.
            kind = {"sinks": wanted.sinks, "window": wanted.window}
            attention.core_attention = ModuleSpec(PackedAttention, params=kind)
        if wanted.query_key_norm == "all_heads":
            heads, kv_heads = config.num_attention_heads, config.num_query_groups
            attention.q_layernorm = ModuleSpec(AllHeadsRMSNorm, params={"heads": heads})
            attention.k_layernorm = ModuleSpec(AllHeadsRMSNorm, params={"heads": kv_heads})
        if wanted.delta_net:
            sub.self_attention = ModuleSpec(PackedDeltaNet, {"sizes": wanted.delta_net}, attention)
    if spec == "local":
        block.layer_norm = RMSNorm
    return block


def _use_local_modules(attention: MLASelfAttentionSubmodules) -> None:
    """Gives latent attention norms and down-projections that are right under sequence parallelism.

    megatron-core's local down-projections are cut over the tensor group. The shared key's gradients from the other
    ranks' heads are then lost: log-probs stay right, and gradients below an attention layer are wrong by tens of per
    cent. Its linear layer with the whole weight on every rank is cut like Transformer Engine's.
    """
    if not isinstance(multi_latent_attention.TELinear, type):
        # Without Transformer Engine the class is a stand-in, and the constructor fails in a comparison with it.
        multi_latent_attention.HAVE_TE = False
    attention.linear_q_down_proj = attention.linear_kv_down_proj = multi_latent_attention.Linear
    attention.q_layernorm = attention.kv_layernorm = RMSNorm


def use_biased_experts(mlp: Any) -> None:
    """Replaces the second linear layer of every expert by `ExpertRowParallelLinear`.

    Args:
        mlp: The `ModuleSpec` of a local layer's feed-forward part with experts, changed in place.
    """
    mlp.submodules.experts.submodules.linear_fc2 = ExpertRowParallelLinear


class ExpertRowParallelLinear(RowParallelLinear):
    """A row-parallel linear layer whose result may be changed in place.

    megatron-core adds an expert's bias in place. Without expert and tensor parallelism the result is a view of the
    input of its own (empty) sum over ranks, and autograd refuses the backward pass.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the product, in memory of its own, and the layer's bias (None without a bias)."""
        output, bias = super().forward(input_)
        return output.clone(), bias
