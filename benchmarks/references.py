"""Measures the driver's part of an RL step by reference: the cost grows with trajectories, not with tokens.

    python -m benchmarks.references [--sizes 4096x2000 … 16384x32000] [--output FILE.json]

Two workers make random trajectories (as in `benchmarks.driver`: groups of eight, every fourth group with four turns)
and keep the arrays. The driver estimates advantages, distributes mini-batches to four ranks that only count references,
and lets the step's file be written. Each size runs in a separate process. CPU seconds are the driver's (all threads);
memory is the driver's highest resident memory, minus the memory before the trajectories.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.driver import GROUP, RANKS, ROOT, TENSOR, TURNS, Cost, resident, steps_of

WORKERS, PART = 2, 256
MINIS = 4
MICRO_TOKENS = 131_072


class Maker:
    """A stand-in for a worker with finished trajectories."""

    def make(self, place: int, tokens: int) -> tuple[Any, Any]:
        """Returns a trajectory without arrays, and the arrays."""
        from skyrl_mega.envs.prompt import Prompt
        from skyrl_mega.trajectories.by_reference import detach_arrays
        from skyrl_mega.trajectories.trajectory import Status, Trajectory

        turns = TURNS if place // GROUP % 4 == 0 else 1
        steps = steps_of(tokens, turns)
        mask = np.zeros(tokens, np.int8)
        for step in steps:
            mask[step.start : step.end] = step.kind.value == "response"
        messages = [
            {"role": "assistant" if step.kind.value == "response" else "user", "content": "twelve apples, I say. " * 20}
            for step in steps
        ]
        return detach_arrays(
            Trajectory(
                Prompt(place // GROUP, messages[:1], "addition", {"reward_spec": {"ground_truth": "85"}}),
                place % GROUP,
                array("i", np.arange(tokens, dtype=np.int32).tobytes()),
                array("b", mask.tobytes()),
                array("f", (-0.5 * mask.astype(np.float32)).tobytes()),
                prompt_length=steps[0].end,
                reward=float(place % 3 == 0),
                status=Status.COMPLETED,
                turns=turns,
                versions=[(1, steps[0].end)],
                messages=messages,
                steps=steps,
            )
        )


class Rank:
    """A stand-in for a policy rank: accepts references, without computing."""

    def hold(self, minis: Any) -> None:
        """Counts samples."""
        self.samples = sum(len(micro.parts) for mini in minis for micro in mini)

    def add(self, *_: object) -> None:
        """Does nothing."""

    def train(self, *_: object) -> dict[str, float]:
        """Returns no metrics."""
        return {}


def collected(makers: Any, first: int, last: int, tokens: int) -> list[Any]:
    """Returns the trajectories `first … last - 1`, of `tokens` tokens each, made by the actors `makers`."""
    import ray

    from skyrl_mega.trajectories.by_reference import attach_arrays

    made = [
        makers.actors[place % WORKERS].make.options(num_returns=2).remote(place, tokens) for place in range(first, last)
    ]
    smalls = ray.get([small for small, _ in made])
    return [attach_arrays(small, ref) for small, (_, ref) in zip(smalls, made, strict=True)]


def measure(count: int, tokens: int, *, write: bool = True) -> dict[str, float]:
    """Runs a step of `count` trajectories of `tokens` tokens each; returns the costs."""
    import torch

    from skyrl_mega.batch.advantages import compute_advantages
    from skyrl_mega.batch.make_batch import make_batch, mini_batches
    from skyrl_mega.cluster.group import ActorGroup
    from skyrl_mega.cluster.ray_session import session
    from skyrl_mega.config.schema import Config, PolicyConfig
    from skyrl_mega.megatron.group import TrainGroup
    from skyrl_mega.parallel.dims import ParallelDims
    from skyrl_mega.trainer.loop import split
    from skyrl_mega.trainer.run import rollout_metrics
    from skyrl_mega.trajectories import parquet
    from skyrl_mega.trajectories.trajectory import Group

    torch.set_num_threads(1)  # as in a run's driver (`trainer.setup`)
    config, cost = Config(), Cost()

    def step(played: list[Any]) -> None:
        """Runs the driver's part of a step."""
        rollout_metrics(played)
        groups = [Group(played[i].prompt, played[i : i + GROUP]) for i in range(0, len(played), GROUP)]
        config.data.mini_batch_prompts = -(-len(groups) // MINIS)
        batch = make_batch(groups, config.algorithm, config.rollout)
        minis = mini_batches(batch, config.data.mini_batch_prompts, config.algorithm)
        policy.hold(minis)
        advantages = compute_advantages(batch, config.algorithm).whitened
        policy.add("advantages", split(advantages, minis, by_token=False), per_sample=True)
        for mini in range(len(minis)):
            policy.train(mini, temperature=1.0, loss="ppo")

    with session(actors=RANKS + WORKERS), tempfile.TemporaryDirectory() as folder:
        makers = ActorGroup.spawn("maker", Maker, [{}] * WORKERS, timeout=300)
        ranks = ActorGroup.spawn("policy", Rank, [{}] * RANKS, timeout=300)
        policy = TrainGroup(ranks, ParallelDims(RANKS, tensor=TENSOR), PolicyConfig(micro_tokens=MICRO_TOKENS), 300)
        step(collected(makers, 0, 4 * GROUP, 100))  # imports, and Ray's first calls
        base, start = resident(), time.perf_counter()
        played: list[Any] = []
        with cost.phase("collect", base):
            for first in range(0, count, PART):
                played += collected(makers, first, min(first + PART, count), tokens)
        with cost.phase("step", base):
            step(played)
        if write:
            with cost.phase("write", base):
                parquet.write_apart(Path(folder) / "step.parquet", played)
    costs = {f"{name}_cpu_s": seconds for name, seconds in cost.seconds.items()}
    costs |= {f"{name}_peak_mib": peak / 2**20 for name, peak in cost.peak_bytes.items()}
    return {"trajectories": count, "tokens": tokens, **costs, "seconds": time.perf_counter() - start}


def in_process(size: str) -> dict[str, float]:
    """Measures a size in a separate process."""
    command = [sys.executable, "-m", "benchmarks.references", "--here", size]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    costs: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return costs


def main() -> None:
    """Measures the sizes consecutively and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    sizes = ["4096x2000", "4096x8000", "4096x32000", "16384x8000", "16384x32000"]
    parser.add_argument("--sizes", nargs="+", default=sizes, metavar="TRAJECTORIESxTOKENS")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        count, _, tokens = args.here.partition("x")
        print(json.dumps(measure(int(count), int(tokens))))
        return
    rows = [in_process(size) for size in args.sizes]
    for name in rows[0]:
        print(name.ljust(20) + "".join(f"{row[name]:12.4g}" for row in rows))
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
