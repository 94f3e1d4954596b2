"""Attention with sinks by torch's variable-length kernel, which knows none.

The kernel returns each token's log of the softmax's normaliser. With a sink the normaliser grows, so the output shrinks
by a factor per token and head. The kernel's backward pass reads output and normaliser; given those with the sink, it
computes the gradients of an attention with one more key, the sink, whose value is zero (FlashAttention-2,
arXiv:2307.08691, algorithm 2).

Legend: L queries, T keys, H heads, G key/value heads, D width of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class KernelRows(NamedTuple):
    """The sequences of a kernel's call, its scale and mask."""

    bounds_q: Tensor
    """int32 [N + 1]: bounds of the sequences among the queries."""
    bounds_k: Tensor
    """int32 [N + 1]: bounds of the sequences among the keys; a sequence's last query is at its last key."""
    longest_q: int
    longest_k: int
    scale: float
    """Factor of the scores."""
    window: tuple[int, int]
    """Number of tokens before and after itself that a token attends to; -1: no bound."""

    @property
    def causal(self) -> bool:
        """True for a causal mask without a window, which the kernel takes as a separate argument."""
        return self.window == (-1, 0)


class SinkKernel(torch.autograd.Function):
    """Causal attention of packed sequences with sinks."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, rows: KernelRows) -> Tensor:
        """Returns [L, H, D], in the query's dtype, for query [L, H, D], key and value [T, G, D], all on CUDA in
        bfloat16 or float16, and sinks [H] of any dtype."""
        out, normalizer, random = forward_kernel((query, key, value), rows)
        total = torch.logaddexp(normalizer, sinks.to(normalizer.dtype)[:, None])  # [H, L]
        out = (out * (normalizer - total).exp().T[..., None]).to(out.dtype)
        ctx.other = rows[2:]
        ctx.save_for_backward(query, key, value, sinks, *rows[:2], *(out, total, random))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Returns the gradients of query, key, value and sinks, and None for `rows`, given the gradient of the output,
        [L, H, D]."""
        query, key, value, sinks, bounds_q, bounds_k, out, total, random = ctx.saved_tensors
        rows, gradient = KernelRows(bounds_q, bounds_k, *ctx.other), gradients[0].contiguous()
        of_inputs = backward_kernel(gradient, (query, key, value), (out, total, random), rows)
        shares = (sinks.to(total.dtype)[:, None] - total).exp()  # [H, L]
        of_sinks = -(shares * (gradient.to(total.dtype) * out.to(total.dtype)).sum(-1).T).sum(1)
        return *of_inputs, of_sinks.to(sinks.dtype), None


def forward_kernel(inputs: tuple[Tensor, ...], rows: KernelRows) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output [L, H, D], the logarithms of the normalisers [H, L], and the state of random numbers, all
    without sinks.

    Args:
        inputs: Query [L, H, D], and key and value [T, G, D].
        rows: The sequences.
    """
    sizes = (rows.longest_q, rows.longest_k, rows.causal, rows.scale, list(rows.window))
    kernel = torch.ops.torch_attn._varlen_attn
    grouped = any(argument.name == "enable_gqa" for argument in kernel.default._schema.arguments)
    result: tuple[Tensor, Tensor, Tensor] = kernel(
        *(*inputs, rows.bounds_q, rows.bounds_k, *sizes),
        **({"enable_gqa": True} if grouped else {}),  # torch 2.11 takes groups of heads without the argument
    )
    return result


def backward_kernel(
    gradient: Tensor, inputs: tuple[Tensor, ...], results: tuple[Tensor, Tensor, Tensor], rows: KernelRows
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value, in the shapes of `inputs`.

    Args:
        gradient: The output's gradient [L, H, D], contiguous.
        inputs: Query, key and value, as for the forward kernel.
        results: Output, logarithms of the normalisers, and state of random numbers. Output and normalisers must agree:
            both without sinks, as the forward kernel returns them, or both with sinks.
        rows: The sequences.
    """
    out, total, random = results
    sizes = (rows.longest_q, rows.longest_k, rows.causal, random, rows.scale, list(rows.window))
    of_inputs: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        gradient, *inputs, *(out, total), *rows[:2], *sizes
    )
    return of_inputs
