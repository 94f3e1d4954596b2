"""Proof: the policy's slice is offloaded for an engine and loaded back: bytes, bits, seconds, and later steps.

This is the effect of `residency.keep: []` in both 30B recipes. Storages shrink to nothing under expandable segments and
the bytes wait in pinned host memory. Afterwards the buckets and the optimizer's shards see the bytes again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu import limits, parts
from benchmarks.gpu.processes import Job, together
from benchmarks.gpu.proof import Bench
from benchmarks.gpu.reference import logprobs, off
from benchmarks.gpu.slice import EACH, GIB, TOKENS, open_slice
from skyrl_mega.config.residency import POLICY
from skyrl_mega.planner.memory import OUTSIDE_BUDGET, model_state

if TYPE_CHECKING:
    from skyrl_mega.megatron.worker import ModelWorker

CYCLES = 3
SLACK = 0.5
"""GiB that the GPU may hold beyond the planned rest: pages of 2 MiB at the edges of used memory."""


def prove(bench: Bench) -> None:
    """Offloads and reloads everything a few times, while foreign bytes occupy the memory in between."""
    from skyrl_mega.megatron.objectives import supervised

    tokens, each = (64, 16) if bench.tiny else (TOKENS, EACH)
    hf, parallel = parts.slice_of_30b(tiny_size=bench.tiny)
    rank = open_slice(bench)
    batch = parts.rows([each] * (tokens // each), hf["vocab_size"])
    rank.train([batch], supervised)
    counted = model_state(parts.described(hf), parallel, parallel.coordinates(0), 2)
    moving = counted.weights + counted.optimizer

    # A GPU adds sums over experts in any order, so two equal calls differ a little.
    first, again = logprobs(rank, batch), logprobs(rank, batch)
    noise = 3 * off(again, first) + 1e-6
    before, bits = _free(bench), _fingerprint(rank)
    seconds: dict[str, list[float]] = {"offload": [], "onload": []}
    for cycle in range(CYCLES):
        start = time.perf_counter()
        copied = rank.offload(POLICY)
        bench.synchronise()
        seconds["offload"].append(time.perf_counter() - start)
        bench.holds(f"cycle {cycle}: it copies what the planner says", copied == moving, f"{copied}, not {moving}")
        if bench.cuda:
            gained = _free(bench) - before
            bench.figure(f"cycle {cycle}: memory that the policy gives back", gained / GIB, "GiB",
                         limit=counted.total / GIB, limit_of="weights, gradients and optimizer",
                         at_least=counted.total / GIB - SLACK)  # fmt: skip
            if cycle == 0:
                _second_process(bench)
            else:
                _scribble(int(0.9 * gained), bench.device)
        start = time.perf_counter()
        rank.onload(POLICY)
        bench.synchronise()
        seconds["onload"].append(time.perf_counter() - start)
    bench.holds("every bit of weights and optimizer is back", _fingerprint(rank) == bits)
    for name, to_device in (("offload", False), ("onload", True)):
        rate = limits.host_gb_s(bench, pinned=True, to_device=to_device)
        bench.figure(f"{name}, the first time", seconds[name][0], "s")
        bench.figure(f"{name}, again", min(seconds[name][1:]), "s", limit=moving / rate / 1e9,
                     limit_of="its bytes in one pinned copy")  # fmt: skip

    bench.figure("log-probs are off those before it by", off(logprobs(rank, batch), first), "nats", at_most=noise)
    losses = [rank.train([batch], supervised)["loss"] for _ in range(3)]
    bench.holds("steps after it learn", losses[-1] < losses[0], losses)
    if not bench.cuda:
        bench.left_out("the GPU's free memory, and a second process in it")


def _free(bench: Bench) -> int:
    if not bench.cuda:
        return 0
    bench.synchronise()
    return torch.cuda.mem_get_info()[0]


def _scribble(size: int, device: torch.device) -> None:
    """Overwrites the freed memory, as an engine's cache does."""
    torch.empty(size, dtype=torch.uint8, device=device).fill_(0xA5)
    torch.cuda.empty_cache()


def _second_process(bench: Bench) -> None:
    """Starts a process that takes most of the free memory, as a colocated engine does, and measures the CUDA
    context."""
    free = _free(bench)
    wanted = int(0.9 * free)
    [left] = together(Job(_engine, (wanted,)), timeout_s=40)
    context = free - wanted - left
    bench.figure("memory of a second process beside its tensors", context / GIB, "GiB", limit=OUTSIDE_BUDGET / GIB,
                 limit_of="the planner's reserve beside an engine", at_most=OUTSIDE_BUDGET / GIB)  # fmt: skip
    bench.figure("memory of the GPU not returned by it", (free - _free(bench)) / GIB, "GiB", at_most=0.1)


def _engine(size: int) -> int:
    """Fills `size` bytes in a separate process and returns the GPU's free memory at that moment."""
    filler = torch.empty(size, dtype=torch.uint8, device="cuda").fill_(0xA5)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    del filler
    return free


def _fingerprint(rank: ModelWorker) -> list[int]:
    """Returns a position-dependent sum of the bits of each weight and optimizer tensor."""
    from skyrl_mega.megatron.residency import optimizer_state

    tensors = [*rank.weights().values(), *optimizer_state(rank.optimizer)]
    return [_bits(t) for t in tensors]


def _bits(t: Tensor) -> int:
    flat = t.detach().contiguous().flatten()
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]).long()
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return int((words * places).sum())
