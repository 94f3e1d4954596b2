"""Gated delta nets (arXiv:2412.06464) over packed rows: no sequence sees the convolution or state of another.

megatron-core's own module refuses packed rows. On CUDA the kernels of flash-linear-attention take the row unchanged.
Otherwise the sequences become the rows of a padded grid [N, S]: padding follows a sequence, so no token reads padding.

Legend: T tokens of the packed row, N sequences, S longest sequence, C channels of the convolution, H value heads, D
width of queries and keys, E width of values, n chunks of a sequence, c tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from skyrl_mega.common.errors import UserError
from skyrl_mega.megatron.packing import PackedRow, grid
from skyrl_mega.models.blocks.base import DeltaNetSizes
from skyrl_mega.models.blocks.gdn import CHUNK

try:
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError:  # needed on CUDA only
    causal_conv1d = chunk_gated_delta_rule = None

KEY_EPS = 1e-6
"""Added to the squared length of queries and keys before division."""


class PackedDeltaNet(MegatronModule):
    """A gated delta net in place of a layer's attention. A tensor rank holds an equal part of the key heads, with their
    value heads.

    Args:
        config: Megatron's configuration.
        submodules: The attention's linear layers: `linear_qkv` becomes the input projection, `linear_proj` the output
            projection.
        sizes: Sizes of all ranks together.
        pg_collection: The process groups.

    Raises:
        UserError: The device is CUDA, and flash-linear-attention cannot be imported.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *,
        sizes: DeltaNetSizes,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        require_kernels()
        tensor = pg_collection.tp
        part = self.sizes = sizes.part(tensor.size())
        common = dict(config=config, bias=False, is_expert=False, tp_group=tensor)
        rows = sizes.convolved + sizes.values + 2 * sizes.value_heads
        self.conv_weight = _cut(part.convolved, 1, part.window, dtype=config.params_dtype)
        self.dt_bias = _cut(part.value_heads, dtype=config.params_dtype)
        self.A_log = _cut(part.value_heads, dtype=torch.float32)
        self.norm_weight = torch.nn.Parameter(torch.ones(part.value_width, dtype=config.params_dtype))
        self.norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.in_proj = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            rows,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.out_proj = build_module(
            submodules.linear_proj,
            sizes.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Returns [T, 1, hidden] for a packed row [T, 1, hidden], and no bias; with sequence parallelism a tensor
        rank's part of each. `attention_mask` is ignored. A collective of the tensor ranks.

        Raises:
            ValueError: `packed_seq_params` lacks the row's description (`packing.pack`), or the row is cut among
                context ranks.
        """
        row, part = packed_seq_params, self.sizes
        if row is None or row.sequence_L is None or row.position_L is None or row.global_L is not None:
            raise ValueError("a gated delta net needs the description of a whole packed row (megatron.packing.pack)")
        projected, _ = self.in_proj(hidden_states)
        widths = (part.convolved, part.values, part.value_heads, part.value_heads)
        mixed, gate, beta, step = projected[:, 0].split(widths, -1)
        decay = -self.A_log.float().exp() * F.softplus(step.float() + self.dt_bias.float())
        result = gated_delta(mixed, self.conv_weight, decay, beta.sigmoid(), row, part)
        normed = F.rms_norm(result.float(), (part.value_width,), None, self.config.layernorm_epsilon)
        gated = self.norm_weight * normed.to(result.dtype) * F.silu(gate.float()).view_as(result)
        output, _ = self.out_proj(gated.to(hidden_states.dtype).flatten(1)[:, None])
        return output, None


def require_kernels() -> None:
    """Raises UserError on a machine with CUDA if flash-linear-attention cannot be imported; does nothing otherwise."""
    if torch.cuda.is_available() and chunk_gated_delta_rule is None:
        raise UserError(
            "gated delta nets need the package fla-core (flash-linear-attention) on CUDA, which cannot be imported",
            key="model.path",
            fix="install it with `make cuda`",
        )


def _cut(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    """Returns a parameter of zeros, marked as held by no other rank of the tensor group, for the gradient norm."""
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=torch.cuda.current_device()))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


def gated_delta(
    mixed: Tensor, weight: Tensor, decay: Tensor, beta: Tensor, row: PackedRow, sizes: DeltaNetSizes
) -> Tensor:
    """Returns the results [T, H, E] of the value heads for every token of a packed row. Without the kernels, computes
    the rule in float32 and returns the dtype of `mixed`.

    Args:
        mixed: [T, C]: queries, keys and values before the convolution, in the dtype of `weight`.
        weight: [C, 1, window] of the convolution; its last column multiplies the token itself.
        decay: float32 [T, H]: logarithm of the factor of the state before each token.
        beta: [T, H]: fraction, from 0 to 1, by which a token replaces the value under its key.
        row: The whole packed row, not a context rank's part.
        sizes: Sizes of this rank's part.
    """
    heads, width = sizes.value_heads, sizes.value_width
    if _on_cuda(mixed):
        bounds = row.cu_seqlens_q
        convolved, _ = causal_conv1d(mixed[None].contiguous(), weight[:, 0], activation="silu", cu_seqlens=bounds)
        query, key, value = _heads(convolved, sizes)
        out, _ = chunk_gated_delta_rule(
            query,
            key,
            value,
            decay[None],
            beta[None],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
        )
        return out[0]
    assert row.sequence_L is not None and row.position_L is not None
    longest = row.max_seqlen_q
    slot = row.sequence_L * longest + row.position_L
    rows, decays, betas = (grid(x, slot, row.sequences, longest) for x in (mixed, decay, beta))
    padded = F.pad(rows.transpose(1, 2), (sizes.window - 1, 0))
    convolved = F.silu(F.conv1d(padded, weight, groups=len(weight))).transpose(1, 2)
    query, key, value = (x.float() for x in _heads(convolved, sizes))
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + KEY_EPS) for x in (query, key))
    query, key = (x.repeat_interleave(heads // sizes.key_heads, 2) for x in (query, key))
    out = chunked_rule(query, key, value, decays, betas.float())
    return out.reshape(-1, heads, width)[slot].to(mixed.dtype)


def _on_cuda(x: Tensor) -> bool:
    """Returns True for a tensor that the kernels of flash-linear-attention take."""
    return x.is_cuda


def _heads(convolved: Tensor, sizes: DeltaNetSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Splits [N, S, C] into queries and keys [N, S, key heads, D], and values [N, S, H, E]."""
    query, key, value = convolved.split((sizes.keys, sizes.keys, sizes.values), -1)
    shape = (sizes.key_heads, sizes.key_width)
    return (
        query.unflatten(-1, shape),
        key.unflatten(-1, shape),
        value.unflatten(-1, (sizes.value_heads, sizes.value_width)),
    )


def chunked_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Returns the results [N, S, H, E] of the gated delta rule, chunk by chunk, from states of zero.

    In a chunk, the value written by a token depends on the values written by the tokens before: a triangular system of
    equations, once for the values and once for what the state before the chunk holds.

    All arguments, and the result, have the same dtype. S is at least 1, and need not be a multiple of `CHUNK`. Padding
    may only follow a sequence; the results at padding are without meaning.

    Args:
        query: [N, S, H, D], of length 1; divided by the root of D here.
        key: [N, S, H, D], of length 1.
        value: [N, S, H, E].
        decay: [N, S, H]: logarithm of the factor of the state before each token.
        beta: [N, S, H]: fraction, from 0 to 1, by which a token replaces the value under its key.
    """
    length = query.shape[1]
    size = min(CHUNK, length)
    q, k, v, g, b = (_chunks(x, size) for x in (query * query.shape[-1] ** -0.5, key, value, decay, beta))
    total = g.cumsum(-1)  # [N, H, n, c]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    scaled = k * b[..., None]
    system = scaled @ k.mT * between
    read = torch.linalg.solve_triangular(
        system,
        torch.cat([v * b[..., None], scaled * total.exp()[..., None]], -1),
        upper=False,
        unitriangular=True,
    )
    written, before = read.split((v.shape[-1], k.shape[-1]), -1)
    attended = q @ k.mT * between
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    results = []
    for index in range(q.shape[2]):
        at = total[:, :, index]
        new = written[:, :, index] - before[:, :, index] @ state
        results.append(q[:, :, index] * at.exp()[..., None] @ state + attended[:, :, index] @ new)
        left = (at[..., -1:] - at).exp()[..., None]
        state = state * at[..., -1:, None].exp() + (k[:, :, index] * left).mT @ new
    return torch.cat(results, 2)[:, :, :length].transpose(1, 2)


def _chunks(x: Tensor, size: int) -> Tensor:
    """Returns [N, S, H, …] as [N, H, n, c, …], padded with zeros."""
    count = -(-x.shape[1] // size)
    padding = (0, 0) * (x.dim() - 2) + (0, count * size - x.shape[1])
    return F.pad(x, padding).transpose(1, 2).unflatten(2, (count, size))
