"""Tests of rounding to FP8 against tables of the formats' numbers and plain loops."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl_mega.megatron import fp8_rounding as fp8


def table(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """Returns the format's non-negative numbers by code: even codes have an even mantissa."""
    bias, numbers = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        value = (mantissa / 2**mantissa_bits + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
        if value <= largest:
            numbers.append(value)
    return numbers


TABLES = {fp8.E4M3: table(4, 3, 448), fp8.E5M2: table(5, 2, 57344)}


def nearest(x: float, kind: torch.dtype) -> float:
    """Returns the nearest number of the format: ties go to the even mantissa, larger values to the largest number."""
    numbers, size = TABLES[kind], abs(x)
    above = bisect_left(numbers, size)
    codes = [c for c in (above - 1, above) if 0 <= c < len(numbers)]
    code = min(codes, key=lambda c: (abs(numbers[c] - size), c % 2))
    return numbers[code] * (-1 if x < 0 else 1)


def power_below(amax: float, largest: float) -> float:
    """Returns the largest power of two that keeps `amax` within `largest`."""
    k = 0
    while amax * 2.0**k <= largest:
        k += 1
    while amax * 2.0**k > largest:
        k -= 1
    return 2.0**k


def by_loops(x: Tensor, size: int, powers: bool) -> Tensor:
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], size):
            block = x[row, start : start + size].float().numpy()
            amax = np.float32(np.abs(block).max())
            scale = np.float32(1)
            if amax:
                scale = np.float32(1 / power_below(float(amax), 448)) if powers else amax / np.float32(448)
            for i, value in enumerate(block):
                out[row, start + i] = float(np.float32(nearest(float(value / scale), fp8.E4M3)) * scale)
    return out


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Draws rows of magnitudes from 1e-8 to 1e4, with zeros, powers of two and halfway numbers."""
    rows, columns, seed = draw(st.integers(1, 3)), draw(st.integers(1, 150)), draw(st.integers(0, 2**31))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 10 ** rng.uniform(-8, 4, (rows, columns if seed % 2 else 1))
    x[rng.random(x.shape) < 0.1] = 0
    special = rng.random(x.shape) < 0.3
    x[special] = (rng.integers(0, 32, x.shape) / 16 * 2.0 ** rng.integers(-9, 9, x.shape))[special]
    return torch.from_numpy(x).to(dtype)


@settings(max_examples=25, deadline=None)
@given(matrices())
def test_blocks_of_a_row(x: Tensor) -> None:
    assert torch.equal(fp8.blocks(x), by_loops(x, 128, powers=False))


@settings(max_examples=25, deadline=None)
@given(matrices())
def test_microscaled_blocks_of_a_row(x: Tensor) -> None:
    assert torch.equal(fp8.microscaled(x), by_loops(x, 32, powers=True))


@pytest.mark.parametrize("kind", [fp8.E4M3, fp8.E5M2])
@settings(max_examples=25, deadline=None)
@given(matrices())
def test_one_power_for_a_tensor(kind: torch.dtype, x: Tensor) -> None:
    largest = torch.finfo(kind).max
    amax = float(x.abs().max())
    scale = power_below(amax, largest) if amax else 1.0
    assert float(fp8.power(torch.tensor(amax), kind)) == scale
    expected = [nearest(float(value) * scale, kind) / scale for value in x.flatten()]
    assert torch.equal(fp8.tensor(x, kind), torch.tensor(expected, dtype=x.dtype).view(x.shape))


def test_infinity_becomes_the_largest_number() -> None:
    x = torch.tensor([float("inf"), -float("inf"), 3.0])
    assert fp8.tensor(x, fp8.E4M3).tolist() == [448.0, -448.0, 3.0]
    assert fp8.tensor(x, fp8.E5M2).tolist() == [57344.0, -57344.0, 3.0]


@pytest.mark.parametrize(
    "rounded",
    [fp8.blocks, fp8.microscaled, lambda x: fp8.tensor(x, fp8.E4M3)],
    ids=["blocks", "microscaled", "tensor"],
)
def test_nan_stays_and_nothing_gives_nothing(rounded: Any) -> None:
    assert rounded(torch.tensor([[1.0, float("nan")]])).isnan().any()
    assert rounded(torch.zeros(2, 5)).tolist() == torch.zeros(2, 5).tolist()
    assert rounded(torch.zeros(0, 40)).shape == (0, 40)


def test_a_power_of_two_rounds_the_same_in_a_larger_tensor() -> None:
    """Rounds the same values alone and with a larger value. Numbers down to 2⁻¹³ of the largest do not depend on the
    power, so a batch may be split anywhere."""
    x = torch.from_numpy(np.random.default_rng(0).uniform(2**-4, 1, 1000)).float()
    both = torch.cat([x, torch.tensor([37.0])])
    alone, beside = (fp8.tensor(t, fp8.E4M3) for t in (x, both))
    assert torch.equal(alone, beside[:-1])
