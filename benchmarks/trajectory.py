"""Measures the driver's CPU time per trajectory, by part: environments and agent loop, then records of the step.

    python -P benchmarks/trajectory.py [--prompts 32] [--samples 8] [--tokens 128] [--rounds 5]

Policy answers come at once from this process, without Ray: routing and engines are not included. `PYTHONPATH` of an
older checkout measures that checkout. Prints the median of the rounds in ms per trajectory, and the wall seconds until
the last environment is open, in which no engine could work.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))


class Parrot:
    """A stand-in for the router: random letters for every request, at once."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.first_s = tokens, 0.0

    async def generate(self, request: Any) -> Any:
        """Returns an answer of the full length."""
        from skyrl_mega.engines.base import Completion

        self.first_s = self.first_s or time.perf_counter()
        tokens = [3 + (request.seed >> shift % 40) % 20 for shift in range(self.tokens)]
        return Completion(request.id, tokens, [-1.5] * self.tokens, "length", ((0, 0),))


async def play(router: Any, chat: Any, config: Any, rows: list[Any]) -> list[Any]:
    """Runs all samples of the prompts `rows` and returns the trajectories."""
    from skyrl_mega.rollout.agent.agent_loop import Agent
    from skyrl_mega.rollout.agent.env_pool import EnvPool
    from skyrl_mega.rollout.agent.limits import TrajectoryLimits
    from skyrl_mega.rollout.gate import Gate

    samples, tokens = config.data.samples_per_prompt, config.rollout.sampling.max_tokens
    limits = TrajectoryLimits(turn=tokens, response=tokens, length=tokens + 64, turns=1, env_timeout_s=60.0)
    agent = Agent(router, chat, config.environment, limits, EnvPool(config.environment.workers))
    starts = Gate(len(rows) * samples).starts
    names = [(row, sample) for row in rows for sample in range(samples)]
    return await asyncio.gather(
        *(agent.play(row, sample, f"{row.uid}/{sample}", starts[i]) for i, (row, sample) in enumerate(names))
    )


def measure(prompts: int, samples: int, tokens: int) -> dict[str, float]:
    """Runs a step and returns CPU seconds by part, and the wall seconds before the first request."""
    from skyrl_mega.batch.advantages import compute_advantages
    from skyrl_mega.batch.make_batch import make_batch, mini_batches
    from skyrl_mega.config.schema import BuildConfig, Config
    from skyrl_mega.envs.prompt import Prompt
    from skyrl_mega.models import tiny
    from skyrl_mega.rollout.agent.renderer import Renderer
    from skyrl_mega.trainer.dynamic_sampling import with_signal
    from skyrl_mega.trainer.health.watch import Health
    from skyrl_mega.trainer.run import rollout_metrics
    from skyrl_mega.trajectories.trajectory import Group

    config = Config()
    config.rollout.sampling.max_tokens, config.data.samples_per_prompt = tokens, samples
    config.environment.classes = {"parity": f"{Path(__file__).parent}/fault_env.py:ParityEnv"}
    with tempfile.TemporaryDirectory() as folder:
        tiny.build(BuildConfig(), Path(folder) / "model", 0)
        chat = Renderer(f"{folder}/model", config.rollout)
    rows = [
        Prompt(
            i, [{"role": "user", "content": f"{12 + i}+{17 + i}="}], "parity", {"reward_spec": {"ground_truth": "0"}}
        )
        for i in range(prompts)
    ]

    asyncio.run(play(Parrot(tokens), chat, config, rows))  # imports
    seconds: dict[str, float] = {}
    clock = time.process_time()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.process_time()
        seconds[name], clock = now - clock, now

    router, start = Parrot(tokens), time.perf_counter()
    played = asyncio.run(play(router, chat, config, rows))
    lap("play")
    groups = [Group(row, played[i * samples : (i + 1) * samples]) for i, row in enumerate(rows)]
    with_signal(groups, config.algorithm)
    lap("signal")
    metrics = rollout_metrics(played)
    lap("metrics")
    batch = make_batch(groups, config.algorithm, config.rollout)
    mini_batches(batch, None, config.algorithm)
    lap("batch")
    compute_advantages(batch, config.algorithm)
    lap("advantages")
    Health(config).check(1, metrics, played)
    lap("health")
    return {**seconds, "all": sum(seconds.values()), "open_s": (router.first_s - start)}


def main() -> None:
    """Measures all rounds and prints a line per part."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in a run's driver
    rounds = [measure(args.prompts, args.samples, args.tokens) for _ in range(args.rounds)]
    for name in rounds[0]:
        median = statistics.median(each[name] for each in rounds)
        if name == "open_s":
            print(f"before the first request {median:.3f} s")
        else:
            print(f"{name:12} {1000 * median / (args.prompts * args.samples):.3f} ms a trajectory")


if __name__ == "__main__":
    main()
