"""Proof 5: megatron-core's local layer spec on CUDA against the CPU, and a checkpoint between two processes.

The CPU's figures come from a process without a GPU. In float32 both must agree to rounding. In bfloat16 CUDA may differ
from the CPU's float32 by less than twice the error of the CPU's bfloat16; scalars have bounds of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import parts
from benchmarks.gpu.processes import Job, together
from benchmarks.gpu.proof import Bench
from skyrl_mega.config.schema import OptimizerConfig
from skyrl_mega.parallel.dims import ParallelDims

DTYPES = ("float32", "bfloat16")
STEPS = 3
EXACT = 1e-5
"""Tolerance in float32: log-probs in nats, the rest relative."""
NOISE = 2.0
"""Upper bound of means over thousands of numbers, as a multiple of the CPU's bfloat16 error."""
SHARES = {f"losses of {STEPS} steps": 2e-2, f"gradient norms of {STEPS} steps": 8e-2}
"""Tolerance of bfloat16 scalars, relative: ten and seven times the error of the third step on a CPU, with a root mean
square over seeds of 0.2 % and 1.1 %. The error of a single CPU run is no bound: it may be near 0."""
AFTER = {"float32": 1e-5, "bfloat16": 2e-2}
"""Tolerance of the loss after two more steps on another device, relative."""
HIDE_THE_GPU = {"CUDA_VISIBLE_DEVICES": ""}

Told = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Inputs of a training process."""

    hf: dict[str, Any]
    model: Path
    lengths: list[int]
    """Lengths of the sequences."""
    device: str
    checkpoints: Path
    """Folder with a checkpoint for each dtype."""
    spec: str = "local"
    dtypes: tuple[str, ...] = DTYPES


def prove(bench: Bench) -> None:
    by_cpu, on_gpu = both = cases(bench)
    jobs = (Job(train, (case,), HIDE_THE_GPU if case.device == "cpu" else {}) for case in both)
    from_cpu, from_gpu = together(*jobs, timeout_s=150)
    compare(bench, from_gpu, from_cpu)
    (read,) = together(Job(go_on, (replace(on_gpu, device=by_cpu.device),), HIDE_THE_GPU), timeout_s=90)
    read_again(bench, from_gpu, read)
    if not bench.cuda:
        bench.left_out("CUDA: both ends were this CPU")


def cases(bench: Bench) -> tuple[Case, Case]:
    """Returns the same model and sequences for the CPU and for this device."""
    sizes = {} if bench.tiny else dict(layers=4, hidden=256, heads=8, kv_heads=2, experts=16, experts_per_token=4)
    path = bench.folder / "model"
    hf = parts.tiny_model(path, **sizes)
    lengths = np.random.default_rng(3).integers(2, 60, 6 if bench.tiny else 40).tolist()
    folders = [bench.folder / name for name in ("by_cpu", "here")]
    for folder in folders:
        folder.mkdir()
    return Case(hf, path, lengths, "cpu", folders[0]), Case(hf, path, lengths, str(bench.device), folders[1])


def compare(bench: Bench, here: Told, by_cpu: Told) -> None:
    """Compares both dtypes of this device with the CPU's float32."""
    if "float32" in here:
        for name, difference in differences(here["float32"], by_cpu["float32"]).items():
            bench.figure(f"float32: {name}", difference, "", at_most=EXACT)
    noise = differences(by_cpu["bfloat16"], by_cpu["float32"])
    for name, difference in differences(here["bfloat16"], by_cpu["float32"]).items():
        if name in SHARES:
            bench.figure(f"bfloat16: {name}", difference, "", at_most=SHARES[name])
        else:
            bench.figure(f"bfloat16: {name}, over the CPU's own error", difference / noise[name], "", at_most=NOISE)


def read_again(bench: Bench, saved: Told, read: Told) -> None:
    """Checks that a checkpoint is read bit for bit, and that the next losses agree."""
    for dtype, result in saved.items():
        wrong = sum(
            not np.array_equal(result["weights"][name], read[dtype]["weights"][name]) for name in result["weights"]
        )
        bench.figure(f"{dtype}: parameters that are read otherwise", wrong, "", at_most=0)
        difference = abs(read[dtype]["next"] - result["next"]) / abs(result["next"])
        bench.figure(f"{dtype}: loss of two steps after it", difference, "", at_most=AFTER[dtype])


def train(case: Case) -> Told:
    """Returns log-probs, gradients and the metrics of three steps by dtype; saves a checkpoint and takes two more
    steps."""
    from skyrl_mega.megatron.objectives import supervised

    results: Told = {}
    for dtype in case.dtypes:
        rank, batch = _opened(case, dtype)
        rank.load(case.model)
        (pair,) = rank.logprobs([batch])
        result: Told = {"log-probs": pair[0].numpy(), "entropy": pair[1].numpy(), "losses": [], "gradient norms": []}
        for step in range(STEPS):
            metrics = rank.train([batch], supervised)
            result["losses"].append(metrics["loss"])
            result["gradient norms"].append(metrics["grad_norm"])
            if step == 0:
                result["gradients"] = {
                    name: p.main_grad.float().cpu().numpy().copy() for name, p in rank.params.items()
                }
        (case.checkpoints / dtype).mkdir()
        rank.save(case.checkpoints / dtype)
        results[dtype] = result | _now(rank, batch)
    return results


def go_on(case: Case) -> Told:
    """Returns the checkpoint's weights and the loss after two more steps, by dtype."""
    results: Told = {}
    for dtype in case.dtypes:
        rank, batch = _opened(case, dtype)
        rank.restore(case.checkpoints / dtype)
        results[dtype] = _now(rank, batch)
    return results


def _opened(case: Case, dtype: str) -> tuple[Any, Any]:
    """Opens a rank without weights, and returns rank and batch."""
    torch.set_num_threads(1 if case.device == "cpu" else 4)
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=0.0)
    policy = parts.policy_config(case.spec, micro_tokens=4096, logit_chunk=64, optimizer=optimizer)
    device = torch.device(case.device)
    rank = parts.open_rank(case.hf, ParallelDims(), device=device, dtype=getattr(torch, dtype), policy=policy)
    return rank, parts.rows(case.lengths, case.hf["vocab_size"])


def _now(rank: Any, batch: Any) -> Told:
    """Returns the rank's weights, and the loss of the second of two more steps."""
    from skyrl_mega.megatron.objectives import supervised

    weights = _weights(rank)
    return {"weights": weights, "next": [rank.train([batch], supervised)["loss"] for _ in range(2)][-1]}


def _weights(rank: Any) -> dict[str, np.ndarray]:
    return {name: w.float().cpu().numpy().copy() for name, w in rank.weights().items()}


def differences(actual: Told, wanted: Told) -> dict[str, float]:
    """Returns the difference of each kind of result. Log-probs and entropy: root mean square, in nats (no maximum,
    because bfloat16 reorders a few experts). Gradients of equal parameters: all as one vector. The rest: the largest,
    relative."""
    errors = {}
    for name in ("log-probs", "entropy"):
        errors[name] = float(np.sqrt(np.mean((actual[name].astype(np.float64) - wanted[name]) ** 2)))
    if actual["gradients"].keys() == wanted["gradients"].keys():
        pairs = [
            (actual["gradients"][k].astype(np.float64), g.astype(np.float64)) for k, g in wanted["gradients"].items()
        ]
        errors["gradients"] = (sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)) ** 0.5
    for name in ("losses", "gradient norms"):
        a, b = np.array(actual[name]), np.array(wanted[name])
        errors[f"{name} of {STEPS} steps"] = float((np.abs(a - b) / np.abs(b)).max())
    return errors
