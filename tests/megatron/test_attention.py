"""Tests of `PackedAttention` with the padded grid and with torch's variable-length kernel."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from skyrl_mega.megatron import cpu, packed_attention
from skyrl_mega.megatron.packing import pack
from tests.cuda.test_policy_fake import one_by_one
from tests.megatron import layouts
from tests.megatron.test_shared_prefixes import groups_batch
from tests.support.ranks import run_ranks

HEADS, GROUPS, WIDTH = 4, 2, 8
GROUPED = (GROUPS, WIDTH, WIDTH**-0.5)
"""Heads of keys and values, width of values, scale of the scores."""
LATENT = (HEADS, 5, 0.6)
"""As `GROUPED`, for latent attention with YaRN: narrower values, and a scale of its own."""


def both_ways(
    rank: int, address: str, ranks: int, kind: tuple[int, int, float], by_heads: bool, share: bool = False
) -> Any:
    """Returns outputs and gradients of the grid and of the kernel, on a context rank; with `share` for a row with
    shared prefixes."""
    groups, values, scale = kind
    cpu.stand_in()
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    batch = groups_batch() if share else layouts.some_batch(100)
    row = pack(batch, context=ranks, context_rank=rank, tensor=1, share=share).row
    assert (row.keys is not None) == share
    attention = packed_attention.PackedAttention.__new__(packed_attention.PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.context, attention.scale, attention.by_heads = dist.group.WORLD, scale, by_heads
    attention.window = attention.softmax_offset = None
    generator = torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(len(row.sequence_L), heads, width, generator=generator, requires_grad=True)
        for heads, width in ((HEADS, WIDTH), (groups, WIDTH), (groups, values))
    )
    answers = []
    for kernel in (False, True):
        with (
            mock.patch.object(packed_attention, "varlen_attn", one_by_one),
            mock.patch.object(packed_attention, "_can_use_varlen", return_value=kernel),
        ):
            out = attention(q, k, v, None, packed_seq_params=row)
        weights = torch.arange(out.numel()).view(out.shape).sin()
        grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
        assert out.shape == (len(q), HEADS * values)
        answers.append([x.detach().numpy() for x in (out, *grads)])
    return answers


@pytest.mark.parametrize(
    ("context", "kind", "by_heads"),
    [
        (1, GROUPED, False),
        (2, GROUPED, False),
        (3, GROUPED, False),
        (2, LATENT, False),
        (2, GROUPED, True),
        (4, LATENT, True),
    ],
    ids=["1", "2", "3", "2 latent", "2 by heads", "4 latent by heads"],
)
def test_the_kernel_is_given_what_makes_it_the_grid(context: int, kind: tuple[int, int, float], by_heads: bool) -> None:
    for grid, kernel in run_ranks(context, both_ways, context, kind, by_heads):
        for a, b in zip(grid, kernel, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_the_kernel_reads_the_keys_of_shared_prefixes(kind: tuple[int, int, float]) -> None:
    ((grid, kernel),) = run_ranks(1, both_ways, 1, kind, False, True)
    for a, b in zip(grid, kernel, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
