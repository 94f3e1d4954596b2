"""Proof 8, second half: `PackedAttention` with torch's variable-length kernel, and on a padded grid."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import limits, parts
from benchmarks.gpu.proof import Bench
from skyrl_mega.parallel.dims import ParallelDims

MIB = 2**20


def shapes(bench: Bench) -> dict[str, list[int]]:
    """Returns the lengths of the sequences in a row: even, log-normal, and a long sequence with many short ones."""
    if bench.tiny:
        return {"even": [16] * 4, "skewed": [48] + [4] * 4}
    return {"even": [1024] * 8, "uneven": [4096, 2048, 1024, 512, 256, 128, 64, 64], "skewed": [7168] + [16] * 64}


def prove(bench: Bench) -> None:
    module = packed_attention(bench)
    from skyrl_mega.megatron import packed_attention as layers

    spec: Any = layers
    gemm = limits.gemm_tflops(bench)
    kernel = spec.varlen_attn
    if not bench.cuda or kernel is None:
        bench.left_out("the variable-length kernel: it is not in this torch, or not for this device")
    ways = {"variable lengths": kernel} if bench.cuda and kernel is not None else {}
    for name, lengths in shapes(bench).items():
        q, k, v, row = inputs(bench, lengths)
        bench.figure(f"{name}: slots of the grid for a token", len(lengths) * max(lengths) / sum(lengths), "")
        expected = _plain(q, k, v, lengths)
        for kind, way in {**ways, "on a grid": None}.items():

            def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, row: Any = row) -> Tensor:
                out: Tensor = module(q, k, v, None, packed_seq_params=row)
                return out

            spec.varlen_attn = way  # None: the grid, as in a torch without the kernel
            try:
                close(bench, f"{name}, {kind}", run().detach(), expected)
                speed(bench, f"{name}, {kind}", run, (q, k, v), lengths, gemm)
            finally:
                spec.varlen_attn = kernel


def inputs(bench: Bench, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Returns query [T, 16, 128], key and value [T, 2, 128] of a packed row, and the row's description."""
    from skyrl_mega.megatron.packing import pack

    heads, groups, width = (4, 2, 16) if bench.tiny else (16, 2, 128)
    micro = pack(parts.rows(lengths, 100), context=1, context_rank=0, tensor=1).to(bench.device)
    generator = torch.Generator(bench.device).manual_seed(0)
    tokens = micro.tokens.shape[1]
    q, k, v = (
        torch.randn(tokens, n, width, generator=generator, device=bench.device).to(torch.bfloat16).requires_grad_()
        for n in (heads, groups, groups)
    )
    return q, k, v, micro.row


def packed_attention(bench: Bench) -> Any:
    """Returns the attention module as the local layer spec builds it."""
    if not bench.cuda:
        from skyrl_mega.megatron import cpu

        cpu.stand_in()
    from skyrl_mega.megatron.layer_spec import PackedAttention
    from skyrl_mega.megatron.model import transformer_config

    hf, _ = parts.slice_of_30b(tiny_size=bench.tiny)
    config = transformer_config(hf, parts.policy_config(), ParallelDims(), torch.bfloat16, bench.device)
    return PackedAttention(config, 1, pg_collection=SimpleNamespace(cp=None))


def _plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Returns the attention of each sequence, computed separately in float32."""
    groups, at, outputs = q.shape[1] // k.shape[1], 0, []
    with torch.no_grad():
        for n in lengths:
            part = [t[at : at + n].float().transpose(0, 1) for t in (q, k, v)]
            key, value = (t.repeat_interleave(groups, dim=0) for t in part[1:])
            out = torch.nn.functional.scaled_dot_product_attention(part[0], key, value, is_causal=True)
            outputs.append(out.transpose(0, 1).flatten(1))
            at += n
    return torch.cat(outputs)


def close(bench: Bench, name: str, actual: Tensor, wanted: Tensor) -> None:
    """Compares the tokens of sequences with the wanted values; padding after them is ignored."""
    off = (actual[: len(wanted)].float() - wanted).norm() / wanted.norm()
    bench.figure(f"{name}: off float32 by", float(off), "", at_most=0.01)


def speed(bench: Bench, name: str, run: Any, leaves: tuple[Tensor, ...], lengths: list[int], gemm: float) -> None:
    """Records the rate of forward and backward against a large matrix product, for causal work only, and the peak
    memory."""

    def both() -> None:
        torch.autograd.grad(run().sum(), leaves)

    seconds = bench.seconds(both, repeats=5, warm=2)
    heads, width = leaves[0].shape[1:]
    work = sum(2 * n * n * heads * width for n in lengths)  # causal: half of 4·n²·H·D
    bench.figure(f"{name}: forward and backward", seconds * 1e3, "ms")
    bench.figure(f"{name}: rate", 3.5 * work / seconds / 1e12, "TFLOP/s", limit=gemm, limit_of="a large matrix product")
    if bench.cuda:
        base = torch.cuda.memory_allocated()
        bench.figure(f"{name}: memory", (bench.peak(both) - base) / MIB, "MiB")
