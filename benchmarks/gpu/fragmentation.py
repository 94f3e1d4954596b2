"""Proof 9: rows of random lengths; the allocator's reserved memory against the peak of allocated tensors.

Adam's moments exist from the start, or are created in the first step inside blocks freed by activations. The allocator
runs with and without expandable segments.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import parts
from benchmarks.gpu.processes import Job, together
from benchmarks.gpu.proof import Bench

GIB = 2**30
LAYERS = 12
"""A quarter of the slice's layers: the sizes of blocks matter, not the number of blocks."""


def prove(bench: Bench) -> None:
    for segments in (False, True):
        for early in (False, True):
            env = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{segments}"}
            (peaks,) = together(Job(_train, (bench.tiny, str(bench.device), early), env), timeout_s=100)
            name = f"moments {'early' if early else 'late'}, segments {'on' if segments else 'off'}"
            if not bench.cuda:
                bench.left_out(f"what the allocator holds ({peaks['steps']} steps were taken), and the other cases")
                return
            bench.figure(f"{name}: held beyond the most that was used", (peaks["reserved"] - peaks["allocated"]) / GIB,
                         "GiB", limit=peaks["allocated"] / GIB, limit_of="the most that was used")  # fmt: skip
            bench.figure(f"{name}: free pieces of blocks in use, at most", peaks["split"] / GIB, "GiB")


def _train(tiny: bool, device: str, early: bool) -> dict[str, Any]:
    from skyrl_mega.megatron.objectives import supervised

    target = torch.device(device)
    hf, parallel = parts.slice_of_30b(tiny_size=tiny, layers=LAYERS)
    policy = parts.policy_config(recompute="full", logit_chunk=1024)
    rank = parts.open_rank(hf, parallel, device=target, policy=policy)
    parts.forget_moments(rank)
    if early:
        parts.allocate_moments(rank)
    gc.collect()
    if target.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rng = np.random.default_rng(7)
    steps, micros, longest = (2, 2, 40) if tiny else (6, 10, 8192)
    for step in range(steps):
        rows = []
        for _ in range(micros):
            # The balancer fills rows in the same way: log-normal lengths until the budget is reached.
            lengths: list[int] = []
            while sum(lengths) < longest // 2:
                lengths.append(int(np.clip(rng.lognormal(np.log(longest / 8), 0.8), 4, longest - sum(lengths))))
            rows.append(parts.rows(lengths, hf["vocab_size"], seed=step))
        rank.train(rows, supervised)
    if target.type != "cuda":
        return {"steps": steps}
    stats = torch.cuda.memory_stats()
    return {
        "steps": steps,
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
        "split": stats["inactive_split_bytes.all.peak"],
    }
