"""Measures the cost of router replay in a training step: policies with and without replay take steps in turn.

    python -m benchmarks.replay [--rounds 30] [--output FILE.json]

A mixture of experts runs on a single rank and thread, with full micro-batches and without recomputation. CPU seconds of
the process count, so other processes do not matter. The routes were recorded by the policy itself: both policies do the
same work, except for the replay. Exits with 1 if a step takes more than 5 % longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from skyrl_mega.config.schema import BuildConfig, LayoutConfig, MoeConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron import cpu, model, objectives
from skyrl_mega.megatron.worker import ModelWorker
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences

MOST = 1.05
MODEL = BuildConfig(
    hidden=256, layers=4, heads=8, kv_heads=4, ffn=512, experts=16, experts_per_token=4, expert_ffn=256, max_length=512
)
SEQUENCES, LONGEST, MICRO = 32, 512, 4096
CPU = torch.device("cpu")


def main() -> int:
    """Measures and prints a line; returns 0 if within the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "replay.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder) / "model", args.rounds)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"a training step takes {result['replayed_s']:.3f} s of CPU with replay and {result['plain_s']:.3f} without: "
        f"{result['ratio'] - 1:+.1%} (from {result['ratios'][0] - 1:+.1%} to {result['ratios'][-1] - 1:+.1%} over "
        f"thirds of {args.rounds} rounds); {result['tokens']} tokens, {MODEL.layers} layers, "
        f"{MODEL.experts_per_token} of {MODEL.experts} experts"
    )
    return int(result["ratio"] > MOST)


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Returns CPU seconds of a step, as medians over the rounds."""
    torch.set_num_threads(1)
    cpu.stand_in()
    build(MODEL, path, seed=0)
    parallel = ParallelDims.from_config(LayoutConfig(), 1)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
    model.join(0, parallel, store, CPU, 60)
    plain, replaying = (opened(path, parallel, replay) for replay in ("off", "policy"))
    micros = {"off": batches(), "policy": batches()}
    replaying.logprobs(micros["policy"])  # records the routes
    spent: dict[str, list[float]] = {"off": [], "policy": []}
    for number in range(rounds + 2):
        for name, policy in (("off", plain), ("policy", replaying))[:: 1 - number % 2 * 2]:
            began = time.process_time()
            policy.train(micros[name], objectives.supervised)
            if number > 1:  # earlier steps include allocations made once
                spent[name].append(time.process_time() - began)
        show(number + 1, rounds + 2)
    pairs = [b / a for a, b in zip(spent["off"], spent["policy"], strict=True)]
    thirds = [statistics.median(pairs[k::3]) for k in range(3)]
    return {
        "plain_s": statistics.median(spent["off"]),
        "replayed_s": statistics.median(spent["policy"]),
        "ratio": statistics.median(pairs),
        "ratios": sorted(thirds),
        "rounds": rounds,
        "tokens": sum(len(micro.tokens) for micro in micros["off"]),
    }


def opened(path: Path, parallel: ParallelDims, replay: str) -> ModelWorker:
    """Returns a policy with or without replay."""
    policy = PolicyConfig(micro_tokens=MICRO, optimizer=OptimizerConfig(lr=1e-6), moe=MoeConfig(aux_loss=0.0))
    policy = replace(policy, moe=replace(policy.moe, replay=replay))
    hf = json.loads((path / "config.json").read_text())
    worker = ModelWorker(hf, policy, parallel, dtype=torch.float32, device=CPU)
    worker.load(path)
    return worker


def batches() -> list[Sequences]:
    """Returns full micro-batches of random sequences."""
    rng = np.random.default_rng(0)
    batch = Sequences.of([rng.integers(0, 90, int(n)) for n in rng.integers(LONGEST // 2, LONGEST, SEQUENCES)])
    batch["weights"] = torch.full((len(batch.tokens),), 1 / len(batch.tokens))
    batch["weights"][batch.starts] = 0
    each = SEQUENCES // -(-len(batch.tokens) // MICRO)
    return [batch.part(at, min(at + each, SEQUENCES)) for at in range(0, SEQUENCES, each)]


def show(done: int, of: int) -> None:
    """Shows progress on a terminal."""
    if sys.stderr.isatty():
        print(f"\rround {done} of {of}", end="\n" if done == of else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
