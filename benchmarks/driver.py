"""Measures the driver's part of an RL step: from trajectories to the policy's ranks, and to the step's file.

    python -m benchmarks.driver [--before FOLDER] [--trajectories 1000] [--tokens 2000] [--rounds 3]
        [--output FILE.json]

Random trajectories in groups of eight (every fourth group with four turns and observations between) become a batch,
mini-batches and micro-batches, travel through Ray to four idle ranks (two data-parallel ranks of two), and are written
to a parquet file. `--before` takes a checkout of an older commit and measures both checkouts in turn: every measurement
runs in a separate process, and medians count.

CPU seconds are the driver's (`time.process_time`: all threads); the ranks' are listed separately. Memory is the
driver's highest resident memory, minus the memory before the trajectories: unlike a tracer of Python's allocations,
resident memory includes torch's tensors and Ray's shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
GROUP = 8
"""Trajectories of a group."""
PROMPT, OBSERVATION = 200, 100
"""Tokens not written by the policy: before the first turn, and between two turns."""
TURNS = 4
"""Turns in every fourth group; other groups play a single turn."""
VOCABULARY = 151_936
RANKS, TENSOR = 4, 2
MICRO_TOKENS = 32_768


def held(values: np.ndarray) -> Any:
    """Returns the values per token as an array."""
    return array({np.int32: "i", np.int8: "b", np.float32: "f"}[values.dtype.type], values.tobytes())


def grouped(trajectories: list[Any]) -> list[Any]:
    """Returns groups of `GROUP` trajectories each."""
    from skyrl_mega.trajectories.trajectory import Group

    parts = [trajectories[i : i + GROUP] for i in range(0, len(trajectories), GROUP)]
    return [Group(part[0].prompt, part) for part in parts]


def step_of_driver(groups: list[Any], policy: Any, mini_batches: int, on_batch: Callable[[], None]) -> None:
    """Runs the driver's part of a step; ranks hold the micro-batches."""
    from skyrl_mega.batch import make_batch as batches
    from skyrl_mega.batch.advantages import compute_advantages
    from skyrl_mega.config.schema import AlgorithmConfig, RolloutConfig
    from skyrl_mega.trainer.loop import split

    algorithm = AlgorithmConfig()
    batch = batches.make_batch(groups, algorithm, RolloutConfig())
    advantages = compute_advantages(batch, algorithm).whitened
    on_batch()
    minis = batches.mini_batches(batch, -(-len(groups) // mini_batches), algorithm)
    policy.hold(minis)
    policy.add("advantages", split(advantages, minis, by_token=False), per_sample=True)
    if len(minis) > 1:
        policy.keep_logprobs("old_logprobs", temperature=1.0)
    for mini in range(len(minis)):
        policy.train(mini, temperature=1.0, loss="ppo")


class Rank:
    """A stand-in for a policy rank: accepts and holds micro-batches, without computing."""

    def __init__(self) -> None:
        self.kept: Any = None

    def hold(self, minis: Any) -> None:
        """Holds micro-batches."""
        self.kept = minis

    def add(self, *_: object) -> None:
        """Does nothing."""

    def keep_logprobs(self, *_: object) -> None:
        """Does nothing: log-probs stay on the rank."""

    def train(self, *_: object) -> dict[str, float]:
        """Returns no metrics."""
        return {}

    def cpu_s(self) -> float:
        """Returns the CPU seconds of this process so far."""
        return time.process_time()


# ---- measurements ----------------------------------------------------------------------------------------------------


@dataclass
class Cost:
    """CPU seconds and memory of a process, by phase."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Memory above the level before the trajectories."""

    @contextmanager
    def phase(self, name: str, base: int) -> Iterator[None]:
        """Measures a phase."""
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
        start = time.process_time()
        yield
        self.seconds[name] = time.process_time() - start
        self.peak_bytes[name] = resident("VmHWM") - base


def resident(key: str = "VmRSS") -> int:
    """Returns the bytes of this process's memory, now or (VmHWM) at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def trajectories(count: int, tokens: int) -> list[Any]:
    """Returns random trajectories of `tokens` tokens each, in the checkout's form."""
    from skyrl_mega.envs.prompt import Prompt
    from skyrl_mega.trajectories.trajectory import Status, Trajectory

    draw = np.random.default_rng(0)
    words = np.array(["the", "number", "of", "apples", "is", "therefore", "twice", "12", "+", "345"])
    records = []
    for i in range(count):
        turns = TURNS if i // GROUP % 4 == 0 else 1
        steps = steps_of(tokens, turns)
        mask = np.zeros(tokens, np.int8)
        for step in steps:
            mask[step.start : step.end] = step.kind.value == "response"
        texts = [" ".join(draw.choice(words, step.end - step.start)) for step in steps]
        roles = ["user" if step.kind.value != "response" else "assistant" for step in steps]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        ids = draw.integers(0, VOCABULARY, tokens, np.int32)
        logprobs = -draw.random(tokens, np.float32) * mask
        records.append(
            Trajectory(
                Prompt(i // GROUP, messages[:1], "addition", {"reward_spec": {"ground_truth": "85"}}),
                i % GROUP,
                *(held(ids), held(mask), held(logprobs)),
                prompt_length=steps[0].end,
                reward=float(draw.integers(0, 2)),
                status=Status.COMPLETED,
                turns=turns,
                versions=[(1, steps[0].end)],
                messages=messages,
                metadata={"parsed_answer": "85"},
                seconds={"generate": 1.0, "env": 0.1},
                steps=steps,
            )
        )
    return records


def steps_of(tokens: int, turns: int) -> list[Any]:
    """Returns the steps of a prompt and turns of similar length, with observations between."""
    from skyrl_mega.trajectories.trajectory import Kind, TrajectoryStep

    prompt, observation = (length * tokens // 2000 for length in (PROMPT, OBSERVATION))
    response_tokens = tokens - prompt - observation * (turns - 1)
    steps = [TrajectoryStep(Kind.PROMPT, 0, prompt, messages=1)]
    for turn in range(turns):
        if turn:
            steps.append(TrajectoryStep(Kind.OBSERVATION, steps[-1].end, steps[-1].end + observation, messages=1))
        start = steps[-1].end
        end = start + response_tokens // turns if turn < turns - 1 else tokens
        steps.append(TrajectoryStep(Kind.RESPONSE, start, end, messages=1, finish="stop"))
    return steps


def measure(count: int, tokens: int, mini_batches: int) -> dict[str, float]:
    """Runs a round with the imported checkout; returns costs per million tokens and per token."""
    import torch

    from skyrl_mega.batch import make_batch  # noqa: F401  (not to be counted as a phase's)
    from skyrl_mega.cluster.group import ActorGroup
    from skyrl_mega.cluster.ray_session import session
    from skyrl_mega.config.schema import PolicyConfig
    from skyrl_mega.megatron.group import TrainGroup
    from skyrl_mega.parallel.dims import ParallelDims
    from skyrl_mega.trajectories import parquet

    torch.set_num_threads(1)  # as in a run's driver (`trainer.setup`)
    step, cost = step_of_driver, Cost()
    with session(actors=RANKS), tempfile.TemporaryDirectory() as folder:
        ranks = ActorGroup.spawn("policy", Rank, [{}] * RANKS, timeout=300)
        policy = TrainGroup(ranks, ParallelDims(RANKS, tensor=TENSOR), PolicyConfig(micro_tokens=MICRO_TOKENS), 300)
        step(grouped(trajectories(2 * GROUP, 100)), policy, mini_batches, lambda: None)  # imports, and Ray's first call
        base, before = resident(), sum(ranks.call_all("cpu_s", timeout=60))
        played = trajectories(count, tokens)
        held_bytes = resident() - base
        with cost.phase("step", base):
            start = time.process_time()
            batch_made_s: list[float] = []
            step(grouped(played), policy, mini_batches, lambda: batch_made_s.append(time.process_time() - start))
        of_ranks = sum(ranks.call_all("cpu_s", timeout=60)) - before
        with cost.phase("write", base):
            parquet.write(Path(folder) / "step.parquet", played)
        written = (Path(folder) / "step.parquet").stat().st_size
    million = count * tokens / 1e6
    return {
        "batch_s": batch_made_s[0] / million,
        "to_ranks_s": (cost.seconds["step"] - batch_made_s[0]) / million,
        "step_s": cost.seconds["step"] / million,
        "write_s": cost.seconds["write"] / million,
        "ranks_s": of_ranks / million,
        "trajectory_bytes": held_bytes / million / 1e6,
        "step_peak_bytes": cost.peak_bytes["step"] / million / 1e6,
        "write_peak_bytes": cost.peak_bytes["write"] / million / 1e6,
        "file_bytes": written / million / 1e6,
    }


# ---- both checkouts in turn ------------------------------------------------------------------------------------------


def in_process(checkout: Path, count: int, tokens: int, mini_batches: int) -> dict[str, float]:
    """Runs a round in a separate process with `skyrl_mega` imported from a checkout."""
    sizes = ["--trajectories", str(count), "--tokens", str(tokens), "--mini-batches", str(mini_batches)]
    command = [sys.executable, "-P", __file__, "--here", *sizes]
    env = os.environ | {"PYTHONPATH": str(checkout)}
    ended = subprocess.run(command, cwd=checkout, env=env, stdout=subprocess.PIPE, text=True, check=True)
    costs: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return costs


def commit(checkout: Path) -> str:
    """Returns the commit of a checkout; a `+` at the end marks changed files."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measures the checkouts in turn and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of an older commit")
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=2000, help="of one trajectory")
    parser.add_argument("--mini-batches", type=int, default=4, help="of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = args.trajectories, args.tokens, args.mini_batches
    if args.here:
        print(json.dumps(measure(*sizes)))
        return
    checkouts = ({"before": args.before.absolute()} if args.before else {}) | {"after": ROOT}
    rounds = [{name: in_process(folder, *sizes) for name, folder in checkouts.items()} for _ in range(args.rounds)]
    keys = list(rounds[0]["after"])
    medians = {name: {key: statistics.median(r[name][key] for r in rounds) for key in keys} for name in checkouts}
    print(f"{'per million tokens, per token':32}" + "".join(name.rjust(10) for name in checkouts))
    for key in keys:
        print(f"{key:32}" + "".join(f"{medians[name][key]:10.3g}" for name in checkouts))
    if args.output:
        result = {"trajectories": args.trajectories, "tokens": args.tokens, "mini_batches": args.mini_batches}
        of = {name: {"commit": commit(folder)} | medians[name] for name, folder in checkouts.items()}
        args.output.write_text(json.dumps({**result, **of, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
