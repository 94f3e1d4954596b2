"""Causal attention over packed rows, for `policy.spec=local`, and for layers with sinks or a sliding window.

megatron-core's local spec lacks packed (THD) and context-parallel attention; `PackedAttention` has both on any device.

A sink (arXiv:2309.17453) is a learned logit per head without a value: it takes a share of every token's softmax.

Legend: T tokens of the packed row, L = T / cp local tokens, N sequences, S longest sequence, H heads, G key/value
heads, D width of queries and keys, E width of values (D, but for latent attention).
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from skyrl_mega.megatron.context_exchange import heads_of_whole_row, tokens_of_all_heads
from skyrl_mega.megatron.packing import PackedRow, grid, run_positions
from skyrl_mega.megatron.sink_kernel import KernelRows, SinkKernel

try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.10
    varlen_attn: Any = None
else:
    varlen_attn = varlen.varlen_attn


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed row. The constructor's arguments are those of megatron-core's
    attention, and `sinks` and `window`.

    Context ranks gather keys and values, or exchange tokens for heads of whole sequences (`cp_comm_type` "a2a"). On
    CUDA in half precision, torch's variable-length kernel takes the row unchanged. Otherwise the sequences become the
    rows of a padded [N, S] grid, for one fused call.

    `window` is the number of tokens, itself included, that a token attends to. With `sinks` every tensor rank holds the
    logits of its own heads, named as in Transformer Engine.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        sinks: bool = False,
        window: int | None = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.window = window
        self.softmax_offset: torch.nn.Parameter | None = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            # Without the mark the gradient norm counts the first tensor rank's heads alone.
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.layer_number = layer_number
        self.context = pg_collection.cp
        self.by_heads = cp_comm_type == "a2a"
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRow | None = None,
        **_: Any,
    ) -> Tensor:
        """Returns [L, H·E] for query [L, H, D], key [L, G, D] and value [L, G, E]. `attention_mask` is ignored. A
        collective of the context ranks, if several.

        Raises:
            ValueError: `packed_seq_params` lacks the row's description (`packing.pack`), or the context ranks cannot
                split the heads evenly.
        """
        row = packed_seq_params
        if row is None or row.sequence_L is None or row.position_L is None:
            raise ValueError("PackedAttention needs the packed row's description (megatron.packing.pack)")
        if row.rotation is not None:
            query, key = row.rotation(query), row.rotation(key)
        sinks: Tensor | None = self.softmax_offset
        if row.global_L is not None and self.by_heads:
            query, key, value = heads_of_whole_row((query, key, value), row.global_L, self.context)
            sinks = None if sinks is None else sinks.chunk(self.context.size())[self.context.rank()]
            out = self._attend(query, key, value, row.whole(), sinks)
            return tokens_of_all_heads(out, row.global_L, self.context)
        return self._attend(query, key, value, row, sinks)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, sinks: Tensor | None) -> Tensor:
        """Returns `forward` without an exchange of heads; `sinks` [H] are those of the heads. A collective of the
        context ranks if `row` is a part of a row."""
        assert row.sequence_L is not None and row.position_L is not None
        if row.global_L is not None:
            key, value = (
                gather_from_sequence_parallel_region(t.contiguous(), group=self.context)[row.global_L]
                for t in (key, value)
            )
        if row.keys is not None:
            key, value = (t.index_select(0, row.keys.index_K) for t in (key, value))
        if _can_use_varlen(query, sinks is not None or self.window is not None):
            return self._varlen(query, key, value, row, sinks)
        longest = row.max_seqlen_q
        if row.global_L is None:
            slot = slot_k = row.sequence_L * longest + row.position_L
            if row.keys is not None:
                lengths = (row.keys.bounds_k[1:] - row.keys.bounds_k[:-1]).long()
                sequence, position = run_positions(lengths, len(key))
                slot_k = sequence * longest + position
            q = _grid(query, slot, row.sequences, longest)
            k, v = (_grid(t, slot_k, row.sequences, longest) for t in (key, value))
            at = torch.arange(longest, device=query.device).view(1, 1, longest, 1)
            return _ungrid(self._softmax(q, k, v, at, sinks), slot)

        size = self.context.size()
        lengths = (row.cu_seqlens_q[1:] - row.cu_seqlens_q[:-1]).long()
        sequence, position = run_positions(lengths, len(key))
        k, v = (_grid(t, sequence * longest + position, row.sequences, longest) for t in (key, value))

        # A sequence's local tokens, in order, are its first and its last zigzag chunk; `nth` counts them.
        local = longest // size
        first = torch.cumsum(lengths // size, 0) - lengths // size
        nth = torch.arange(len(query), device=query.device) - first[row.sequence_L]
        slot = row.sequence_L * local + nth
        q = _grid(query, slot, row.sequences, local)
        at = torch.zeros(row.sequences * local, dtype=torch.long, device=query.device)
        at[slot] = row.position_L
        return _ungrid(self._softmax(q, k, v, at.view(row.sequences, 1, local, 1), sinks), slot)

    def _softmax(self, query: Tensor, key: Tensor, value: Tensor, at: Tensor, sinks: Tensor | None) -> Tensor:
        """Returns the causal attention's output [N, H, Q, E], with the window and `sinks` [H] if any, for a grid of
        queries [N, H, Q, D] at positions `at` [N or 1, 1, Q, 1], keys [N, G, S, D] at positions 0 … S - 1, and values
        [N, G, S, E]."""
        shared_by = query.shape[1] // key.shape[1]
        if query.is_cuda and shared_by > 1:  # in float32, torch's fused kernels for CUDA know no groups of heads
            key, value = (t.repeat_interleave(shared_by, dim=1) for t in (key, value))
        options: dict[str, Any] = {"scale": self.scale, "enable_gqa": key.shape[1] < query.shape[1]}
        if sinks is None and self.window is None and query.shape[2] == key.shape[2]:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
        keys = torch.arange(key.shape[2], device=key.device)
        mask = keys <= at
        if self.window is not None:
            mask &= keys > at - self.window
        if sinks is not None:
            # The sink is one more key with scores of zero, plus the logit as a bias, and a value of zero.
            key, value = (F.pad(t, (0, 0, 0, 1)) for t in (key, value))
            bias = query.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
            shape = (len(mask), query.shape[1], query.shape[2])
            mask = torch.cat([bias.expand(*shape, -1), sinks.to(query.dtype).view(1, -1, 1, 1).expand(*shape, 1)], -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, sinks: Tensor | None) -> Tensor:
        """Computes `forward` with torch's kernel: query [L, H, D], key [T, G, D] and value [T, G, E] of the row, and
        sinks [H] → [L, H·E]."""
        query_width, value_width = query.shape[-1], value.shape[-1]
        cu_q = cu_k = row.cu_seqlens_q
        longest_q = longest_k = row.max_seqlen_q
        if row.keys is not None:
            cu_q, cu_k, longest_q = row.keys.bounds_q, row.keys.bounds_k, row.keys.longest_q
        if row.global_L is not None:
            # A context rank holds two chunks of every sequence. Each attends from the start of the sequence to the
            # chunk's end, so the kernel sees twice as many sequences, with the queries at the last keys.
            size, rank = self.context.size(), self.context.rank()
            starts = cu_k[:-1].long()
            width = (cu_k[1:].long() - starts) // (2 * size)
            reads = torch.stack([width * (rank + 1), width * (2 * size - rank)], 1).flatten()
            chunk, position = run_positions(reads, len(key) // (2 * size) * (2 * size + 1))
            key, value = (t[starts[chunk // 2] + position] for t in (key, value))
            cu_q, cu_k = (F.pad(torch.cumsum(n, 0), (1, 0)).int() for n in (width.repeat_interleave(2), reads))
            longest_q = row.max_seqlen_q // (2 * size)
            longest_k = longest_q * (2 * size - rank)
        grouped = query.shape[1] // key.shape[1]
        if grouped > 1 and "enable_gqa" not in _VARLEN:
            key, value = (t.repeat_interleave(grouped, dim=1) for t in (key, value))
        value = F.pad(value, (0, query_width - value_width))  # the kernel has one width for all
        out: Tensor
        if sinks is not None:
            window = (-1 if self.window is None else self.window - 1, 0)
            out = SinkKernel.apply(
                query, key, value, sinks, KernelRows(cu_q, cu_k, longest_q, longest_k, self.scale, window)
            )
            return out[..., :value_width].flatten(1)
        options = dict(_VARLEN)
        if not math.isclose(self.scale, query_width**-0.5):
            options["scale"] = self.scale
        if self.window is not None:
            options["window_size"] = (self.window - 1, 0)
        out = varlen_attn(query, key, value, cu_q, cu_k, longest_q, longest_k, **options)
        return out[..., :value_width].flatten(1)


def _can_use_varlen(query: Tensor, windows: bool) -> bool:
    """Returns True if torch can run its variable-length kernel on `query`, with sliding windows if `windows`."""
    known = varlen_attn is not None and (not windows or "window_size" in _VARLEN)
    return known and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _causal(kernel: Any) -> dict[str, Any]:
    """Returns the keyword arguments of torch's variable-length kernel for a causal mask; names differ after torch 2.10.

    The kernel's default scale is 1 / sqrt(D), and the causal mask is aligned with the last key.
    """
    known = inspect.signature(kernel).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return causal | ({"enable_gqa": True} if "enable_gqa" in known else {})


_VARLEN: dict[str, Any] = _causal(varlen_attn) if varlen_attn is not None else {}


def _grid(x: Tensor, slot: Tensor, rows: int, width: int) -> Tensor:
    """Copies [tokens, H, D] into a grid [rows, H, width, D], with zeros in slots without a token."""
    return grid(x, slot, rows, width).transpose(1, 2)


def _ungrid(x: Tensor, slot: Tensor) -> Tensor:
    """Copies a grid [rows, H, width, D] back to [tokens, H·D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3]).index_select(0, slot)
