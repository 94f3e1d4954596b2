"""The Triton kernels of `linear_logprobs`: tiles of logits in registers, reduced to sums or converted to gradients.

`_sums` runs a program for every tile of tokens and split of the vocabulary, looping over the split's tiles with the
sums of an online softmax. `_gradient` runs a program for every tile of a chunk. Concurrent programs share tiles of the
weight (tokens vary fastest), so each tile is read once from memory, then from L2.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skyrl_mega.kernels.linear_logprobs import LOWEST, Inputs, Saved, precise, split_columns, splits

_LOWEST: tl.constexpr = tl.constexpr(LOWEST)


class Tile(NamedTuple):
    """Sizes of a program's tile, and launch parameters."""

    tokens: int
    columns: int
    depth: int
    """Columns of the hidden width read at a time."""
    warps: int
    stages: int
    """Loads in flight ahead of the product."""


HALF = Tile(128, 256, 64, warps=8, stages=3)
"""1.5 MiB come from L2 for 0.13 GFLOP (H 2,048): at L2's 5.5 TB/s, 490 TFLOP/s. A tile of 128 × 128 would reach 370.
Loads take 144 KiB, and products half of a thread's registers."""
SMALL = Tile(64, 128, 64, warps=4, stages=3)
"""Loads take 72 KiB, for GPUs with 99 KiB per block (compute capability 8.6, 8.9, 12.0)."""
FLOAT32 = Tile(64, 64, 32, warps=4, stages=3)
"""Products of full float32 numbers, not truncated to TF32."""


def tile(hidden: Tensor) -> Tile:
    """Returns the tile for the dtype and the device of these hidden states: `FLOAT32` for numbers of 4 bytes or more,
    else `HALF`, or `SMALL` if the device has too little shared memory for it."""
    if hidden.element_size() > 2:
        return FLOAT32
    return HALF if loads(HALF) <= _shared_memory(hidden.device) else SMALL


def loads(candidate: Tile) -> int:
    """Returns the bytes of shared memory that a program needs for the loads of this tile, with 2-byte numbers."""
    return candidate.stages * (candidate.tokens + candidate.columns) * candidate.depth * 2


@cache
def _shared_memory(device: torch.device) -> int:
    """Returns the shared memory available to a thread block on a device; always enough in the interpreter."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(properties, "shared_memory_per_block_optin", loads(HALF)))


def partial_sums(inputs: Inputs, *, squares: bool = False) -> Tensor:
    """Computes `linear_logprobs.partial_sums` on a GPU: the quantities of each split and token, [Q, S, T]. Q is 5 with
    `squares`, else 4."""
    tokens, width = len(inputs.hidden_TH), len(inputs.weight_vH)
    count = splits(width)
    shape = (5 if squares else 4, count, tokens)
    sums = torch.empty(shape, dtype=precise(inputs.hidden_TH.dtype), device=inputs.hidden_TH.device)
    chosen, arguments = _arguments(inputs)
    grid = (triton.cdiv(tokens, chosen.tokens), count)
    _sums[grid](*arguments.values(), sums, split_columns(width), SQUARES=squares, **_constants(inputs, chosen))
    return sums


def logit_gradients(
    inputs: Inputs, saved: Saved, grad_logprobs_T: Tensor, grad_entropy_T: Tensor | None, *, out_Tv: Tensor
) -> None:
    """Computes `linear_logprobs.logit_gradients` on a GPU, and writes the result into `out_Tv` [T, v], which must be
    contiguous."""
    tokens, width = out_Tv.shape
    chosen, arguments = _arguments(inputs)
    grid = (triton.cdiv(tokens, chosen.tokens), triton.cdiv(width, chosen.columns))
    grad_entropy = grad_logprobs_T if grad_entropy_T is None else grad_entropy_T
    rows = (saved.peak_T, saved.log_sum_T, saved.entropy_T, grad_logprobs_T, grad_entropy)
    _gradient[grid](
        *arguments.values(),
        *(row.contiguous() for row in rows),
        out_Tv,
        ENTROPY=grad_entropy_T is not None,
        **_constants(inputs, chosen),
    )


def _arguments(inputs: Inputs) -> tuple[Tile, dict[str, Any]]:
    """Returns the tile, and the leading arguments of both kernels in order."""
    hidden, weight, targets = (t.contiguous() for t in (inputs.hidden_TH, inputs.weight_vH, inputs.targets_T))
    return tile(hidden), {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        "floor": targets if inputs.floor_T is None else inputs.floor_T.contiguous(),
        "tokens": len(hidden),
        "columns": len(weight),
        "width": hidden.shape[1],
        "first": inputs.head.first,
        "valid": inputs.head.valid,
    }


def _constants(inputs: Inputs, chosen: Tile) -> dict[str, Any]:
    """Returns the compile-time constants of the kernels."""
    head = inputs.head
    return {
        "TEMPERATURE": head.temperature,
        "CAP": 0.0 if head.soft_cap is None else head.soft_cap,
        "FLOOR": inputs.floor_T is not None,
        "EVEN": inputs.hidden_TH.shape[1] % chosen.depth == 0,
        "DOUBLE": inputs.hidden_TH.dtype == torch.float64,
        "BT": chosen.tokens,
        "BV": chosen.columns,
        "BK": chosen.depth,
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }


@triton.jit
def _products(hidden, weight, row, col, width, EVEN: tl.constexpr, TYPE: tl.constexpr, BK: tl.constexpr):
    """Returns hidden[row] · weight[col], [BT, BV] in TYPE."""
    k = tl.arange(0, BK)
    left = hidden + row.to(tl.int64)[:, None] * width + k[None, :]
    right = weight + col.to(tl.int64)[:, None] * width + k[None, :]
    product = tl.zeros((row.shape[0], col.shape[0]), TYPE)
    for start in range(0, width, BK):
        if EVEN:
            h, w = tl.load(left), tl.load(right)
        else:
            inside = k[None, :] < width - start
            h, w = tl.load(left, mask=inside, other=0.0), tl.load(right, mask=inside, other=0.0)
        product = tl.dot(h, tl.trans(w), product, input_precision="ieee", out_dtype=TYPE)
        left += BK
        right += BK
    return product


@triton.jit
def _logits(products, floor, is_target, valid, TEMPERATURE: tl.constexpr, CAP: tl.constexpr, FLOOR: tl.constexpr):
    """Returns the logits (-∞ outside of the support), and tanh of the capped logits (0 without a cap)."""
    x = products
    tanh = tl.zeros_like(products)
    if CAP > 0:
        tanh = 1.0 - 2.0 / (tl.exp(x * (2.0 / CAP)) + 1.0)  # 1 or -1 where the exponential is infinite or 0
        x = tanh * CAP
    if TEMPERATURE != 1.0:
        x = x * (1.0 / TEMPERATURE)
    kept = valid
    if FLOOR:
        kept = valid & ((x >= floor[:, None]) | is_target)
    return tl.where(kept, x, float("-inf")), tanh


@triton.jit
def _sums(
    hidden, weight, targets, floor, tokens, columns, width, first, valid, sums, split,
    SQUARES: tl.constexpr, TEMPERATURE: tl.constexpr, CAP: tl.constexpr, FLOOR: tl.constexpr, EVEN: tl.constexpr,
    DOUBLE: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    row = tl.minimum(token, tokens - 1)  # rows beyond the last are computed, but not stored
    local = (tl.load(targets + row) - first).to(tl.int32)
    least = tl.load(floor + row) if FLOOR else row
    peak = tl.full((BT,), _LOWEST, TYPE)
    total = tl.zeros((BT,), TYPE)
    moment = tl.zeros((BT,), TYPE)
    target = tl.zeros((BT,), TYPE)
    squared = tl.zeros((BT,), TYPE)
    begin = tl.program_id(1) * split
    end = tl.minimum(begin + split, columns)
    for at in range(begin, end, BV):
        col = at + tl.arange(0, BV)
        products = _products(hidden, weight, row, tl.minimum(col, columns - 1), width, EVEN, TYPE, BK)
        exists = col < tl.minimum(valid, end)
        is_target = (col[None, :] == local[:, None]) & exists[None, :]
        x, _ = _logits(products, least, is_target, exists[None, :], TEMPERATURE, CAP, FLOOR)
        target += tl.sum(tl.where(is_target, x, 0.0), axis=1)
        higher = tl.maximum(peak, tl.max(x, axis=1))
        shift = peak - higher
        factor = tl.exp(shift)
        x = x - higher[:, None]
        e = tl.exp(x)
        # The moment relative to the new peak; for probability 0, 0 · -∞ must not become nan.
        moment = (moment + shift * total) * factor + tl.sum(tl.where(e > 0, x, 0.0) * e, axis=1)
        total = total * factor + tl.sum(e, axis=1)
        if SQUARES:
            squared = squared * factor * factor + tl.sum(e * e, axis=1)
        peak = higher
    step = tl.num_programs(1).to(tl.int64) * tokens
    out = sums + tl.program_id(1).to(tl.int64) * tokens + token
    stored = token < tokens
    tl.store(out, peak, mask=stored)
    tl.store(out + step, total, mask=stored)
    tl.store(out + 2 * step, moment, mask=stored)
    tl.store(out + 3 * step, target, mask=stored)
    if SQUARES:
        tl.store(out + 4 * step, squared, mask=stored)


@triton.jit
def _gradient(
    hidden, weight, targets, floor, tokens, columns, width, first, valid,
    peak, log_sum, entropy, grad_logprobs, grad_entropy, out,
    ENTROPY: tl.constexpr, TEMPERATURE: tl.constexpr, CAP: tl.constexpr, FLOOR: tl.constexpr, EVEN: tl.constexpr,
    DOUBLE: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    row = tl.minimum(token, tokens - 1)
    col = tl.program_id(1) * BV + tl.arange(0, BV)
    products = _products(hidden, weight, row, tl.minimum(col, columns - 1), width, EVEN, TYPE, BK)
    local = (tl.load(targets + row) - first).to(tl.int32)
    least = tl.load(floor + row) if FLOOR else row
    exists = col < valid
    is_target = (col[None, :] == local[:, None]) & exists[None, :]
    x, tanh = _logits(products, least, is_target, exists[None, :], TEMPERATURE, CAP, FLOOR)
    logprob = x - tl.load(peak + row)[:, None] - tl.load(log_sum + row)[:, None]
    p = tl.exp(logprob)
    grad_logprob = tl.load(grad_logprobs + row)[:, None]
    # d log p(target) / d logits = onehot(target) - p;  d entropy / d logits = -p (log p + entropy)
    if ENTROPY:
        surprise = tl.where(p > 0, logprob, 0.0) + tl.load(entropy + row)[:, None]
        grad = tl.where(is_target, grad_logprob, 0.0) - p * (
            grad_logprob + tl.load(grad_entropy + row)[:, None] * surprise
        )
    else:
        grad = grad_logprob * (tl.where(is_target, 1.0, 0.0) - p)
    if CAP > 0:
        grad = grad * (1.0 - tanh * tanh)
    if TEMPERATURE != 1.0:
        grad = grad * (1.0 / TEMPERATURE)
    at = out + token.to(tl.int64)[:, None] * columns + col[None, :]
    tl.store(at, grad.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (col < columns)[None, :])
