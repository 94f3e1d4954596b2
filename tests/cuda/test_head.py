"""Tests of the fused head with tensors on CUDA: launches of the kernels, and torch's work around the launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.cuda.fake_cuda import CUDA, fake_cuda

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot be imported")

from skyrl_mega.kernels import linear_logprobs, linear_logprobs_triton
from skyrl_mega.kernels.linear_logprobs import Head, Inputs

TOKENS, WIDTH, COLUMNS = 300, 128, 2500
"""Sizes with three chunks of columns, the last chunk narrower."""


class Kernel:
    """Simulated kernel with a record of the arguments of all launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return lambda *args, **constants: self.launches.append((grid, args, constants))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_what_is_launched(dtype: torch.dtype, entropy: bool) -> None:
    sums, gradient = Kernel(), Kernel()
    with (
        fake_cuda(),
        mock.patch.object(linear_logprobs_triton, "_sums", sums),
        mock.patch.object(linear_logprobs_triton, "_gradient", gradient),
    ):
        hidden, weight = (torch.empty(n, WIDTH, dtype=dtype, device=CUDA) for n in (TOKENS, COLUMNS))
        targets = torch.empty(TOKENS, dtype=torch.int64, device=CUDA)
        inputs = Inputs(hidden, weight, targets, Head(2400, first=COLUMNS, temperature=0.7))
        merged = linear_logprobs.merge(linear_logprobs.partial_sums(inputs, squares=True))
        logprobs, squares, saved = linear_logprobs.finish(merged)
        grads = linear_logprobs.gradients(inputs, saved, logprobs, logprobs if entropy else None)
    assert squares is not None
    for output in (logprobs, squares, saved.entropy_T):
        assert (output.shape, output.dtype, output.device) == ((TOKENS,), torch.float32, CUDA)
    for grad, of in zip(grads, (hidden, weight), strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (of.shape, dtype, CUDA)
    tile = linear_logprobs_triton.tile(torch.empty(0, dtype=dtype))
    rows = -(-TOKENS // tile.tokens)
    ((grid, args, constants),) = sums.launches
    assert grid == (rows, linear_logprobs.splits(COLUMNS)) and constants["SQUARES"] and constants["TEMPERATURE"] == 0.7
    _on_the_device(args, constants)
    assert [grid for grid, *_ in gradient.launches] == [(rows, -(-n // tile.columns)) for n in (1024, 1024, 452)]
    valid = []
    for _, args, constants in gradient.launches:
        _on_the_device(args, constants)
        assert constants["ENTROPY"] is entropy and args[-1].dtype == dtype and args[-1].is_contiguous()
        valid.append(args[7:9])
    assert valid == [(COLUMNS, 1024), (COLUMNS + 1024, 1024), (COLUMNS + 2048, 352)]


def _on_the_device(args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Checks that arguments are device tensors and integers; all else must be compiled in."""
    assert all(arg.device == CUDA for arg in args if isinstance(arg, Tensor))
    assert all(isinstance(arg, Tensor | int) for arg in args)
    assert {"BT", "BV", "BK", "EVEN", "DOUBLE", "num_warps", "num_stages"} <= constants.keys()


@pytest.mark.parametrize(("kib", "tile"), [(227, "HALF"), (163, "HALF"), (99, "SMALL")])
def test_a_tile_fits_into_the_devices_shared_memory(kib: int, tile: str) -> None:
    linear_logprobs_triton._shared_memory.cache_clear()
    properties = SimpleNamespace(shared_memory_per_block_optin=kib * 1024)
    with fake_cuda(), mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        hidden = torch.empty(4, WIDTH, dtype=torch.bfloat16, device=CUDA)
        assert linear_logprobs_triton.tile(hidden) is getattr(linear_logprobs_triton, tile)
    linear_logprobs_triton._shared_memory.cache_clear()
    assert linear_logprobs_triton.loads(getattr(linear_logprobs_triton, tile)) <= kib * 1024
