"""Tests of the all-to-all of context ranks (`policy.layout.context_exchange`) against attention over whole sequences,
and of its refusals and messages."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig, OptimizerConfig
from skyrl_mega.megatron import cpu, objectives, packed_attention
from skyrl_mega.megatron.context_exchange import heads_of_whole_row, tokens_of_all_heads
from skyrl_mega.megatron.packing import MicroBatch, pack
from skyrl_mega.models import megatron
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.support.ranks import run_ranks

HEADS, WIDTH = 8, 6
KINDS = {"grouped": (4, WIDTH), "latent": (HEADS, 5)}
"""Heads of keys and values, and width of values."""
BY_HEADS: dict[str, Any] = {"context_exchange": "all_to_all"}


def packings(ranks: int) -> list[list[int]]:
    """Returns lengths of sequences: random, many short, a long one between short ones, below the ranks, none."""
    rng = np.random.default_rng(ranks)
    random = [rng.integers(1, 50, rng.integers(1, 8)).tolist() for _ in range(6)]
    return [*random, [1] * 40, [3, 2, 150, 1, 5], [1], [ranks - 1, ranks, 2 * ranks - 1, 2 * ranks + 1], []]


def attend_apart(rank: int, address: str, ranks: int) -> None:
    """Compares outputs and gradients of both exchanges with attention to whole sequences, on a context rank."""
    cpu.stand_in()
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for number, lengths in enumerate(packings(ranks)):
        batch = Sequences.of([list(range(n)) for n in lengths])
        micro = pack(batch, context=ranks, context_rank=rank, tensor=1)
        for groups, width in KINDS.values():
            check_packing(micro, groups, width, seed=number)


def check_packing(micro: MicroBatch, groups: int, width: int, seed: int) -> None:
    row = micro.row
    assert row.cu_seqlens_q is not None and row.sequence_L is not None and row.position_L is not None
    bounds = row.cu_seqlens_q.tolist()
    mine = row.cu_seqlens_q.long()[row.sequence_L] + row.position_L
    generator = torch.Generator().manual_seed(seed)
    whole = [
        torch.randn(bounds[-1], heads, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, size in ((HEADS, WIDTH), (groups, WIDTH), (groups, width))
    ]
    weights = torch.randn(bounds[-1], HEADS * width, generator=generator, dtype=torch.float64)
    expected = attention(whole, bounds)
    of_whole = torch.autograd.grad((expected * weights).sum(), whole)
    for by_heads in (True, False):
        part = [t.detach()[mine].requires_grad_() for t in whole]
        out = bare_attention(by_heads)(*part, None, packed_seq_params=row)
        of_part = torch.autograd.grad((out * weights[mine]).sum(), part)
        for actual, wanted in zip((out, *of_part), (expected, *of_whole), strict=True):
            torch.testing.assert_close(actual, wanted[mine], rtol=1e-10, atol=1e-12)


def attention(whole: list[Tensor], bounds: list[int]) -> Tensor:
    """Returns causal attention [T, H · width] within each sequence, by explicit scores."""
    out = []
    for start, end in pairwise(bounds):
        q, k, v = (t[start:end].repeat_interleave(HEADS // t.shape[1], dim=1) for t in whole)
        scores = torch.einsum("thd,shd->hts", q, k) / WIDTH**0.5
        scores = scores.masked_fill(torch.ones(end - start, end - start).triu(1).bool(), float("-inf"))
        out.append(torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1))
    return torch.cat(out)


def bare_attention(by_heads: bool) -> packed_attention.PackedAttention:
    layer = packed_attention.PackedAttention.__new__(packed_attention.PackedAttention)
    torch.nn.Module.__init__(layer)
    layer.context, layer.scale, layer.by_heads = dist.group.WORLD, WIDTH**-0.5, by_heads
    layer.window = layer.softmax_offset = None
    return layer


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_packing_is_attended_to_like_whole_sequences(ranks: int) -> None:
    run_ranks(ranks, attend_apart, ranks)


def exchange(rank: int, address: str, ranks: int) -> tuple[Any, Any, Any]:
    """Returns the rank's heads of the row, the way back, and the error for heads that cannot be split."""
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    row = pack(Sequences.of([[1] * 5, [2] * 3]), context=ranks, context_rank=rank, tensor=1).row
    assert row.global_L is not None and row.cu_seqlens_q is not None and dist.group.WORLD is not None
    assert row.sequence_L is not None and row.position_L is not None
    at = row.cu_seqlens_q.long()[row.sequence_L] + row.position_L
    numbers = 100 * at[:, None, None] + torch.arange(4)[:, None] * 10 + torch.arange(3)
    (heads,) = heads_of_whole_row([numbers], row.global_L, dist.group.WORLD)
    back = tokens_of_all_heads(heads.flatten(1), row.global_L, dist.group.WORLD)
    with pytest.raises(ValueError, match=re.escape("2 context ranks cannot split heads [3]")):
        heads_of_whole_row([numbers[:, :3]], row.global_L, dist.group.WORLD)
    return heads.numpy(), back.numpy(), numbers.flatten(1).numpy()


def test_a_rank_gets_its_heads_in_the_order_of_the_row() -> None:
    for rank, (heads, back, sent) in enumerate(run_ranks(2, exchange, 2)):
        tokens = np.arange(len(heads))[:, None, None]
        np.testing.assert_array_equal(
            heads, 100 * tokens + 10 * np.arange(2 * rank, 2 * rank + 2)[:, None] + np.arange(3)
        )
        np.testing.assert_array_equal(back, sent)


SMOOTH = OptimizerConfig(lr=1e-2, eps=1e-2, clip_grad=0.0)
"""Settings with a large epsilon: the change of a weight then shows the gradient's size, not only its sign."""
LATENT = BuildConfig(architecture="deepseek_v3", layers=2)


def trained(rank: int, address: str, path: Path, parallel: ParallelDims) -> dict[str, Any]:
    """Returns the changes of all whole parameters by a step."""
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(optimizer=SMOOTH))
    before = {name: p.detach().clone() for name, p in opened.params.items()}
    opened.train(layouts.deal(layouts.some_batch(100), opened)[1], objectives.supervised)
    return {name: (p.detach() - before[name]).numpy() for name, p in opened.params.items()}


@pytest.mark.parametrize("model", [LATENT, BuildConfig(heads=8, kv_heads=4, head_dim=16)], ids=["latent", "grouped"])
def test_every_parameter_learns_what_a_single_process_learns(model: BuildConfig, tmp_path: Path) -> None:
    build(model, tmp_path / "model", seed=1)
    (single,) = run_ranks(1, trained, tmp_path / "model", ParallelDims())
    for changes in run_ranks(2, trained, tmp_path / "model", ParallelDims(2, context=2, **BY_HEADS)):
        assert changes.keys() == single.keys()
        for name, change in changes.items():
            scale = np.abs(single[name]).max()
            assert scale > 0 or name.endswith("bias"), name
            np.testing.assert_allclose(change, single[name], atol=1e-4 * scale, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        (
            BuildConfig(heads=8, kv_heads=2),
            ParallelDims(4, context=4, **BY_HEADS),
            r"policy\.layout\.context_exchange = all_to_all: it gives every context rank an equal part of 2 key/value "
            r"heads, those of a tensor rank, and policy\.layout\.context is 4.*policy\.layout\.context of 2, .*ring",
        ),
        (
            BuildConfig(heads=8, kv_heads=4),
            ParallelDims(8, tensor=4, expert_tensor=4, context=2, **BY_HEADS),
            r"1 key/value heads, those of a tensor rank, .*give a smaller policy\.layout\.tensor",
        ),
        (
            BuildConfig(heads=6, kv_heads=3),
            ParallelDims(3, context=3, **BY_HEADS),
            r"even number of key/value heads on a tensor rank; there are 3",
        ),
        (LATENT, ParallelDims(3, context=3, **BY_HEADS), "equal part of 4 attention heads"),
    ],
    ids=["kv heads", "tensor", "odd", "latent"],
)
def test_heads_that_cannot_be_split_are_refused(model: BuildConfig, parallel: ParallelDims, message: str) -> None:
    hf = hf_config(model)
    decoder = architecture(hf).describe(hf)
    with pytest.raises(UserError, match=message):
        megatron.check(decoder, parallel)
    megatron.check(decoder, replace(parallel, context_exchange="ring"))


@pytest.mark.parametrize("model", [LATENT, BuildConfig(heads=8, kv_heads=4)], ids=["latent", "grouped"])
def test_the_planner_counts_the_bytes_of_the_messages(model: BuildConfig) -> None:
    """Compares with the sizes of the tensors in the messages; a ring passes keys and values to every other rank."""
    hf = hf_config(model)
    (block,) = {b for b in architecture(hf).describe(hf).blocks if b.messages(ParallelDims()).context}
    if model is LATENT:
        q = k = hf["num_attention_heads"] * (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])
        v = out = hf["num_attention_heads"] * hf["v_head_dim"]
    else:
        q = out = 8 * model.head_dim
        k = v = 4 * model.head_dim
    for tensor in (1, 2):
        ring = ParallelDims(2 * tensor, tensor=tensor, context=2)
        heads = ParallelDims(2 * tensor, tensor=tensor, context=2, **BY_HEADS)
        assert block.messages(ring).context == (k + v) / tensor
        assert block.messages(heads).context == (q + k + v + out) / tensor / 2
