"""Measures the driver's cost of environments: steps per second, and CPU seconds of the driver per second.

    python -m benchmarks.environments [--environments 2000] [--slots 64] [--turns 5] [--seconds 0.2]
        [--processes 2 0] [--output FILE.json]

Waiting environments run in `--slots` slots, in separate processes or (with 0 processes) in the driver's threads. The
engine is an actor with immediate answers: all time is spent in the environments' waiting and in the program itself. CPU
seconds are the driver's (`time.process_time`: all threads).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import BuildConfig, Config, EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Completion, Request, Sampling
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models import tiny
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.trainer.start_actors import Setup
from skyrl_mega.trainer.start_workers import start_workers


class Waits(BaseTextEnv):
    """An environment of `extra_info.turns` steps with `extra_info.seconds` each."""

    requires_ground_truth = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Waits."""
        self.turns += 1
        info = self.extras["extra_info"]
        time.sleep(info["seconds"])
        answer = [{"role": "user", "content": f"turn {self.turns}: {action}"}]
        done = self.turns == info["turns"]
        return BaseTextEnvStepOutput(observations=answer, reward=1.0, done=done, metadata={})


class Parrot:
    """A stand-in for an engine: the same answer to every request, at once."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    async def forget(self) -> None:
        """Does nothing: no cache is kept."""

    async def generate_many(self, requests: list[Request], _: Sampling) -> AsyncIterator[list[Completion]]:
        """Yields all answers in a single list."""
        tokens = self.tokens
        yield [Completion(r.id, tokens, [-0.5] * len(tokens), "stop", ((0, 0),)) for r in requests]


def measure(config: Config, environments: int, turns: int, seconds: float) -> dict[str, float]:
    """Measures a phase in a separate Ray session."""
    processes = config.environment.processes
    with tempfile.TemporaryDirectory() as folder, session(actors=1 + processes), ExitStack() as stack:
        model = Path(folder) / "model"
        tiny.build(BuildConfig(), model, 0)
        chat = Renderer(str(model), config.rollout)
        answer = [*chat.encode("12 + 34 = 46"), *sorted(chat.stop_tokens)[:1]]
        engines = ActorGroup.spawn("engine", Parrot, [{"tokens": answer}], timeout=300)
        stack.callback(engines.shutdown)
        fleet = Fleet(engines, restarts=0, start_timeout_s=300)
        fleet.serve([0])
        workers = start_workers(Setup(config, {}, model, device="cpu", folder=Path(folder), stack=stack, say=print))
        info = {"extra_info": {"seconds": seconds, "turns": turns}}
        prompts = [
            Prompt(i, [{"role": "user", "content": f"question {i}"}], "waits", info) for i in range(environments)
        ]
        with Generator(fleet, chat, config.rollout, config.environment, workers=workers) as generator:
            generator.generate(prompts[:64], 1, SamplingConfig(), seed="warm")
            generator.slots.use.read()
            start, cpu = time.perf_counter(), time.process_time()
            groups = generator.generate(prompts, 1, SamplingConfig(), seed="0/1")
            took, cpu = time.perf_counter() - start, time.process_time() - cpu
            most = generator.slots.use.read()
    steps = sum(t.turns for group in groups for t in group.trajectories)
    assert steps == environments * turns and {t.reward for g in groups for t in g.trajectories} == {float(turns)}
    return {
        "processes": processes,
        "steps_per_s": round(steps / took, 1),
        "driver_cores": round(cpu / took, 3),
        "most_open": most,
        "seconds": round(took, 1),
    }


def main() -> None:
    """Measures each number of processes and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--environments", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=64, help="open at once")
    parser.add_argument("--turns", type=int, default=5, help="steps of an environment")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a step")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 0], help="0: the driver's threads")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    classes = {"waits": f"{__name__ if __name__ != '__main__' else 'benchmarks.environments'}:Waits"}
    rollout = RolloutConfig(max_turns=args.turns, max_length=2000, max_response_tokens=1500)
    settings = EnvironmentConfig(classes=classes, slots=args.slots, workers=args.slots)
    rows: list[dict[str, Any]] = []
    print("processes  steps/s  driver's cores  most open  seconds")
    for processes in args.processes:
        config = Config(rollout=rollout, environment=replace(settings, processes=processes))
        rows.append(measure(config, args.environments, args.turns, args.seconds))
        print(
            "{processes:9}  {steps_per_s:7.1f}  {driver_cores:14.3f}  {most_open:9}  {seconds:7.1f}".format(**rows[-1])
        )
    if args.output:
        parameters = {
            "environments": args.environments,
            "slots": args.slots,
            "turns": args.turns,
            "step_s": args.seconds,
        }
        args.output.write_text(json.dumps({**parameters, "measured": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
