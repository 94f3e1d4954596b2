"""Proofs on parts of Transformer Engine: numbers of fused operations, and rates of the experts' grouped product."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import limits, parts
from benchmarks.gpu.processes import Job, together
from benchmarks.gpu.proof import Bench
from benchmarks.gpu.te import FUSIONS, NOT_ON_CPU
from skyrl_mega.parallel.dims import ParallelDims

LAYERS, VOCABULARY, LENGTHS = 2, 8192, [512] * 8
NOISE = 4.0
"""Upper bound: difference of fused from unfused numbers over the difference of two unfused runs."""
LEAST = 2e-3
"""Lower bound of the noise: two runs can agree by chance. Nats for log-probs, relative for gradients."""
EXPERTS, HIDDEN, WIDTH = 16, 2048, 768
"""Sizes of a rank of Qwen3-30B-A3B at expert parallel size 8."""
COPIES = 4 * 8192
"""Token copies that reach the rank's experts from a micro-batch."""


def fusions(bench: Bench) -> None:
    """Compares log-probs and gradients of each megatron-core fusion with an unfused run."""
    if not bench.cuda:
        bench.left_out(NOT_ON_CPU)
        return
    runs = (("none", {}), ("none again", {}), *FUSIONS[1:])
    seen = {name: together(Job(_numbers, (str(bench.folder), fields)), timeout_s=90)[0] for name, fields in runs}
    base = seen.pop("none")
    noise = {kind: max(LEAST, value) for kind, value in _differences(seen.pop("none again"), base).items()}
    for name, fused in seen.items():
        for kind, value in _differences(fused, base).items():
            bench.figure(f"{name}: {kind} off the unfused by", value, "", at_most=NOISE * noise[kind])


def _numbers(folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    from skyrl_mega.megatron.objectives import supervised

    bench = Bench(Path(folder) / "unread", Path(folder), tiny=False)
    hf, _ = parts.slice_of_30b(tiny_size=False, layers=LAYERS)
    hf |= {"vocab_size": VOCABULARY}
    policy = parts.policy_config("te", fusions=[], micro_tokens=sum(LENGTHS))
    rank = parts.open_rank(hf, ParallelDims(), device=bench.device, policy=policy, fusions=fields)
    batch = parts.rows(LENGTHS, VOCABULARY)
    ((logprobs, _),) = rank.logprobs([batch])
    norm = rank.train([batch], supervised)["grad_norm"]
    gradients = {name: float(p.main_grad.double().norm()) for name, p in rank.params.items()}
    return {"log-probs": logprobs.numpy(), "gradients": np.array(list(gradients.values())), "norm": norm}


def _differences(actual: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    off = actual["log-probs"].astype(np.float64) - wanted["log-probs"]
    each = np.abs(actual["gradients"] - wanted["gradients"]) / np.maximum(wanted["gradients"], 1e-12)
    return {
        "log-probs (rms)": float(np.sqrt(np.mean(off**2))),
        "gradient norms of parameters (median)": float(np.median(each)),
        "gradient norm": abs(actual["norm"] / wanted["norm"] - 1),
    }


def grouped(bench: Bench) -> None:
    """Measures the experts' two grouped products, forward and backward, in bfloat16 and in block FP8."""
    if not bench.cuda:
        bench.left_out(NOT_ON_CPU)
        return
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    gemm = limits.gemm_tflops(bench)
    even = [COPIES // EXPERTS] * EXPERTS
    skewed = [COPIES // 2 // 128 * 128, *[COPIES // 2 // (EXPERTS - 1) // 128 * 128] * (EXPERTS - 1)]
    for name, inner, outer in (("fc1", HIDDEN, 2 * WIDTH), ("fc2", WIDTH, HIDDEN)):
        layer = te.GroupedLinear(EXPERTS, inner, outer, bias=False, params_dtype=torch.bfloat16, device="cuda")
        for kind, fp8 in (("bfloat16", False), ("block FP8", True)):
            for spread, splits in (("even", even), ("half of all to one expert", skewed)):
                x = torch.randn(sum(splits), inner, device=bench.device).to(torch.bfloat16).requires_grad_()

                def forward(x: Any = x, splits: list[int] = splits, fp8: bool = fp8, layer: Any = layer) -> Any:
                    with te.fp8_autocast(enabled=fp8, fp8_recipe=Float8BlockScaling()):
                        return layer(x, splits)

                def both(forward: Callable[[], Any] = forward) -> None:
                    out = forward()
                    out.backward(out)

                work = 2 * sum(splits) * inner * outer
                for passes, run, times in (("forward", forward, 1), ("forward and backward", both, 3)):
                    rate = times * work / bench.seconds(run, repeats=10, warm=3) / 1e12
                    bench.figure(f"{name}, {kind}, {spread}: {passes}", rate, "TFLOP/s", limit=gemm,
                                 limit_of="a large bfloat16 product")  # fmt: skip
