"""Tests of the Triton kernels in Triton's interpreter, on the CPU. pytest does not collect this file: test_triton.py
runs the file in a process with TRITON_INTERPRET, a variable needed before the first kernel is defined."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from skyrl_mega.kernels import boxes_triton, linear_logprobs_triton
from skyrl_mega.kernels import linear_logprobs as head_of
from skyrl_mega.kernels.boxes import regions
from skyrl_mega.kernels.linear_logprobs import Head, Inputs
from tests.kernels import cases, head_cases
from tests.kernels.allocations import Allocations
from tests.kernels.head_cases import Case


@pytest.mark.parametrize("rows, columns, row0, col0", cases.SHARDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8(rows: int, columns: int, row0: int, col0: int, dtype: torch.dtype) -> None:
    # Back to float32: the interpreter truncates to bfloat16, a GPU rounds.
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


def test_checksums_of_words_of_all_widths_are_one_launch() -> None:
    views, launches = cases.box_views("cpu"), []

    class Counted(Unseen):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append(grid)
            return super().__getitem__(grid)

    table = boxes_triton.Table(regions(views, [0] * len(views)), torch.device("cpu"))
    with mock.patch.object(boxes_triton, "_sum", Counted(boxes_triton._sum)):
        table.checksums(views)
    assert len(launches) == 1 and table._tiles is not None
    assert [width for width, _ in table._tiles.widths] == [8, 4, 2, 1]


class Unseen:
    """Kernel outside the recorded allocations: the interpreter copies the arguments and keeps reference cycles to the
    copies."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                self.kernel[grid](*args, **kwargs)
                gc.collect()

        return launch


# ---- the fused head: float64, where autograd's numbers are exact enough to compare with ------------------------------

EXACT = 1e-6


@pytest.mark.parametrize("case", head_cases.RAGGED, ids=str)
def test_head(case: Case) -> None:
    head_cases.like_autograd(case, torch.float64, "cpu", by_kernel=True, near=EXACT)


@given(
    st.builds(
        Case,
        tokens=st.integers(1, 70),
        width=st.integers(1, 70),
        vocab=st.integers(1, 300),
        ranks=st.sampled_from([1, 2, 4]),
        temperature=st.sampled_from([1.0, 0.6]),
        soft_cap=st.sampled_from([None, 3.0]),
        padding=st.integers(0, 80),
        floor=st.booleans(),
        entropy=st.booleans(),
    )
)
@settings(max_examples=8, deadline=None)
def test_head_of_any_shape(case: Case) -> None:
    head_cases.like_autograd(case, torch.float64, "cpu", by_kernel=True, near=EXACT)


# bfloat16 is tested on GPUs only: the interpreter's matrix product treats bfloat16 bits as integers.
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 3e-5), (torch.float16, 3e-3)], ids=str)
def test_head_in_lower_precision(dtype: torch.dtype, near: float) -> None:
    case = Case(tokens=70, width=72, vocab=600, ranks=2, temperature=0.7, soft_cap=4.0, padding=9)
    head_cases.like_autograd(case, dtype, "cpu", by_kernel=True, near=near)


def test_extreme_logits() -> None:
    head_cases.extremes_are_exact("cpu", torch.float32, by_kernel=True)


def test_the_heads_buffers_are_as_large_as_is_said() -> None:
    tokens, width, columns = 40, 72, 1100
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, width, generator=g).half() for n in (tokens, columns))
    inputs = Inputs(hidden, weight, torch.arange(tokens), Head(columns, temperature=0.7))
    few = 16 * tokens * 4  # a few numbers per token

    def product(to: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        with _disable_current_modes():  # a GPU accumulates in float32 without float32 copies
            to.addmm_(a.float(), b.float())

    with (
        mock.patch.object(Inputs, "by_kernel", True),
        mock.patch.object(head_of, "_add_product", product),
        mock.patch.object(linear_logprobs_triton, "_sums", Unseen(linear_logprobs_triton._sums)),
        mock.patch.object(linear_logprobs_triton, "_gradient", Unseen(linear_logprobs_triton._gradient)),
    ):
        for squares in (False, True):
            with Allocations() as seen:
                sums = head_of.merge(head_of.partial_sums(inputs, squares=squares))
            planned_bytes = head_of.forward_bytes(tokens, columns, squares=squares)
            assert [size for size in seen.sizes if size > few] == [planned_bytes] and seen.peak <= planned_bytes + few
        logprobs, _, saved = head_of.finish(sums)
        with Allocations() as seen:
            grads = head_of.gradients(inputs, saved, logprobs, logprobs)
    returned = sum(grad.nbytes for grad in grads)
    planned_bytes = head_of.backward_bytes(tokens, columns, width, 2)
    assert sum(size for size in seen.sizes if size > few) == planned_bytes + returned
    # The gradient of the hidden states is converted to its dtype after the chunk is freed.
    assert seen.peak == planned_bytes + grads[1].nbytes
