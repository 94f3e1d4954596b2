"""Tests of the checksum: the definition in plain integers, any position of the box, any change."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.kernels import checksum
from skyrl_mega.kernels.boxes import Boxes, regions
from skyrl_mega.kernels.checksum import checksum as one
from tests.kernels import brute

TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(TYPES), st.sampled_from([64, 1 << 19]))
@settings(max_examples=150, deadline=None)
def test_it_is_what_it_says(rows: int, columns: int, dtype: torch.dtype, strip: int) -> None:
    whole = torch.randn(rows + 3, columns + 5).to(dtype)
    box = whole[2 : 2 + rows, 3 : 3 + columns]
    before, checksum.STRIP_BYTES = checksum.STRIP_BYTES, strip
    try:
        assert one(box) == one(box.contiguous()) == brute.checksum(box)
        assert one(box.contiguous().view(-1)) == brute.checksum(box)
    finally:
        checksum.STRIP_BYTES = before


def test_more_words_than_a_row_of_factors() -> None:
    box = torch.randint(-(2**15), 2**15, (300, 77), dtype=torch.int16)
    assert one(box) == brute.checksum(box)


def test_of_many_boxes_at_once() -> None:
    views = [torch.randn(5, 7).bfloat16()[:, 2:5], torch.arange(3), torch.zeros(0, 4), torch.ones(())]
    sums = Boxes(regions(views, [0, 32, 64, 96]), views[0].device).checksums(views)
    assert sums.dtype == torch.int64 and [int(f) % 2**64 for f in sums] == [brute.checksum(v) for v in views]


@pytest.mark.parametrize("change", ["one bit", "rows exchanged", "neighbours exchanged", "shifted", "one zeroed"])
def test_a_change_shows(change: str) -> None:
    box = torch.randint(1, 2**15, (64, 64), dtype=torch.int16)
    other = box.clone()
    match change:
        case "one bit":
            other[17, 3] ^= 1
        case "rows exchanged":
            other[[4, 9]] = other[[9, 4]]
        case "neighbours exchanged":
            other[0, 0], other[0, 1] = 7, 8
            box[0, 0], box[0, 1] = 8, 7
        case "shifted":
            other = other.roll(1, 0)
        case "one zeroed":
            other[63, 63] = 0
    assert one(box) != one(other)


def test_cost() -> None:
    """Prints the rate of the checksum and of a copy of the same box."""
    whole = torch.randn(4096, 4096).bfloat16()
    box = whole[:, 512:3584]

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            start = time.process_time()
            work()
            times.append(time.process_time() - start)
        return box.nbytes / min(times) / 1e9

    checksummed, copied = best(lambda: one(box)), best(box.contiguous)
    print(f"{checksummed:.1f} GB/s; a copy {copied:.1f} GB/s")
