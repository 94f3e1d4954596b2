"""Proof 6: one rank of Qwen3-30B-A3B at TP2 EP8 with a quarter of its optimizer: bytes against sizing, and speed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import limits, parts
from benchmarks.gpu.proof import Bench
from skyrl_mega.config.derived import logit_chunk
from skyrl_mega.planner.activations import LongestRow, activations
from skyrl_mega.planner.flops import flops
from skyrl_mega.planner.memory import model_state

if TYPE_CHECKING:
    from skyrl_mega.megatron.worker import ModelWorker

GIB = 2**30
TOKENS, EACH = 8192, 1024
"""Tokens of a micro-batch, and tokens of each sequence."""
CHUNK = 1024
DATA_SHEET = 989.0
"""TFLOP/s of an H100 SXM or H200 in dense bfloat16."""
WITHIN = 0.10
"""Tolerance of a peak against the estimate, relative."""
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def prove(bench: Bench) -> None:
    """Records all figures of the slice with the local layer spec."""
    from skyrl_mega.megatron.objectives import supervised

    tokens, each = (64, 16) if bench.tiny else (TOKENS, EACH)
    hf, parallel = parts.slice_of_30b(tiny_size=bench.tiny)
    decoder = parts.described(hf)
    start = time.perf_counter()
    rank = open_slice(bench)
    bench.figure("building it", time.perf_counter() - start, "s")
    batch = parts.rows([each] * (tokens // each), hf["vocab_size"])
    watched = Watched(bench, rank)
    rank.train([batch], supervised)  # warm-up: Adam's moments, first use of the allocator and of cuBLAS

    counted = model_state(decoder, parallel, parallel.coordinates(0), 2)
    wanted = (counted.weights, counted.gradients, counted.optimizer)
    for name, measured, planned in zip(
        ("weights", "gradients", "optimizer"), parts.held_bytes(rank), wanted, strict=True
    ):
        bench.figure(f"{name}", measured / GIB, "GiB", limit=planned / GIB, limit_of="sizing, counted")
        bench.holds(f"{name} are what sizing counts", measured == planned, f"{measured} bytes, not {planned}")

    chunk = logit_chunk(rank.policy, bench.device.type)
    estimate = activations(decoder, parallel, 0, LongestRow(tokens, 1), 2, recompute="full", logit_chunk=chunk)
    if bench.cuda:
        inference = bench.peak(lambda: rank.logprobs([batch]))
        torch.cuda.reset_peak_memory_stats()
        rank.train([batch], supervised)
        peaks = {
            "log-probs": (inference, estimate.forward + estimate.forward_logits),
            "forward and backward": (watched.before_update, estimate.train + estimate.train_logits),
        }
        for name, (measured, transient) in peaks.items():
            planned = counted.total + transient
            bench.figure(f"peak of {name}", measured / GIB, "GiB", limit=planned / GIB, limit_of="sizing, estimated")
            bench.figure("… over its estimate", measured / planned, "", at_least=1 - WITHIN, at_most=1 + WITHIN)
        bench.figure("peak of the optimizer's step", watched.update / GIB, "GiB")
        bench.figure("reserved by the allocator at most", torch.cuda.max_memory_reserved() / GIB, "GiB")
    else:
        bench.left_out("peaks, and launches and waits of a layer: torch counts them on CUDA")

    work = flops(decoder)
    body = tokens * (work.matrices + work.attention * each / 2)
    gemm = limits.gemm_tflops(bench)
    forward = bench.seconds(lambda: rank.logprobs([batch]), repeats=3)
    whole = bench.seconds(lambda: rank.train([batch], supervised), repeats=3, warm=0)
    update = watched.seconds
    bench.figure(f"log-probs of {tokens} tokens", forward, "s")
    bench.figure("a training step of them", whole, "s")
    bench.figure("… of which the optimizer", update, "s")
    for name, seconds, times in (("log-probs", forward, 1), ("forward and backward", whole - update, 3)):
        bench.figure(f"{name}, recomputing not counted", times * body / seconds / 1e12, "TFLOP/s", limit=gemm,
                     limit_of="a large matrix product")  # fmt: skip
    bench.note("share of the data sheet (MFU)", 3 * body / (whole - update) / 1e12 / DATA_SHEET)
    for name, work_of in (("log-probs", lambda: rank.logprobs([batch])),
                          ("training", lambda: rank.train([batch], supervised))):  # fmt: skip
        for what, count in counts(bench, work_of).items():
            bench.figure(f"{what} of a layer, {name}", count / decoder.layers, "")


def open_slice(
    bench: Bench, spec: str = "local", layers: int = 48, fusions: dict[str, Any] | None = None
) -> ModelWorker:
    """Opens the rank with random weights."""
    hf, parallel = parts.slice_of_30b(tiny_size=bench.tiny, layers=layers)
    policy = parts.policy_config(spec, recompute="full", logit_chunk=CHUNK, micro_tokens=TOKENS)
    if fusions is not None:
        policy = replace(policy, fusions=[])  # only the given fusions
    return parts.open_rank(hf, parallel, device=bench.device, policy=policy, fusions=fusions)


class Watched:
    """Records memory and time before and after the optimizer's step."""

    def __init__(self, bench: Bench, rank: ModelWorker) -> None:
        self.before_update = self.update = 0
        self.seconds = 0.0
        whole: Any = rank.optimizer
        step = whole.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            bench.synchronise()
            if bench.cuda:
                self.before_update = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            done = step(*args, **kwargs)
            bench.synchronise()
            self.seconds = time.perf_counter() - start
            if bench.cuda:
                self.update = torch.cuda.max_memory_allocated()
            return done

        whole.step = watched


def counts(bench: Bench, work: Any) -> dict[str, int]:
    """Returns the number of kernel launches and of host waits; empty if the profiler records no launch."""
    if not bench.cuda:
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        bench.synchronise()
    results: Any = recorded.profiler
    names = [event.name() for event in results.kineto_results.events()]
    if not any(name in LAUNCHES for name in names):
        bench.left_out(f"launches: the profiler sees none among {len(names)} events")
        return {}
    return {
        "launches": sum(name in LAUNCHES for name in names),
        "waits of the host": sum(name in SYNCS for name in names),
    }
