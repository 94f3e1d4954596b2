"""Measures the CPU seconds of an optimizer step with half of the groups without a signal, with and without backward
passes for them.

    python -m benchmarks.silent [--groups 32] [--samples 8] [--tokens 140] [--micro-tokens 8192] [--rounds 3]

One rank trains the model of `benchmarks.step` (moe, 1M parameters). Both variants train on the same micro-batches in
turn; the weights must stay equal bit by bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.step import MOE
from skyrl_mega.config.schema import AlgorithmConfig, PolicyConfig
from skyrl_mega.megatron import cpu, model, objectives
from skyrl_mega.megatron.micro_batches import split_apart
from skyrl_mega.megatron.worker import ModelWorker
from skyrl_mega.models import tiny
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences


def mini_batch(groups: int, samples: int, tokens: int, vocabulary: int) -> tuple[Sequences, torch.Tensor]:
    """Returns a mini-batch with advantages, every second group without, and the samples of those groups."""
    draw = torch.Generator().manual_seed(0)
    count = groups * samples
    batch = Sequences.of(list(torch.randint(0, vocabulary, (count, tokens), generator=draw).int().numpy()))
    silent = (torch.arange(groups) % 2 == 0).repeat_interleave(samples)
    batch["weights"] = torch.full((count * tokens,), 1 / (count * tokens))
    batch["rollout_logprobs"] = torch.full((count * tokens,), -4.0)
    batch["advantages"] = batch.per_token(torch.randn(count, generator=draw).masked_fill(silent, 0.0))
    return batch, silent


def main() -> None:
    """Measures both variants in turn and prints their CPU seconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=140, help="of a sample")
    parser.add_argument("--micro-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu.stand_in()
    parallel, policy = ParallelDims(), PolicyConfig(micro_tokens=args.micro_tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        tiny.build(replace(MOE, max_length=max(MOE.max_length, args.tokens)), path, 0)
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
        model.join(0, parallel, store, torch.device("cpu"), 60)
        hf = json.loads((path / "config.json").read_text())
        device = torch.device("cpu")
        ranks = [ModelWorker(hf, policy, parallel, dtype=torch.float32, device=device) for _ in range(2)]
        for rank in ranks:
            rank.load(path)
    batch, silent = mini_batch(args.groups, args.samples, args.tokens, ranks[0].vocab)
    split = split_apart(batch, silent, parallel, args.micro_tokens)
    micros, objective = [batch.take(rows) for rows in split.rows[0]], objectives.objective("ppo", AlgorithmConfig())
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(args.rounds + 1):
        for rank, forward_only, taken in zip(ranks, (0, split.forward_only), seconds, strict=True):
            start = time.process_time()
            rank.train(micros, objective, forward_only=forward_only)
            taken.append(time.process_time() - start)
    for name, values in ranks[0].params.items():
        assert torch.equal(values, ranks[1].params[name]), f"{name} differs"
    before, after = (statistics.median(taken[1:]) for taken in seconds)  # the first step allocates memory
    print(
        f"backward over all {before:.2f} s, over groups with a signal {after:.2f} s: {after / before:.2f} of the time"
    )


if __name__ == "__main__":
    main()
