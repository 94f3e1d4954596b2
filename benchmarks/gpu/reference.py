"""Proof 7: swapping the reference's weights in and out at the slice's size, and the cost of each method."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import limits, parts
from benchmarks.gpu.proof import Bench
from benchmarks.gpu.slice import EACH, GIB, TOKENS, open_slice

if TYPE_CHECKING:
    from skyrl_mega.megatron.worker import ModelWorker
    from skyrl_mega.trajectories.sequences import Sequences


def prove(bench: Bench) -> None:
    tokens, each = (64, 16) if bench.tiny else (TOKENS, EACH)
    hf, _ = parts.slice_of_30b(tiny_size=bench.tiny)
    rank = open_slice(bench)
    params = list(rank.weights().values())
    size = sum(p.nbytes for p in params)
    _ways(bench, params, size)

    start = time.perf_counter()
    parts.give_reference(rank)
    bench.synchronise()
    bench.figure("keeping the reference", time.perf_counter() - start, "s")
    batch = parts.rows([each] * (tokens // each), hf["vocab_size"])
    # A GPU adds sums over experts in any order, so two equal calls differ a little.
    first, again = logprobs(rank, batch), logprobs(rank, batch)
    noise = 3 * off(again, first) + 1e-6
    bench.figure("the same weights as reference: log-probs off by", off(logprobs(rank, batch, True), first), "nats",
                 at_most=noise)  # fmt: skip
    with torch.no_grad():
        for p in rank.weights().values():
            p.mul_(1.5)
    before = [p.sum(dtype=torch.float64) for p in rank.weights().values()]
    bench.figure("other weights: log-probs off by", off(logprobs(rank, batch), first), "nats", at_least=100 * noise)
    bench.figure("the reference's, still", off(logprobs(rank, batch, True), first), "nats", at_most=noise)
    after = [p.sum(dtype=torch.float64) for p in rank.weights().values()]
    bench.holds("the policy has its own again", all(bool(a == b) for a, b in zip(before, after, strict=True)))

    alone = bench.seconds(lambda: rank.logprobs([batch]), repeats=3)
    swapped = bench.seconds(lambda: rank.logprobs([batch], reference=True), repeats=3)
    rate = limits.host_gb_s(bench, pinned=True)
    bench.figure("swapping, as the policy does it", swapped - alone, "s", limit=size / rate / 1e9,
                 limit_of="the weights once from pinned memory")  # fmt: skip
    plain = bench.peak(lambda: rank.logprobs([batch]))
    peak = bench.peak(lambda: rank.logprobs([batch], reference=True))
    if bench.cuda:
        bench.figure("memory that the reference's log-probs need beside the policy's", (peak - plain) / GIB, "GiB",
                     limit=size / GIB, limit_of="the weights")  # fmt: skip


def logprobs(rank: ModelWorker, batch: Sequences, reference: bool = False) -> np.ndarray:
    """Returns the log-probs of a batch's tokens [T], with the policy's weights or the reference's."""
    answers = rank.logprobs([batch], reference=reference)
    assert answers is not None
    return answers[0][0].numpy()


def off(actual: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the root mean square of the differences."""
    return float(np.sqrt(np.mean((actual.astype(np.float64) - wanted) ** 2)))


def _ways(bench: Bench, params: list[Tensor], size: int) -> None:
    """Measures each method to load other weights: into new tensors, or into the storage of the present ones."""
    rate = limits.host_gb_s(bench, pinned=True)
    for pinned in (False, True):
        host = [torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned and bench.cuda).copy_(p) for p in params]
        name = "pinned" if pinned else "pageable"

        def beside(host: list[Tensor] = host) -> object:
            return [h.to(bench.device, non_blocking=True, copy=True) for h in host]

        def inside(host: list[Tensor] = host) -> None:
            for p, h in zip(params, host, strict=True):
                p.copy_(h, non_blocking=True)

        base = torch.cuda.memory_allocated() if bench.cuda else 0
        for where, work in (("beside", beside), ("into the storage", inside)):
            extra = bench.peak(work) - base if bench.cuda else 0
            seconds = bench.seconds(work, repeats=2, warm=0)
            bench.figure(f"{name}, {where}", size / seconds / 1e9, "GB/s", limit=rate, limit_of="one large pinned copy")
            if bench.cuda:
                bench.figure("… takes", extra / GIB, "GiB")
        if pinned:

            def park(host: list[Tensor] = host) -> None:
                for p, h in zip(params, host, strict=True):
                    h.copy_(p, non_blocking=True)

            seconds = bench.seconds(park, repeats=2, warm=0)
            bench.figure("parking the policy's own in pinned memory", size / seconds / 1e9, "GB/s",
                         limit=limits.host_gb_s(bench, pinned=True, to_device=False),
                         limit_of="one large pinned copy")  # fmt: skip
