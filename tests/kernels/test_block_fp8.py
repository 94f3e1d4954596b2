"""Tests of block-scaled FP8: against a computation number by number, against vLLM, and shards against whole
matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.kernels.block_fp8 import block_amax, blocks_touched, dequantise, quantise, scales
from tests.kernels import brute

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns magnitudes over five decades, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values *= 10.0 ** torch.randint(-4, 2, (rows, columns), generator=generator)
    return (values * (torch.rand(rows, columns, generator=generator) > 0.1)).to(dtype)


shards = st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300), st.integers(0, 300))


@given(shard=shards, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_like_brute_force(shard: tuple[int, int, int, int], dtype: torch.dtype, seed: int) -> None:
    rows, columns, row0, col0 = shard
    w = weight(rows, columns, seed, dtype)
    amax = block_amax(w, row0, col0)
    assert amax.shape == blocks_touched(rows, columns, row0, col0) and amax.dtype == torch.float32
    assert (amax.numpy() == brute.amax(w, row0, col0)).all()
    s = scales(amax)
    assert (
        s.numpy() == np.maximum(brute.amax(w, row0, col0), np.float32(1e-4)).astype(np.float32) / np.float32(448)
    ).all()
    numbers = quantise(w, s, row0, col0)
    assert numbers.dtype == torch.float8_e4m3fn
    actual = numbers.view(torch.uint8).numpy()
    assert (actual == brute.quantise(w, s, row0, col0)).all()
    back = dequantise(numbers, s, row0, col0, torch.float32)
    assert np.allclose(back.numpy(), brute.dequantise(actual, s, row0, col0), rtol=1e-6, atol=0)


@given(shard=shards, row_cut=st.integers(0, 300), col_cut=st.integers(0, 300), seed=st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_four_shards_are_the_whole(shard: tuple[int, int, int, int], row_cut: int, col_cut: int, seed: int) -> None:
    """Compares a matrix cut anywhere, also inside blocks, with the whole: with shared magnitudes all bits must
    agree."""
    rows, columns, row0, col0 = shard
    w = weight(rows, columns, seed, torch.bfloat16)
    whole_amax = block_amax(w, row0, col0)
    whole = quantise(w, scales(whole_amax), row0, col0)
    whole_back = dequantise(whole, scales(whole_amax), row0, col0)
    shared = torch.zeros_like(whole_amax)
    cuts = []
    for a, b in ((0, min(row_cut, rows)), (min(row_cut, rows), rows)):
        for c, d in ((0, min(col_cut, columns)), (min(col_cut, columns), columns)):
            if a < b and c < d:
                i, j = (row0 + a) // 128 - row0 // 128, (col0 + c) // 128 - col0 // 128
                m, n = blocks_touched(b - a, d - c, row0 + a, col0 + c)
                cuts.append((slice(a, b), slice(c, d), slice(i, i + m), slice(j, j + n)))
    for r, c, i, j in cuts:
        shared[i, j] = shared[i, j].maximum(block_amax(w[r, c], row0 + r.start, col0 + c.start))
    assert torch.equal(shared, whole_amax)
    for r, c, i, j in cuts:
        at = row0 + r.start, col0 + c.start
        part = quantise(w[r, c], scales(shared)[i, j], *at)
        assert torch.equal(part.view(torch.uint8), whole.view(torch.uint8)[r, c])
        assert torch.equal(dequantise(part, scales(shared)[i, j], *at), whole_back[r, c])


def test_a_stack_is_each_of_its_matrices() -> None:
    w = torch.stack([weight(200, 150, seed, torch.bfloat16) for seed in range(3)]).transpose(1, 2)
    amax = block_amax(w, 100, 7)
    numbers = quantise(w, scales(amax), 100, 7)
    back = dequantise(numbers, scales(amax), 100, 7)
    for k in range(3):
        assert torch.equal(amax[k], block_amax(w[k], 100, 7))
        assert torch.equal(numbers[k].view(torch.uint8), quantise(w[k], scales(amax[k]), 100, 7).view(torch.uint8))
        assert torch.equal(back[k], dequantise(numbers[k], scales(amax[k]), 100, 7))


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (1, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bit_for_bit_like_vllm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    deep_gemm = pytest.importorskip("vllm.utils.deep_gemm")
    w = weight(*shape, seed=3, dtype=dtype)
    w[:, :128] = 0  # a column of zero blocks
    with torch.compiler.set_stance("force_eager"):
        vllm_numbers, vllm_scales = deep_gemm.per_block_cast_to_fp8(w, [128, 128], use_ue8m0=False)
    s = scales(block_amax(w))
    assert torch.equal(s, vllm_scales)
    assert torch.equal(quantise(w, s).view(torch.uint8), vllm_numbers.view(torch.uint8))


def test_error_is_within_half_a_step() -> None:
    """Checks the error of normal numbers, 2^-4 relative, and that zeros stay zeros."""
    w = torch.randn(256, 256) + 3.0
    s = scales(block_amax(w))
    back = dequantise(quantise(w, s), s, dtype=torch.float32)
    normal = w.abs() > s.max() * 2**-6
    assert ((back - w).abs() <= w.abs() * 2**-4 * 1.0001)[normal].all() and normal.float().mean() > 0.9
    zeros = torch.zeros(128, 128)
    assert torch.equal(
        dequantise(quantise(zeros, scales(block_amax(zeros))), scales(block_amax(zeros))), zeros.bfloat16()
    )


def test_not_a_number_comes_through() -> None:
    w = torch.ones(130, 130)
    w[3, 4] = float("nan")
    amax = block_amax(w)
    assert amax.isnan().tolist() == [[True, False], [False, False]]
    assert quantise(w, torch.ones(2, 2)).float()[3, 4].isnan()


def test_wrong_shapes_are_refused() -> None:
    w = torch.ones(130, 130)
    with pytest.raises(ValueError, match=r"touches blocks \[2, 2\]"):
        quantise(w, torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"row 0, column 127"):
        dequantise(w.to(torch.float8_e4m3fn), torch.ones(2, 2), 0, 127)
    with pytest.raises(ValueError, match="stack"):
        block_amax(torch.ones(5))
