"""Proof 8, first half: log-probs and entropy at the real vocabulary: right, how fast, and in how much memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import limits, parts
from benchmarks.gpu.proof import Bench
from skyrl_mega.megatron.vocab_parallel import vocab_parallel_logprobs
from skyrl_mega.models.published import known
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.activations import logits

GIB = 2**30
CHUNK = 1024
CHECKED = 64
"""Tokens that are compared with a plain soft-max."""


def prove(bench: Bench) -> None:
    tokens, hidden, vocab = (64, 32, 500) if bench.tiny else (8192, 2048, 151936)
    chunk = 16 if bench.tiny else CHUNK
    store = dist.TCPStore("127.0.0.1", parts.free_port(), 1, is_master=True)
    if bench.cuda:
        torch.cuda.set_device(bench.device)
    dist.init_process_group("nccl" if bench.cuda else "gloo", store=store, rank=0, world_size=1)
    generator = torch.Generator(bench.device).manual_seed(0)
    x, w = (
        (torch.randn(n, hidden, generator=generator, device=bench.device) * scale).to(torch.bfloat16).requires_grad_()
        for n, scale in ((tokens, 1.0), (vocab, 0.02))
    )
    targets = torch.randint(0, vocab, (tokens,), generator=generator, device=bench.device)

    def run(h: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        world = dist.group.WORLD
        assert world is not None
        return vocab_parallel_logprobs(h, w, at, vocab=vocab, temperature=0.7, chunk=chunk, group=world)

    _right(bench, run, x, w, targets)
    gemm = limits.gemm_tflops(bench)
    product = 2 * tokens * hidden * vocab

    def forward() -> None:
        with torch.no_grad():
            run(x, targets)

    def both() -> None:
        x.grad = w.grad = None
        run(x, targets)[0].sum().backward()

    for name, work, products in (("forward", forward, 1), ("forward and backward", both, 4)):
        seconds = bench.seconds(work, repeats=3)
        bench.figure(f"{name}, {tokens} tokens", seconds, "s")
        bench.figure(f"{name}: {products} products", products * product / seconds / 1e12, "TFLOP/s", limit=gemm,
                     limit_of="a large matrix product")  # fmt: skip
    if bench.cuda:
        hf = known("Qwen/Qwen3-30B-A3B")
        said = logits(parts.described(hf), ParallelDims(), tokens, 2, chunk)
        for name, work, estimate in (("forward", forward, said[1]), ("forward and backward", both, said[0])):
            x.grad = w.grad = None
            base = torch.cuda.memory_allocated()
            extra = bench.peak(work) - base
            bench.figure(f"memory of {name}", extra / GIB, "GiB", limit=estimate / GIB, limit_of="sizing, estimated")
    else:
        bench.left_out("memory: torch counts it on CUDA")


def _right(
    bench: Bench, run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], x: Tensor, w: Tensor, targets: Tensor
) -> None:
    """Against torch's own soft-max of the same logits, in float64."""
    at = torch.linspace(0, len(x) - 1, min(CHECKED, len(x)), device=x.device).long()
    few = x.detach()[at].clone().requires_grad_()
    found, entropy = run(few, targets[at])
    (gradient,) = torch.autograd.grad(found.sum(), few)
    exact = few.detach().double().requires_grad_()
    table = (exact @ w.detach().double().T / 0.7).log_softmax(-1)
    wanted = table.gather(1, targets[at, None])[:, 0]
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    # The logits are bfloat16's: half a unit in the last place of numbers up to 8.
    bench.figure("log-probs against float64", float((found.double() - wanted).abs().max()), "nats", at_most=0.03)
    other = -(table.exp() * table).sum(-1)
    bench.figure("entropy against float64", float((entropy.double() - other).abs().max()), "nats", at_most=0.03)
    off = float((gradient.double() - slope).norm() / slope.norm())
    bench.figure("gradient against float64", off, "", at_most=0.02)
