"""Tests of packed attention with sinks and sliding windows, against explicit scores in float64.

Legend: T tokens of the row, H heads, G key/value heads, D width of a head.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.megatron import cpu, packed_attention, sink_kernel
from skyrl_mega.megatron.packing import MicroBatch, pack
from skyrl_mega.megatron.sink_kernel import KernelRows
from skyrl_mega.trajectories.sequences import Sequences
from tests.support.ranks import run_ranks

HEADS, GROUPS, WIDTH = 8, 4, 8
CONTEXTS = (1, 2, 4)
WINDOWS = (None, 1, 7, 16, 500)
"""Windows of all earlier tokens, of one, of few, up to a border of chunks, and longer than the sequences."""


def packings(context: int) -> list[list[int]]:
    """Returns lengths of sequences: a long one between short ones, around a chunk's and the ranks' sizes, none."""
    return [[3, 2, 40, 1, 5], [context, 2 * context + 1, 31, 32, 33], []]


def every_case(rank: int, address: str) -> int:
    """Compares outputs and gradients in every case, on one of four ranks, and returns the number of comparisons."""
    torch.set_num_threads(1)
    cpu.stand_in()
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), max(CONTEXTS), is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=max(CONTEXTS))
    groups = {context: dist.new_group(list(range(context))) for context in CONTEXTS}
    compared = 0
    for context in (size for size in CONTEXTS if rank < size):
        for number, lengths in enumerate(packings(context)):
            batch = Sequences.of([list(range(n)) for n in lengths])
            micro = pack(batch, context=context, context_rank=rank, tensor=1)
            for window, sinks in product(WINDOWS, (True, False)):
                compared += compare(micro, groups[context], window, sinks, number)
    return compared


def compare(micro: MicroBatch, group: Any, window: int | None, with_sinks: bool, seed: int) -> int:
    """Compares a row's attention by grid and kernel, by ring and all-to-all, with that of the whole row, and returns
    the number of comparisons."""
    row = micro.row
    assert row.cu_seqlens_q is not None and row.sequence_L is not None and row.position_L is not None
    bounds = row.cu_seqlens_q.tolist()
    mine = row.cu_seqlens_q.long()[row.sequence_L] + row.position_L
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, GROUPS, GROUPS)
    whole = [2 * torch.randn(bounds[-1], n, WIDTH, generator=generator, dtype=torch.float64) for n in heads]
    sinks = 2 * torch.randn(HEADS, generator=generator, dtype=torch.float64)
    weights = torch.randn(bounds[-1], HEADS * WIDTH, generator=generator, dtype=torch.float64)
    expected, *of_whole = differentiated(
        lambda q, k, v, s: explicit((q, k, v), s if with_sinks else None, bounds, window), whole, sinks, weights
    )
    ways = list(product((False, True), (False, True) if group.size() > 1 else (False,)))
    for kernel, by_heads in ways:
        layer = bare_attention(group, by_heads, window)
        with (
            mock.patch.object(packed_attention, "_can_use_varlen", return_value=kernel),
            mock.patch.object(packed_attention, "varlen_attn", plain_kernel),
            mock.patch.object(sink_kernel, "forward_kernel", forward_kernel),
            mock.patch.object(sink_kernel, "backward_kernel", backward_kernel),
        ):

            def attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor, layer: Any = layer) -> Tensor:
                layer._parameters["softmax_offset"] = s if with_sinks else None
                return layer(q, k, v, None, packed_seq_params=row)

            out, *of_part, of_sinks = differentiated(attend, [t[mine] for t in whole], sinks, weights[mine])
        for actual, wanted in zip((out, *of_part), (expected, *of_whole[:3]), strict=True):
            torch.testing.assert_close(actual, wanted[mine], rtol=1e-9, atol=1e-11)
        dist.all_reduce(of_sinks, group=group)  # as megatron-core sums gradients over context ranks
        torch.testing.assert_close(of_sinks, of_whole[3], rtol=1e-9, atol=1e-11)
    return len(ways)


def differentiated(attend: Any, inputs: list[Tensor], sinks: Tensor, weights: Tensor) -> list[Tensor]:
    """Returns the output of `attend`, and the gradients of the weighted sum with respect to inputs and sinks."""
    leaves = [t.detach().clone().requires_grad_() for t in (*inputs, sinks)]
    out = attend(*leaves)
    gradients = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    filled = (torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients, strict=True))
    return [out.detach(), *filled]


def bare_attention(group: Any, by_heads: bool, window: int | None) -> packed_attention.PackedAttention:
    """Returns an attention layer of these context ranks, without megatron-core's configuration."""
    layer = packed_attention.PackedAttention.__new__(packed_attention.PackedAttention)
    torch.nn.Module.__init__(layer)
    layer.context, layer.scale, layer.by_heads, layer.window = group, WIDTH**-0.5, by_heads, window
    return layer


def explicit(row: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, bounds: list[int], window: int | None) -> Tensor:
    """Returns the attention [T, H · D] within each sequence of a whole row, by every score of a sequence."""
    out = []
    for start, end in pairwise(bounds):
        q, k, v = (t[start:end].repeat_interleave(HEADS // t.shape[1], 1) for t in row)
        shown = [[at - (window or end) < key <= at for key in range(end - start)] for at in range(end - start)]
        scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~torch.tensor(shown), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - start, 1)], 2)
        out.append(torch.einsum("hts,shd->thd", scores.softmax(-1)[..., : end - start], v).flatten(1))
    return torch.cat(out)


def scores_of(q: Tensor, k: Tensor, rows: KernelRows) -> Tensor:
    """Returns the scores [H, T, S] as documented for torch's kernel: -inf for keys that a query does not see."""
    at_q, at_k = (torch.arange(len(t)) for t in (q, k))
    ends_q, ends_k = rows.bounds_q[1:].long(), rows.bounds_k[1:].long()
    of_q, of_k = torch.bucketize(at_q, ends_q, right=True), torch.bucketize(at_k, ends_k, right=True)
    distance = (ends_k[of_k] - at_k)[None] - (ends_q[of_q] - at_q)[:, None]  # both sequences' ends meet
    before, after = rows.window
    seen = (of_q[:, None] == of_k) & (distance >= -after) & ((before < 0) | (distance <= before))
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("thd,shd->hts", q, keys) * rows.scale).masked_fill(~seen, -torch.inf)


def forward_kernel(inputs: Any, rows: KernelRows) -> tuple[Tensor, Tensor, Tensor]:
    """Returns torch's kernel's output [T, H, D], normalisers [H, T], and a state of random numbers."""
    q, k, v = inputs
    scores = scores_of(q, k, rows)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values), scores.logsumexp(-1), torch.zeros(2)


def backward_kernel(grad: Tensor, inputs: Any, results: Any, rows: KernelRows) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k and v by FlashAttention-2's algorithm 2, from the given output and normalisers."""
    (q, k, v), (out, lse, _) = inputs, results
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    shares = (scores_of(q, k, rows) - lse[..., None]).exp()
    of_shares = torch.einsum("thd,shd->hts", grad, values) - (grad * out).sum(-1).T[..., None]
    of_scores = shares * of_shares * rows.scale
    of_k, of_v = torch.einsum("hts,thd->shd", of_scores, q), torch.einsum("hts,thd->shd", shares, grad)
    grouped = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (of_k, of_v))
    return torch.einsum("hts,shd->thd", of_scores, keys), *grouped


def plain_kernel(q: Tensor, k: Tensor, v: Tensor, *sizes: Any, window_size: Any, enable_gqa: bool) -> Tensor:
    """Returns torch's kernel's output without sinks; autograd differentiates it."""
    scores = scores_of(q, k, KernelRows._make((*sizes, WIDTH**-0.5, window_size)))
    assert enable_gqa
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(q.shape[1] // v.shape[1], 1))


def test_sinks_and_windows_are_those_of_whole_sequences_under_every_context() -> None:
    """Compares hidden states, and gradients of queries, keys, values and sinks, on 1, 2 and 4 context ranks."""
    counts = run_ranks(4, every_case)
    cases = len(packings(1)) * len(WINDOWS) * 2
    assert counts == [cases * n for n in (2 + 4 + 4, 4 + 4, 4, 4)]


@pytest.mark.parametrize("window", [(-1, 0), (127, 0)])
def test_torchs_kernels_take_these_arguments(window: tuple[int, int]) -> None:
    """Calls both passes on tensors without memory."""
    q, k, v, sinks = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for shape in ((40, HEADS, 64), (70, GROUPS, 64), (70, GROUPS, 64), (HEADS,))
    )
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    out = sink_kernel.SinkKernel.apply(q, k, v, sinks, KernelRows(bounds, bounds, 30, 50, 0.125, window))
    gradients = torch.autograd.grad(out.sum(), (q, k, v, sinks))
    for result, like in zip((out, *gradients), (q, q, k, v, sinks), strict=True):
        assert (result.shape, result.dtype) == (like.shape, like.dtype)
