"""Tests of flash-linear-attention's kernels for gated delta nets on a GPU, against the explicit rule in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
pytest.importorskip("fla")

from benchmarks.gpu.families import refuses_backward  # noqa: E402
from skyrl_mega.megatron.gated_delta import gated_delta  # noqa: E402
from skyrl_mega.megatron.packing import PackedRow, pack  # noqa: E402
from skyrl_mega.models.blocks.base import DeltaNetSizes  # noqa: E402
from skyrl_mega.trajectories.sequences import Sequences  # noqa: E402

SIZES = DeltaNetSizes(key_heads=2, value_heads=4, key_width=128, value_width=128, window=4)
LENGTHS = (1, 63, 64, 65, 200, 1, 1, 5)
"""Lengths of the sequences, around a chunk's 64 tokens and within the convolution's window."""
NAMES = ("inputs", "convolution", "decay", "beta")


def row() -> PackedRow:
    sequences = Sequences.of([range(n) for n in LENGTHS])
    return pack(sequences, context=1, context_rank=0, tensor=1).to(torch.device("cuda")).row


def inputs() -> tuple[list[Tensor], Tensor]:
    """Returns the arguments of the rule, float64 with values of bfloat16 (the decay float32), and the output's
    gradient. States decay slowly, so that a state that leaks into the next sequence shows."""
    generator, tokens, heads = torch.Generator().manual_seed(0), sum(LENGTHS), SIZES.value_heads
    shapes = ((tokens, SIZES.convolved), (SIZES.convolved, 1, SIZES.window), (tokens, heads), (tokens, heads))
    mixed, weight, decay, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    upstream = torch.randn(tokens, heads, SIZES.value_width, generator=generator).bfloat16().double()
    rounded = (t.bfloat16().double() for t in (mixed, weight, beta.sigmoid()))
    mixed, weight, beta = rounded
    return [mixed, weight, (-0.05 * decay.abs()).double(), beta], upstream


def explicit(mixed: Tensor, weight: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Returns the rule's results [T, H, E], token by token and sequence by sequence."""
    group, out = SIZES.value_heads // SIZES.key_heads, []
    for start, end in pairwise([0, *torch.tensor(LENGTHS).cumsum(0).tolist()]):
        padded = F.pad(mixed[start:end].T[None], (SIZES.window - 1, 0))
        convolved = F.silu(F.conv1d(padded, weight, groups=len(weight)))[0].T
        q, k, v = convolved.split((SIZES.keys, SIZES.keys, SIZES.values), -1)
        q, k = (x.unflatten(-1, (SIZES.key_heads, -1)).repeat_interleave(group, 1) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        v = v.unflatten(-1, (SIZES.value_heads, -1))
        state = v.new_zeros(SIZES.value_heads, SIZES.key_width, SIZES.value_width)
        for t in range(end - start):
            state = state * decay[start + t].exp()[:, None, None]
            change = beta[start + t][:, None] * (v[t] - torch.einsum("hd,hde->he", k[t], state))
            state = state + k[t][:, :, None] * change[:, None]
            out.append(torch.einsum("hd,hde->he", q[t] * SIZES.key_width**-0.5, state))
    return torch.stack(out)


def by_kernel(arguments: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns the kernels' results, and the arguments on the GPU as leaves: bfloat16, the decay float32."""
    kinds = (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16)
    leaves = [t.to("cuda", kind).requires_grad_() for t, kind in zip(arguments, kinds, strict=True)]
    mixed, weight, decay, beta = leaves
    return gated_delta(mixed, weight, decay, beta, row(), SIZES), leaves


def far(actual: Tensor, wanted: Tensor, near: float) -> dict[int, float]:
    """Returns the errors of the sequences, by start, that are not within `near`, relative to the sequence's values or
    to a mean sequence's, if those are larger. A tensor without tokens counts as one sequence."""
    actual, starts = actual.double().cpu(), [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    bounds = [*pairwise(starts)] if len(wanted) == starts[-1] else [(0, len(wanted))]
    mean, errors = wanted.square().mean().sqrt(), {}
    for start, end in bounds:
        of = wanted[start:end]
        scale = max(of.norm(), mean * of.numel() ** 0.5)
        errors[start] = float((actual[start:end] - of).norm() / scale)
    return {start: error for start, error in errors.items() if not error < near}


def test_every_sequence_of_a_packed_row_has_the_explicit_rules_results() -> None:
    arguments, _ = inputs()
    with torch.no_grad():
        assert not far(by_kernel(arguments)[0], explicit(*arguments), 0.03)


@pytest.mark.xfail(
    torch.cuda.is_available() and refuses_backward(),
    raises=RuntimeError,
    strict=True,
    reason="flash-linear-attention's backward pass needs Triton 3.7.1 or later on Hopper",
)
def test_every_gradient_of_a_packed_row_is_the_explicit_rules() -> None:
    arguments, upstream = inputs()
    leaves = [t.requires_grad_() for t in arguments]
    wanted = torch.autograd.grad(explicit(*leaves), leaves, upstream)
    out, on_gpu = by_kernel([t.detach() for t in arguments])
    actual = torch.autograd.grad(out, on_gpu, upstream.to("cuda", torch.bfloat16))
    wrong = {name: far(a, w, 0.05) for name, a, w in zip(NAMES, actual, wanted, strict=True)}
    assert not any(wrong.values()), wrong
