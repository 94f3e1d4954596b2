"""Tests of `PackedAttention` with the padded grid and with torch's variable-length kernel."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from skyrl_mega.megatron import cpu, layer_spec
from skyrl_mega.megatron.packing import pack
from tests.cuda.test_policy_fake import one_by_one
from tests.megatron import layouts
from tests.support.ranks import run_ranks

HEADS, GROUPS, WIDTH = 4, 2, 8


def both_ways(rank: int, address: str, ranks: int) -> Any:
    """Returns outputs and gradients of the grid and of the kernel, on a context rank."""
    cpu.stand_in()
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    row = pack(layouts.some_batch(100), context=ranks, context_rank=rank, tensor=1).row
    attention = layer_spec.PackedAttention.__new__(layer_spec.PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.context, attention.scale = dist.group.WORLD, WIDTH**-0.5
    generator = torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(len(row.sequence_L), heads, WIDTH, generator=generator, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    )
    answers = []
    for kernel in (False, True):
        with (
            mock.patch.object(layer_spec, "varlen_attn", one_by_one),
            mock.patch.object(layer_spec, "_can_use_varlen", return_value=kernel),
        ):
            out = attention(q, k, v, None, packed_seq_params=row)
        weights = torch.arange(out.numel()).view(out.shape).sin()
        grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
        answers.append([x.detach().numpy() for x in (out, *grads)])
    return answers


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_kernel_is_given_what_makes_it_the_grid(context: int) -> None:
    for grid, kernel in run_ranks(context, both_ways, context):
        for a, b in zip(grid, kernel, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
