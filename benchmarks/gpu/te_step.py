"""Proofs: Qwen3-30B-A3B's slice trains in FP8 with Transformer Engine: numbers, memory against the planner, and speed.

`prove_numbers` compares a few layers in bfloat16, with FP8 products, and with FP8 parameters, from the same files on
the same batch. Another process reads a checkpoint of the last precision. `prove` measures the whole slice.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import limits, parts, slice
from benchmarks.gpu.processes import Job, together
from benchmarks.gpu.proof import Bench
from skyrl_mega.config.derived import fused, logit_chunk
from skyrl_mega.config.schema import ClusterConfig, Config, PolicyConfig
from skyrl_mega.config.schema.precision import PrecisionConfig
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.activations import LongestRow, activations
from skyrl_mega.planner.flops import flops
from skyrl_mega.planner.memory import fp8_copies, model_state

PRECISIONS = {
    "bfloat16": PrecisionConfig(),
    "FP8 products": PrecisionConfig(recipe="fp8_blockwise"),
    "FP8 products and parameters": PrecisionConfig(recipe="fp8_blockwise", parameters="fp8"),
}
LAYERS, VOCABULARY, STEPS = 4, 8192, 3
"""Sizes of the compared part."""
CLOSE = {"losses": 0.01, "gradient norms": 0.1}
"""Tolerance of FP8 against bfloat16, relative: losses agree to a hundredth in the rehearsal (tests/cuda)."""
TIMEOUT_S = 120.0


def prove_numbers(bench: Bench) -> None:
    """Compares a few layers in each precision, and reads the checkpoint of FP8 parameters in a new process."""
    names = [*PRECISIONS] if bench.cuda else [*PRECISIONS][:2]
    folder = str(bench.folder)
    parts.random_files(bench.folder / "model", _few_layers(bench))
    answers = together(*(Job(_train, (bench.tiny, folder, name)) for name in names), timeout_s=TIMEOUT_S)
    seen = dict(zip(names, answers, strict=True))
    _compare(bench, seen)
    if bench.cuda:
        _checkpoint(bench, seen[names[-1]], together(Job(_go_on, (bench.tiny, folder)), timeout_s=TIMEOUT_S)[0])
    else:
        bench.left_out("parameters in FP8 and their checkpoint: they exist on CUDA alone")


def prove(bench: Bench) -> None:
    """Measures the whole slice in FP8."""
    names, folder = [*PRECISIONS], str(bench.folder)
    gemm = limits.gemm_tflops(bench)
    if bench.cuda:
        for name in names[:0:-1]:
            (measured,) = together(Job(_measure, (bench.tiny, folder, name)), timeout_s=TIMEOUT_S)
            _report(bench, name, measured, gemm)
    else:
        _report(bench, names[1], _measure(bench.tiny, folder, names[1]), gemm)
        bench.left_out("parameters in FP8, and peaks of memory: they exist on CUDA alone")


def _policy(name: str, cuda: bool) -> PolicyConfig:
    spec = "te" if cuda else "local"
    return parts.policy_config(
        spec, recompute="full", logit_chunk=slice.CHUNK, micro_tokens=slice.TOKENS, precision=PRECISIONS[name]
    )


# ---- a few layers ----------------------------------------------------------------------------------------------------


def _few_layers(bench: Bench) -> dict[str, Any]:
    """Returns the config.json of the compared part."""
    hf, _ = parts.slice_of_30b(tiny_size=bench.tiny, layers=LAYERS)
    return hf | {"vocab_size": min(hf["vocab_size"], VOCABULARY)}


def _small(bench: Bench, name: str) -> tuple[Any, Any]:
    """Opens a rank with the whole optimizer, and returns rank and batch."""
    hf = _few_layers(bench)
    rank = parts.open_rank(hf, ParallelDims(), device=bench.device, policy=_policy(name, bench.cuda))
    lengths = [16] * 8 if bench.tiny else [512] * 8
    return rank, parts.rows(lengths, hf["vocab_size"])


def _train(tiny: bool, folder: str, name: str) -> dict[str, Any]:
    """Returns losses and gradient norms of a few steps; with FP8 parameters also saves a checkpoint and takes one more
    step."""
    from skyrl_mega.megatron.objectives import supervised

    bench = Bench(Path(folder) / "unread", Path(folder), tiny=tiny)
    rank, batch = _small(bench, name)
    # Master weights come from the files. Rounded weights, far from every border between two FP8 numbers, would stay
    # as they are for many small steps.
    rank.load(Path(folder) / "model")
    metrics = [rank.train([batch], supervised) for _ in range(STEPS)]
    seen = {"losses": [m["loss"] for m in metrics], "gradient norms": [m["grad_norm"] for m in metrics]}
    if rank.policy.precision.parameters == "fp8":
        saved = Path(folder) / "checkpoint"
        saved.mkdir()
        rank.save(saved)
        seen |= {"weights": _sums(rank), "next": rank.train([batch], supervised)["loss"]}
    return seen


def _go_on(tiny: bool, folder: str) -> dict[str, Any]:
    """Reads the checkpoint in a new process and returns the weights' sums and the next loss."""
    from skyrl_mega.megatron.objectives import supervised

    bench = Bench(Path(folder) / "unread", Path(folder), tiny=tiny)
    rank, batch = _small(bench, [*PRECISIONS][-1])
    rank.restore(Path(folder) / "checkpoint")
    return {"weights": _sums(rank), "next": rank.train([batch], supervised)["loss"]}


def _sums(rank: Any) -> dict[str, float]:
    return {name: float(w.double().sum()) for name, w in rank.weights().items()}


def _compare(bench: Bench, seen: dict[str, dict[str, Any]]) -> None:
    exact = seen["bfloat16"]
    for name, answer in seen.items():
        bench.note(f"{name}: losses", answer["losses"])
        bench.holds(f"{name}: the loss falls", answer["losses"][-1] < answer["losses"][0], answer["losses"])
        for kind, bound in CLOSE.items():
            off = float(np.max(np.abs(np.array(answer[kind]) / np.array(exact[kind]) - 1)))
            if name != "bfloat16":
                bench.figure(f"{name}: {kind} off bfloat16's by", off, "", at_most=bound)


def _checkpoint(bench: Bench, saved: dict[str, Any], read: dict[str, Any]) -> None:
    wrong = sum(saved["weights"][name] != read["weights"][name] for name in saved["weights"])
    bench.figure("FP8 checkpoint: parameters that are read otherwise", wrong, "", at_most=0)
    off = abs(read["next"] / saved["next"] - 1)
    bench.figure("FP8 checkpoint: the next step's loss is off by", off, "", at_most=1e-3)


# ---- the whole slice -------------------------------------------------------------------------------------------------


def _measure(tiny: bool, folder: str, name: str) -> dict[str, Any]:
    """Returns seconds, peaks and launches of the slice's steps, with the planner's estimates."""
    from skyrl_mega.megatron.objectives import supervised

    bench = Bench(Path(folder) / "unread", Path(folder), tiny=tiny)
    tokens, each = (64, 16) if tiny else (slice.TOKENS, slice.EACH)
    hf, parallel = parts.slice_of_30b(tiny_size=tiny)
    decoder, policy = parts.described(hf), _policy(name, bench.cuda)
    rank = parts.open_rank(hf, parallel, device=bench.device, policy=policy)
    batch = parts.rows([each] * (tokens // each), hf["vocab_size"])
    watched = slice.Watched(bench, rank)

    def step() -> None:
        rank.train([batch], supervised)

    step()  # warm-up: Adam's moments, first use of the allocator and of cuBLAS
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    whole = bench.seconds(step, repeats=3, warm=1)
    forward = bench.seconds(lambda: rank.logprobs([batch]), repeats=3)
    work = flops(decoder)
    counted = model_state(decoder, parallel, parallel.coordinates(0), 2)
    chunk = logit_chunk(policy, bench.device.type)
    estimate = activations(
        decoder, parallel, 0, LongestRow(tokens, 1), 2, recompute="full", logit_chunk=chunk, spec=rank.spec,
        fused=fused(policy, rank.spec, True),
    )  # fmt: skip
    config = replace(Config(), policy=policy, cluster=ClusterConfig(device=bench.device.type))
    copies = fp8_copies(config, decoder, parallel, 0)[1]
    return {
        "flops": tokens * (work.matrices + work.attention * each / 2),
        "tokens": tokens,
        "whole": whole,
        "update": watched.seconds,
        "forward": forward,
        "peak": watched.before_update,
        "planned": counted.total + copies + estimate.train + estimate.train_logits,
        "counts": {what: count / decoder.layers for what, count in slice.counts(bench, step).items()},
    }


def _report(bench: Bench, name: str, seen: dict[str, Any], gemm: float) -> None:
    bench.figure(f"{name}: a training step of {seen['tokens']} tokens", seen["whole"], "s")
    bench.figure(f"{name}: … of which the optimizer", seen["update"], "s")
    passes = (("log-probs", seen["forward"], 1), ("forward and backward", seen["whole"] - seen["update"], 3))
    for what, seconds, times in passes:
        rate = times * seen["flops"] / seconds / 1e12
        bench.figure(f"{name}: {what}, recomputing not counted", rate, "TFLOP/s", limit=gemm,
                     limit_of="a large bfloat16 product")  # fmt: skip
    bench.note(f"{name}: share of the bfloat16 data sheet (MFU)", rate / slice.DATA_SHEET)
    if seen["peak"]:
        bench.figure(f"{name}: peak of forward and backward", seen["peak"] / slice.GIB, "GiB",
                     limit=seen["planned"] / slice.GIB, limit_of="the planner")  # fmt: skip
        bench.figure(f"{name}: … over the planner's", seen["peak"] / seen["planned"], "",
                     at_least=1 - slice.WITHIN, at_most=1 + slice.WITHIN)  # fmt: skip
    for what, count in seen["counts"].items():
        bench.figure(f"{name}: {what} of a layer in training", count, "")
