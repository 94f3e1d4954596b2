"""The modules of a decoder layer: Transformer Engine's where it is installed, else megatron-core's local ones with
two of ours.

megatron-core's local spec has no packed (THD) or context-parallel attention and no norm for sequence parallelism;
`PackedAttention` and `RMSNorm` fill those two places, on any device.

Legend: T tokens of the packed row, L = T / cp local tokens, N sequences, S longest sequence, H heads, G key/value
heads, D head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from skyrl_mega.models.megatron import Spec
from skyrl_mega.policy.packing import PackedRow


def decoder_spec(config: TransformerConfig, spec: Spec, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage (and virtual stage)."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=spec == "te", normalization="RMSNorm", vp_stage=vp_stage
    )
    if spec == "local":
        for layer in block.layer_specs:
            sub: Any = layer.submodules
            sub.input_layernorm = sub.pre_mlp_layernorm = RMSNorm
            attention = sub.self_attention.submodules
            attention.core_attention = PackedAttention
            if attention.q_layernorm is not IdentityOp:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
        block.layer_norm = RMSNorm
    return block


class RMSNorm(torch.nn.Module):
    """RMSNorm (arXiv:1910.07467) whose weight megatron-core sums over the tensor group under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed row, with keys and values gathered over the context group.

    Sequences are laid out as rows of a padded [N, S] grid so that one fused call serves all of them.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, pg_collection: Any = None, **__: Any):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.context = pg_collection.cp
        self.scale = 1.0 / math.sqrt(config.kv_channels or 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> Tensor:
        """query [L, H, D], key and value [L, G, D] → [L, H·D]."""
        row = packed_seq_params
        if row is None or row.sequence_L is None or row.position_L is None:
            raise ValueError("PackedAttention needs the packed row's description (policy.packing.pack)")
        longest = row.max_seqlen_q
        grouped = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(grouped, dim=1) if grouped > 1 else t for t in (key, value))
        if row.global_L is None:
            slot = row.sequence_L * longest + row.position_L
            q, k, v = (_grid(t, slot, row.sequences, longest) for t in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return _ungrid(out, slot)

        size = self.context.size()
        key, value = (
            gather_from_sequence_parallel_region(t.contiguous(), group=self.context)[row.global_L] for t in (key, value)
        )
        lengths = (row.cu_seqlens_q[1:] - row.cu_seqlens_q[:-1]).long()
        where = torch.arange(len(key), device=key.device)
        sequence = torch.repeat_interleave(torch.arange(row.sequences, device=key.device), lengths)
        position = where - row.cu_seqlens_q[:-1].long()[sequence]
        k, v = (_grid(t, sequence * longest + position, row.sequences, longest) for t in (key, value))

        # A sequence's local tokens, in order, are its first and its last chunk; `nth` counts them.
        local = longest // size
        first = torch.cumsum(lengths // size, 0) - lengths // size
        nth = torch.arange(len(query), device=query.device) - first[row.sequence_L]
        slot = row.sequence_L * local + nth
        q = _grid(query, slot, row.sequences, local)
        at = torch.zeros(row.sequences * local, dtype=torch.long, device=query.device)
        at[slot] = row.position_L
        mask = torch.arange(longest, device=query.device) <= at.view(row.sequences, 1, local, 1)
        return _ungrid(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale), slot)


def _grid(x: Tensor, slot: Tensor, rows: int, width: int) -> Tensor:
    """[tokens, H, D] → [rows, H, width, D], zeros where there is no token."""
    grid = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, slot, x)
    return grid.view(rows, width, *x.shape[1:]).transpose(1, 2)


def _ungrid(x: Tensor, slot: Tensor) -> Tensor:
    """[rows, H, width, D] → [tokens, H·D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3])[slot]
