"""The Triton kernels in Triton's interpreter, on the CPU. Not collected by itself: test_triton.py runs it in a process
in which TRITON_INTERPRET is set, as it must be before the first kernel is defined.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels import cases


@pytest.mark.parametrize("rows, columns, row0, col0", cases.SHARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8(rows: int, columns: int, row0: int, col0: int, dtype: torch.dtype) -> None:
    # Back to float32: the interpreter cuts off where a GPU rounds to bfloat16.
    cases.fp8_like_the_reference(cases.hard(rows, columns, dtype=dtype, device="cpu"), row0, col0, torch.float32)


def test_fp8_stack_and_strides() -> None:
    weight = cases.hard(3, 150, 140, dtype=torch.bfloat16, device="cpu")
    cases.fp8_like_the_reference(weight, 5, 250, torch.float32)
    cases.fp8_like_the_reference(weight[:, 10:, 3:].transpose(1, 2), 5, 250, torch.float32)


def test_fp8_every_byte() -> None:
    cases.fp8_every_byte("cpu")


def test_fp8_not_a_number() -> None:
    cases.fp8_not_a_number("cpu")


def test_boxes() -> None:
    cases.boxes_like_the_reference("cpu")


def test_one_table_for_tensors_that_move() -> None:
    cases.one_table_for_tensors_that_move("cpu")


def test_checksums() -> None:
    cases.checksums_like_the_reference("cpu")
