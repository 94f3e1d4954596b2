"""Gated delta nets over packed rows: nothing of a sequence reaches another, forward or backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig, PolicyConfig
from skyrl_mega.megatron import gated_delta
from skyrl_mega.megatron.model import build_model
from skyrl_mega.megatron.packing import PackedRow, pack
from skyrl_mega.models.blocks.base import DeltaNetSizes
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.cuda import fla_kernels
from tests.megatron.layouts import CPU, join_ranks
from tests.support.ranks import run_ranks

HIDDEN = 16
LENGTHS = (1, 1, 2, 3, 4, 5, 7, 30, 63, 64, 65, 66, 100, 127, 128, 129)
"""Lengths of the sequences: around the convolution's window and around a chunk's size."""
PACKINGS = 200
TOLERANCE = 1e-5
SIZES = DeltaNetSizes(key_heads=2, value_heads=4, key_width=8, value_width=6, window=4)
HF = hf_config(BuildConfig(architecture="qwen3_next", hidden=HIDDEN)) | {
    "linear_num_key_heads": SIZES.key_heads,
    "linear_num_value_heads": SIZES.value_heads,
    "linear_key_head_dim": SIZES.key_width,
    "linear_value_head_dim": SIZES.value_width,
}


@dataclass
class Packing:
    """Largest differences of a packed row from its sequences alone, relative to the largest value alone."""

    hidden: float
    inputs: float
    """Gradients of the layer's inputs."""
    weights: float
    """Gradients of the layer's parameters, against the sum over the sequences alone."""


def row_of(lengths: list[int], tensor: int = 1) -> PackedRow:
    return pack(Sequences.of([range(n) for n in lengths]), context=1, context_rank=0, tensor=tensor).row


def examine(rank: int, address: str) -> tuple[list[Packing], list[Packing]]:
    """Returns the differences of random packings, and of packings whose description joins two sequences."""
    join_ranks(rank, address, ParallelDims(1))
    (chunk,) = build_model(HF, PolicyConfig(), ParallelDims(1), torch.float32, CPU)
    layer: Any = chunk.decoder.layers[0].self_attention
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Slow decay: a state that leaks into the next sequence would show on every token.
        parameter.data = 0.2 * noise - 5 if name == "A_log" else 0.5 * noise
    inputs = [torch.randn(n, HIDDEN, generator=generator) for n in LENGTHS]
    upstream = [torch.randn(n, HIDDEN, generator=generator) for n in LENGTHS]
    alone = [passes(layer, [x], [y], row_of([len(x)])) for x, y in zip(inputs, upstream, strict=True)]
    right, joined = [], []
    for _ in range(PACKINGS):
        chosen = rng.permutation(len(LENGTHS))[: rng.integers(1, 8)].tolist()
        parts: list[list[Any]] = [[every[i] for i in chosen] for every in (inputs, upstream, alone)]
        row = row_of([LENGTHS[i] for i in chosen])
        right.append(compare(passes(layer, parts[0], parts[1], row), parts[2]))
    for lengths in ([3, 30], [64, 65], [128, 5]):
        parts = [[every[LENGTHS.index(n)] for n in lengths] for every in (inputs, upstream, alone)]
        joined.append(compare(passes(layer, parts[0], parts[1], row_of([sum(lengths)])), parts[2]))
    return right, joined


def passes(layer: Any, inputs: list[Tensor], upstream: list[Tensor], row: PackedRow) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the layer's results and gradients of the inputs, token by token, and gradients of all parameters."""
    layer.zero_grad()
    x = torch.cat(inputs)[:, None].requires_grad_()
    out, bias = layer(x, packed_seq_params=row)
    assert bias is None
    (out[:, 0] * torch.cat(upstream)).sum().backward()
    weights = [p.grad.flatten() for p in layer.parameters()]
    assert x.grad is not None and (len(x) < 2 or all(bool(grad.any()) for grad in weights))
    return out[:, 0].detach(), x.grad[:, 0], torch.cat(weights)


def compare(packed: tuple[Tensor, ...], alone: list[tuple[Tensor, ...]]) -> Packing:
    hidden, inputs = (torch.cat([each[i] for each in alone]) for i in (0, 1))
    weights = torch.stack([each[2] for each in alone]).sum(0)
    wanted = (hidden, inputs, weights)
    return Packing(*(float((a - b).abs().max() / b.abs().max()) for a, b in zip(packed, wanted, strict=True)))


@pytest.fixture(scope="module")
def packings() -> tuple[list[Packing], list[Packing]]:
    (answers,) = run_ranks(1, examine)
    result: tuple[list[Packing], list[Packing]] = answers
    return result


def test_a_packed_token_has_the_hidden_state_and_gradient_of_its_sequence_alone(
    packings: tuple[list[Packing], list[Packing]],
) -> None:
    right, _ = packings
    assert len(right) == PACKINGS
    for measure in ("hidden", "inputs", "weights"):
        assert max(getattr(packing, measure) for packing in right) < TOLERANCE, measure


def test_a_leak_from_one_sequence_to_the_next_is_found(packings: tuple[list[Packing], list[Packing]]) -> None:
    _, joined = packings
    assert joined and all(min(packing.hidden, packing.inputs, packing.weights) > 1e-2 for packing in joined)


def random_inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns queries, keys and values before the convolution, its weight, decay and β."""
    generator = torch.Generator().manual_seed(1)
    shapes = (tokens, SIZES.convolved), (SIZES.convolved, 1, SIZES.window), (tokens, SIZES.value_heads)
    mixed, weight, beta = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    decay = -0.1 * torch.rand(shapes[2], generator=generator)
    return [x.requires_grad_() for x in (mixed, weight, decay, beta.sigmoid())]


def test_chunks_are_the_rule_token_by_token() -> None:
    """Compares with the kernels' stand-ins, which keep a state from token to token."""
    lengths = [5, 64, 0, 1, 200, 65]
    row, inputs = row_of(lengths), random_inputs(sum(lengths), torch.float32)
    actual = by_chunks(inputs, row)
    expected = by_kernels(inputs, row)
    assert (actual - expected).abs().max() < TOLERANCE * expected.abs().max()
    upstream = torch.randn(actual.shape)
    for a, b in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (actual, expected)), strict=True):
        assert (a - b).abs().max() < TOLERANCE * b.abs().max()


def by_chunks(inputs: list[Tensor], row: PackedRow) -> Tensor:
    mixed, weight, decay, beta = inputs
    return gated_delta.gated_delta(mixed, weight, decay, beta, row, SIZES)


def by_kernels(inputs: list[Tensor], row: PackedRow) -> Tensor:
    """Returns `gated_delta` as on CUDA, with the kernels' stand-ins."""
    kernels: dict[str, Any] = {f.__name__: f for f in (fla_kernels.causal_conv1d, fla_kernels.chunk_gated_delta_rule)}
    with mock.patch.multiple(gated_delta, **kernels), mock.patch.object(gated_delta, "_on_cuda", return_value=True):
        return by_chunks(inputs, row)


def test_a_row_cut_among_context_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="context: 2 would cut the state of a gated delta net"):
        architecture(HF).check_layout(HF, ParallelDims(2, context=2))
    row = replace(row_of([8]), global_L=torch.arange(8))
    with pytest.raises(ValueError, match="whole packed row"):
        gated_delta.PackedDeltaNet.forward(mock.Mock(sizes=SIZES), torch.zeros(8, 1, 1), packed_seq_params=row)


def test_cuda_needs_the_kernels() -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(gated_delta, "chunk_gated_delta_rule", None),
        pytest.raises(UserError, match="flash-linear-attention"),
    ):
        gated_delta.require_kernels()
