"""Transformer Engine's kernels in plain torch, called by its Python on a CPU (`te.install`).

This module holds only kernels used by a layer of this project. Attention is in `te_attention`, FP8 in `te_fp8_kernels`.
All code around the kernels is Transformer Engine's.
"""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from tests.cuda import syncs, te, te_attention, te_fp8_kernels
from tests.cuda.syncs import AsCuda, Counted, Waits
from tests.cuda.te_fp8_kernels import product, quantize, shape
from tests.cuda.together import one_by_one

UNUSED = ("layernorm_fwd", "layernorm_bwd")
"""Kernels named by Transformer Engine's modules but never called by this project's models."""
DTYPES = {te.DTYPES.index(f"k{name}"): getattr(torch, name.lower()) for name in ("Float32", "Float16", "BFloat16")}
"""torch's dtypes by Transformer Engine's numbers for dtypes."""
KERNELS: dict[str, Callable[..., Any]] = {}
TRITON: dict[str, Callable[..., Any]] = {}


def install(
    waits: Waits,
    capability: tuple[int, int] = te.HOPPER,
    others: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> None:
    """Installs Transformer Engine (`te.install`) in this process with these kernels, further kernels, and its Triton
    kernels in plain torch.

    A kernel's work belongs to the device: nothing in it counts as a wait of the host.
    """
    nothing = {name: unittest.mock.MagicMock(name=name) for name in UNUSED}
    kernels = KERNELS | te_attention.KERNELS | te_fp8_kernels.KERNELS | others
    te.install(nothing | {name: _on_the_device(each, waits) for name, each in kernels.items()}, capability)
    from transformer_engine.pytorch import permutation

    for name, each in TRITON.items():
        setattr(permutation.triton_permutation, name, _on_the_device(each, waits))
    for op in vars(permutation).values():
        if isinstance(op, CustomOpDef):  # torch calls custom operators outside the modes entered in Python
            op._backend_fns = {kind: _in_the_modes(each, waits) for kind, each in op._backend_fns.items()}


def stand_in(waits: Waits) -> None:
    """Replaces further device functions called by Transformer Engine, and restores megatron-core's copies to the host:
    the earlier `cpu.stand_in` drops these copies."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from transformer_engine.pytorch import distributed

    syncs.stand_in(waits)
    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu
    cuda: Any = torch.cuda
    cuda.is_current_stream_capturing = lambda: False
    cuda.device = lambda *_: contextlib.nullcontext()
    major, minor = torch.cuda.get_device_capability()
    cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132, major=major, minor=minor)
    one_by_one()
    recomputed: Any = distributed
    recomputed._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    recomputed._set_cuda_rng_state = lambda *_, **__: None
    autograd: Any = torch.autograd
    autograd.backward = backward


def backward(tensors: Any, grad_tensors: Any = None) -> None:
    """Runs backward passes as torch does, but within the entered modes."""
    outputs = _tuple(tensors)
    output_gradients = (None,) * len(outputs) if grad_tensors is None else _tuple(grad_tensors)
    pairs = [
        (t, torch.ones_like(t) if g is None else g)
        for t, g in zip(outputs, output_gradients, strict=True)
        if isinstance(t, Tensor) and t.requires_grad
    ]
    outputs, gradients = zip(*pairs, strict=True)
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(outputs, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _in_the_modes(function: Callable[..., Any], waits: Waits) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with AsCuda(), Counted(waits) if waits.counting else contextlib.nullcontext():
            return function(*args, **kwargs)

    return run


def _on_the_device(function: Callable[..., Any], waits: Waits) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with waits.pause(), torch.no_grad(), torch._C.DisableTorchFunction():  # modes would see each line of a kernel
            return function(*args, **kwargs)

    return run


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function of the compiled extension by name."""
    KERNELS[function.__name__] = function
    return function


def triton(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function of `transformer_engine.pytorch.triton.permutation` by name."""
    TRITON[function.__name__] = function
    return function


def _write(out: Tensor | None, value: Tensor, dtype: torch.dtype, accumulate: bool) -> Tensor:
    if out is None:
        return value.to(dtype)
    return out.add_(value) if accumulate else out.copy_(value.view(out.shape))


@kernel
def generic_gemm(
    a: Tensor, transa: bool, b: Tensor, transb: bool, out: Tensor | None, quantizer: Any, out_dtype: Any, bias: Any,
    bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Any, size: int, accumulate: bool, split: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None, None, None]:  # fmt: skip
    """Computes a product, with a bias or its gradient."""
    assert quantizer is None and not gelu
    value = product(a, transa, b, transb)
    has_bias = isinstance(bias, Tensor) and bias.numel() > 0
    dtype = b.dtype if out_dtype is None else DTYPES[int(out_dtype)]
    bias_grad = b.reshape(-1, b.shape[-1]).float().sum(0).to(b.dtype) if grad and has_bias else None
    if has_bias and not grad:
        value = value + bias.float()
    rows = shape(b)[:-1] if not transb else value.shape[:1]
    return _write(out, value.view(*rows, -1), dtype, accumulate), bias_grad, None, None


@kernel
def te_general_grouped_gemm(
    a: list[Tensor], transa: bool, b: list[Tensor], transb: bool, out: list[Tensor], out_dtype: Any,
    splits: list[int], bias: Any, bias_dtype: Any, single: bool, gelu_in: Any, grad: bool, workspaces: Any, size: int,
    accumulate: bool, *_: Any,
) -> Any:  # fmt: skip
    """Computes a product for every expert; adds its bias, or with `grad` writes the gradient of the bias."""
    parts = out[0].split([shape(each)[0] for each in b]) if single else out
    for part, first, second, each in zip(parts, a, b, bias, strict=True):
        value = product(first, transa, second, transb)
        if each.numel() and grad:
            each.copy_(second.sum(0, dtype=torch.float32))
        elif each.numel():
            value = value + each.float()
        _write(part, value, part.dtype, accumulate)
    return bias


@kernel
def get_num_cublas_streams() -> int:
    """Returns the number of cuBLAS workspaces."""
    return 1


@kernel
def get_cublasLt_version() -> int:
    """Returns version 13.1.1, as in the lock file."""
    return 130101


@kernel
def get_cudnn_version() -> int:
    """Returns version 9.20, as in the lock file."""
    return 92000


@kernel
def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, *others: Any
) -> tuple[Tensor, None, Tensor]:
    """Returns the output, no mean, and 1 / RMS of every row."""
    rows, weight = x.float(), weight.float() + float(others[-1])  # zero-centred: 1 + weight
    scale = torch.rsqrt(rows.square().mean(-1) + eps)
    value = (rows * scale[..., None] * weight).to(x.dtype)
    if quantizer is not None:
        return quantize(value, quantizer, out), None, scale
    return value if out is None else out.copy_(value), None, scale


@kernel
def rmsnorm_bwd(dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns the gradients of input and weight."""
    normed = x.float() * scale.view(*x.shape[:-1], 1)
    dy = dy.view(x.shape).float()
    through = dy * (weight.float() + float(others[-1]))
    dx = scale.view(*x.shape[:-1], 1) * (through - normed * (through * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)


def _angles(freqs: Tensor, cu_seqlens: Tensor, size: int, rank: int) -> Tensor:
    """Returns the angles [L, 1, D] of a context rank's tokens: chunks r and 2 cp - 1 - r of each sequence."""
    places = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        chunk = (end - start) // (2 * size) if size > 1 else 0
        if size == 1:
            places.append(torch.arange(end - start))
        else:
            places += [torch.arange(k * chunk, (k + 1) * chunk) for k in (rank, 2 * size - 1 - rank)]
    return freqs[torch.cat(places), 0]


def _rotated(t: Tensor, angles: Tensor, sign: int) -> Tensor:
    width = angles.shape[-1]
    x, rest = t[..., :width].float(), t[..., width:]
    half = width // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return torch.cat([(x * angles.cos() + sign * turned * angles.sin()).to(t.dtype), rest], -1)


@kernel
def fused_rope_forward(
    t: Tensor, freqs: Tensor, start: Any, form: Any, interleaved: bool, cu_seqlens: Tensor, size: int, rank: int
) -> Tensor:
    """Returns the rotation of [L, H, D]."""
    assert start is None and not interleaved
    return _rotated(t, _angles(freqs, cu_seqlens, size, rank), 1)


@kernel
def fused_rope_backward(
    grad: Tensor, freqs: Tensor, start: Any, form: Any, interleaved: bool, cu_seqlens: Tensor, size: int, rank: int
) -> Tensor:
    """Returns the inverse rotation: both halves have the same cosines and sines."""
    return _rotated(grad, _angles(freqs, cu_seqlens, size, rank), -1)


def _chosen(scores: Tensor, topk: int, groups: int | None, group_topk: int | None) -> Tensor:
    """Returns a mask [T, E] of the best experts; groups are ranked by the sum of their best `topk / group_topk`."""
    if groups and group_topk:
        by_group = scores.unflatten(-1, (groups, -1))
        best = by_group.topk(topk // group_topk, -1).values.sum(-1).topk(group_topk, -1).indices
        allowed = torch.zeros(by_group.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        scores = by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(topk, -1).indices, True)


def _probabilities(logits: Tensor, chosen: Tensor, pre_softmax: bool, scale: float | None, score: str) -> Tensor:
    """Returns the weights [T, E] of the chosen experts; 0 for the others."""
    if score == "sigmoid":
        probs = logits.sigmoid() * chosen
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    else:
        probs = logits.softmax(-1) * chosen if pre_softmax else logits.masked_fill(~chosen, float("-inf")).softmax(-1)
    return probs * (scale or 1.0)


@kernel
def fused_topk_with_score_function_fwd(
    logits: Tensor, topk: int, pre_softmax: bool, groups: Any, group_topk: Any, scale: Any, score: str, bias: Any,
    form: int, indices: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the probabilities, the chosen experts, and the saved logits for the backward pass."""
    assert score in ("softmax", "sigmoid") and indices is None and (bias is None or score == "sigmoid")
    x = logits.float()
    scores = x if score == "softmax" else x.sigmoid()
    chosen = _chosen(scores if bias is None else scores + bias.float(), topk, groups, group_topk)
    return _probabilities(x, chosen, pre_softmax, scale, score).to(logits.dtype), chosen, x.clone()


@kernel
def fused_topk_with_score_function_bwd(
    chosen: Tensor, logits: Tensor, grad: Tensor, out: Tensor, topk: int, pre_softmax: bool, scale: Any, score: str,
    *_: Any,
) -> None:  # fmt: skip
    """Writes the gradient of the logits."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        probs = _probabilities(leaf, chosen, pre_softmax, scale, score)
        (gradient,) = torch.autograd.grad(probs, leaf, grad.float())
    out.copy_(gradient)


@triton
def make_row_id_map(routing_map: Tensor, tokens: int, experts: int) -> Tensor:
    """Returns int32 [T, 2 E + 1]: destination of a token's copy at the expert's index, -1 for no copy."""
    places = routing_map.T.reshape(-1).long().cumsum(0).view(experts, tokens).T - 1
    rows = torch.where(routing_map.bool(), places, -1)
    return torch.cat([rows, torch.zeros(tokens, experts + 1, dtype=rows.dtype)], 1).int()


def _copies(rows: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns token, expert and destination of every copy."""
    token, expert = (rows[:, :experts] >= 0).nonzero(as_tuple=True)
    return token, expert, rows[token, expert].long()


@triton
def permute_with_mask_map(
    x: Tensor, rows: Tensor, probs: Tensor | None, scale: Any, pads: Any, tokens: int, experts: int, copies: int,
    hidden: int, scale_hidden: Any,
) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
    """Returns copies of tokens, expert by expert, and the probability of each copy."""
    assert scale is None and pads is None
    token, expert, to = _copies(rows, experts)
    out = x.new_zeros(copies, hidden).index_copy(0, to, x[token])
    moved = None if probs is None else probs.new_zeros(copies).index_copy(0, to, probs[token, expert])
    return out, None, moved


@triton
def unpermute_with_mask_map(
    x: Tensor, rows: Tensor, merging: Any, probs: Tensor | None, pads: Any, tokens: int, experts: int, hidden: int
) -> tuple[Tensor, Tensor | None]:
    """Returns the sum of each token's copies, and the probabilities by token and expert."""
    assert merging is None and pads is None
    token, expert, at = _copies(rows, experts)
    out = torch.zeros(tokens, hidden).index_add(0, token, x[at].float()).to(x.dtype)
    if probs is None:
        return out, None
    back = probs.new_zeros(tokens, experts)
    back[token, expert] = probs[at]
    return out, back


@triton
def make_chunk_sort_map(sizes: Tensor, order: Tensor, tokens: int, splits: int) -> Tensor:
    """Returns the destination of every row, int32 [T]."""
    chunks = torch.arange(tokens).split(sizes.tolist())
    sources = torch.cat([chunks[i] for i in order.tolist()])
    return torch.empty(tokens, dtype=torch.int32).index_copy(0, sources, torch.arange(tokens, dtype=torch.int32))


@triton
def sort_chunks_by_map(
    x: Tensor, rows: Tensor, probs: Tensor | None, tokens: int, hidden: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the rows in the new order, or back in the old order."""
    to = rows.long()

    def move(t: Tensor) -> Tensor:
        return torch.empty_like(t).index_copy(0, to, t) if is_forward else t[to]

    return move(x), None if probs is None else move(probs)
