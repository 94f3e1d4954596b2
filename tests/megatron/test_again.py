"""Test of actors reused with a second algorithm: the training must equal new actors' bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from skyrl_mega.config.schema import AlgorithmConfig, BuildConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron.actor import MegatronActor
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.support.ranks import run_ranks

OPTIMIZER = OptimizerConfig(lr=1e-3, schedule="linear", decay_steps=6, warmup_steps=2, clip_grad=0.5)
POLICY = PolicyConfig(micro_tokens=64, logit_chunk=16, optimizer=OPTIMIZER)
FIRST, SECOND = AlgorithmConfig(clip_low=0.01, clip_high=0.01), AlgorithmConfig(clip_low=0.3, clip_high=0.3)


def batch() -> Sequences:
    """Returns random sequences with advantages, and old log-probs with ratios on both sides of the clips."""
    sequences, rng = layouts.some_batch(100), torch.Generator().manual_seed(5)
    sequences["advantages"] = torch.randn(len(sequences.tokens), generator=rng)
    sequences["old_logprobs"] = -4.6 + 0.4 * torch.randn(len(sequences.tokens), generator=rng)
    return sequences


def steps(actor: MegatronActor, loss: str) -> Any:
    """Takes three optimizer steps and returns metrics and final weights."""
    metrics = [actor.train(0, 1.0, loss) for _ in range(3)]
    return metrics, {name: values.clone() for name, values in actor.rank.weights().items()}


def once_and_again(rank: int, address: str, path: Path) -> Any:
    """Trains a new actor with SECOND, then with FIRST, then with SECOND again, each from the same weights."""
    parallel, hf = ParallelDims(), json.loads((path / "config.json").read_text())
    actor = MegatronActor(rank, parallel, hf, POLICY, SECOND, dtype="float32", device="cpu")
    host, port = "127.0.0.1", actor.open_store("127.0.0.1", 60)
    actor.join(host, port, 60)
    actor.load(str(path))
    _, micros = layouts.deal(batch(), actor.rank)
    actor.hold([micros])
    new = steps(actor, "ppo")
    results = []
    for algorithm in (FIRST, SECOND):
        actor.set_algorithm(algorithm)
        actor.load(str(path))
        actor.reset_optimizer(OPTIMIZER)
        results.append(steps(actor, "ppo"))
    return new, *results


def test_a_second_algorithm_begins_as_a_first_one(tmp_path: Path) -> None:
    build(BuildConfig(), tmp_path / "model", seed=1)
    new, other, again = run_ranks(1, once_and_again, tmp_path / "model")[0]
    assert new[0] == again[0]
    assert all(torch.equal(new[1][name], again[1][name]) for name in new[1])
    assert other[0][0]["clip_fraction"] > new[0][0]["clip_fraction"] > 0
    assert not all(torch.equal(new[1][name], other[1][name]) for name in new[1])
