"""Tests of the Triton kernels on a GPU: equal bits as the torch references on GPU and CPU; the head equals autograd."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
pytest.importorskip("triton")

from skyrl_mega.kernels import block_fp8, boxes  # noqa: E402
from tests.kernels import cases, head_cases  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
QWEN3_30B_EXPERT = (768, 2048)


@pytest.mark.parametrize("rows, columns, row0, col0", [*cases.SHARDS, (*QWEN3_30B_EXPERT, 0, 0), (1536, 5000, 77, 300)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8(rows: int, columns: int, row0: int, col0: int, dtype: torch.dtype) -> None:
    weight = cases.hard(rows, columns, dtype=dtype, device="cuda")
    cases.fp8_like_the_reference(weight, row0, col0, dtype)


def test_fp8_stack_and_strides() -> None:
    weight = cases.hard(5, 400, 140, dtype=torch.bfloat16, device="cuda")
    cases.fp8_like_the_reference(weight, 5, 250, torch.bfloat16)
    cases.fp8_like_the_reference(weight[:, 10:, 3:].transpose(1, 2), 5, 250, torch.bfloat16)


def test_fp8_every_byte() -> None:
    cases.fp8_every_byte("cuda")


def test_fp8_not_a_number() -> None:
    cases.fp8_not_a_number("cuda")


def test_the_public_functions_give_the_same_on_both_devices() -> None:
    weight = cases.hard(3, 300, 200, dtype=torch.bfloat16, device="cpu")
    amax = block_fp8.block_amax(weight, 3, 4)
    cases.same_bits(block_fp8.block_amax(weight.cuda(), 3, 4).cpu(), amax)
    scales = block_fp8.scales(amax)
    cases.same_bits(block_fp8.scales(amax.cuda()).cpu(), scales)
    numbers = block_fp8.quantise(weight, scales, 3, 4)
    cases.same_bits(block_fp8.quantise(weight.cuda(), scales.cuda(), 3, 4).cpu(), numbers)
    back = block_fp8.dequantise(numbers, scales, 3, 4)
    cases.same_bits(block_fp8.dequantise(numbers.cuda(), scales.cuda(), 3, 4).cpu(), back)


def test_boxes() -> None:
    cases.boxes_like_the_reference("cuda")


def test_ten_thousand_boxes_in_one_buffer() -> None:
    base = torch.randint(0, 2**15, (10_000, 4, 64), dtype=torch.int16, device="cuda").view(torch.bfloat16)
    views = [matrix[:, 8:40] for matrix in base]
    table = boxes.Boxes(boxes.regions(views, range(0, 10_000 * 256, 256)), base.device)
    flat = torch.empty(table.nbytes, dtype=torch.uint8, device="cuda")
    table.pack(views, flat)
    cases.same_bits(flat.view(torch.int16), base[:, :, 8:40].contiguous().view(torch.int16).view(-1))
    wanted = base.clone()
    base[:, :, 8:40] = 0
    table.unpack(views, flat)
    cases.same_bits(base, wanted)


def test_one_table_for_tensors_that_move() -> None:
    cases.one_table_for_tensors_that_move("cuda")


def test_checksums() -> None:
    cases.checksums_like_the_reference("cuda")


@pytest.mark.parametrize("case, dtype, near", head_cases.ON_A_GPU)
def test_the_fused_head(case: head_cases.Case, dtype: torch.dtype, near: float) -> None:
    head_cases.like_autograd(case, dtype, "cuda", by_kernel=True, near=near)


def test_the_fused_heads_extremes() -> None:
    head_cases.extremes_are_exact("cuda", torch.float32, by_kernel=True)
