"""Proof 8, first half: log-probs and entropy at the real vocabulary, fused and chunked: accuracy, speed and memory."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gpu import limits, parts
from benchmarks.gpu.proof import Bench
from benchmarks.head import CHUNK, SHAPES, TINY, Measured

GIB = 2**30
CHECKED = 64
"""Number of tokens compared with a plain soft-max."""
SLOWEST = 1.0
"""Upper bound: time of the fused head, forward and backward, over the chunked head's."""
LARGEST = 1 / 16
"""Upper bound: memory of the fused head without its gradients over the chunked head's, if a rank holds the whole
vocabulary. Most of that memory is the float32 gradient of the weight. On an H200 the share is 1/28 at 30B's width and
1/17 at 235B's: the gradient of the hidden states, which the fused head needs too, is twice as wide there."""


def prove(bench: Bench) -> None:
    store = dist.TCPStore("127.0.0.1", parts.free_port(), 1, is_master=True)
    if bench.cuda:
        torch.cuda.set_device(bench.device)
    dist.init_process_group("nccl" if bench.cuda else "gloo", store=store, rank=0, world_size=1)
    gemm = limits.gemm_tflops(bench)
    for shape in TINY if bench.tiny else SHAPES:
        head = Measured(shape, bench.device)
        ways = {"fused": None, "chunked": 16 if bench.tiny else CHUNK}
        for name, chunk in ways.items():
            _right(bench, head, f"{shape.name}, {name}", chunk)
        seconds = {name: _timed(bench, head, f"{shape.name}, {name}", chunk, gemm) for name, chunk in ways.items()}
        if not bench.cuda:
            bench.left_out(f"memory of {shape.name}: torch counts it on CUDA")
            continue
        bench.figure(f"{shape.name}: time over the chunked head's", seconds["fused"] / seconds["chunked"], "",
                     at_most=SLOWEST)  # fmt: skip
        taken = {name: _memory(bench, head, f"{shape.name}, {name}", chunk) for name, chunk in ways.items()}
        bench.figure(f"{shape.name}: memory over the chunked head's", taken["fused"] / taken["chunked"], "",
                     at_most=LARGEST if shape.tensor == 1 else None)  # fmt: skip


def _timed(bench: Bench, head: Measured, name: str, chunk: int | None, gemm: float) -> float:
    """Measures forward, then forward and backward, and returns the seconds of both passes together."""
    for what, work, products in (("forward", head.forward, 1), ("forward and backward", head.both, 4)):
        seconds = bench.seconds(partial(work, chunk), repeats=3)
        bench.figure(f"{name}: {what}", seconds, "s")
        bench.figure(f"{name}: {what}, {products} products", products * head.shape.product / seconds / 1e12, "TFLOP/s",
                     limit=gemm, limit_of="a large matrix product")  # fmt: skip
    return seconds


def _memory(bench: Bench, head: Measured, name: str, chunk: int | None) -> int:
    """Returns the peak bytes of forward and backward, without the weight's gradient."""
    planned = dict(zip(("forward", "forward and backward"), head.shape.buffers(2), strict=True))
    for what, work in (("forward", head.forward), ("forward and backward", head.both)):
        head.forget()
        base = torch.cuda.memory_allocated()
        taken = bench.peak(partial(work, chunk)) - base - (head.weight.nbytes if what != "forward" else 0)
        limit = {} if chunk else {"limit": planned[what] / GIB, "limit_of": "counted (kernels/linear_logprobs.py)"}
        bench.figure(f"{name}: memory of {what}", taken / GIB, "GiB", **limit)
        if not chunk:
            few = 64 * head.shape.tokens + (2 << 20)  # a few numbers per token, and the allocator's rounding
            bench.holds(f"{name}: memory of {what} is what is counted", taken <= planned[what] + few, taken)
    return taken


def _right(bench: Bench, head: Measured, name: str, chunk: int | None) -> None:
    """Compares log-probs, entropy and gradient with torch's soft-max of the same logits in float64."""
    x, targets = head.hidden, head.targets
    at = torch.linspace(0, len(x) - 1, min(CHECKED, len(x)), device=x.device).long()
    few = x.detach()[at].clone().requires_grad_()
    logprobs, entropy = head.run(few, targets[at], chunk)
    (gradient,) = torch.autograd.grad(logprobs.sum(), few)
    exact = few.detach().double().requires_grad_()
    table = (exact @ head.weight.detach().double().T / 0.7).log_softmax(-1)
    wanted = table.gather(1, targets[at, None])[:, 0]
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    # Chunked logits are bfloat16: half a unit in the last place of numbers up to 8. Fused logits are float32.
    near = 0.03 if chunk else 1e-3
    off = float((logprobs.double() - wanted).abs().max())
    bench.figure(f"{name}: log-probs against float64", off, "nats", at_most=near)
    other = -(table.exp() * table).sum(-1)
    off = float((entropy.double() - other).abs().max())
    bench.figure(f"{name}: entropy against float64", off, "nats", at_most=near)
    off = float((gradient.double() - slope).norm() / slope.norm())
    bench.figure(f"{name}: gradient against float64", off, "", at_most=0.02)
