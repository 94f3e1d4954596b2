"""Tests of attention with sinks by torch's kernel on a GPU, against explicit scores in float32 on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.test_windows import GROUPS, HEADS, differentiated, explicit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WIDTH = 64
"""Width of gpt-oss's heads."""


@pytest.mark.parametrize("window", [None, 1, 16, 128])
def test_outputs_and_gradients_are_those_of_explicit_scores(window: int | None) -> None:
    """Allows the rounding of bfloat16; without the sinks the results are off by tens of per cent."""
    from skyrl_mega.megatron.sink_kernel import KernelRows, SinkKernel

    bounds = [0, 1, 130, 333, 340]
    generator = torch.Generator().manual_seed(0)
    row = [torch.randn(bounds[-1], n, WIDTH, generator=generator).bfloat16() for n in (HEADS, GROUPS, GROUPS)]
    sinks, weights = (2 * torch.randn(HEADS, generator=generator)).bfloat16(), torch.randn(bounds[-1], HEADS * WIDTH)
    floats = [t.float() for t in row]
    expected = differentiated(lambda q, k, v, s: explicit((q, k, v), s, bounds, window), floats, sinks.float(), weights)

    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    rows = KernelRows(cu, cu, 203, 203, WIDTH**-0.5, (-1 if window is None else window - 1, 0))
    actual = differentiated(
        lambda q, k, v, s: SinkKernel.apply(q, k, v, s, rows).flatten(1),
        [t.cuda() for t in row],
        sinks.cuda(),
        weights.cuda(),
    )
    for got, wanted in zip(actual, expected, strict=True):
        assert (got.float().cpu() - wanted).norm() < 0.02 * wanted.norm()
