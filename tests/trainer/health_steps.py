"""Simulated steps for the health checks: of healthy runs, and of runs with a planted fault.

`quickstart_figures.csv` holds the figures of a real quickstart (seed 3), the base of the healthy steps.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skyrl_mega.config.schema import Config
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.trainer.health.watch import Health
from skyrl_mega.trajectories.trajectory import Kind, Status, Trajectory, TrajectoryStep

HERE = Path(__file__).parent
COUNTS = {"stuck_steps", "stuck_groups"}
Metrics = dict[str, float]
Play = Callable[[random.Random, int], tuple[Metrics, list[Trajectory]]]
"""A function from (random generator, step) to the step's metrics and trajectories."""


def real() -> list[Metrics]:
    with (HERE / "quickstart_figures.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


REAL = real()


def settings(prompts: int = 32, samples: int = 4, **given: Any) -> Config:
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = prompts, samples
    config.rollout.sampling.stop = given.get("stop", [])
    config.algorithm.advantage = given.get("advantage", "grpo")
    config.algorithm.overlong.filter = given.get("filter", False)
    config.algorithm.dynamic_sampling.enabled = given.get("dynamic", False)
    config.policy.moe.replay = given.get("replay", "off")
    config.run.patience = given.get("patience", 25)
    config.run.patience_groups = given.get("groups", config.run.patience_groups)
    return config


def said(uid: int, text: str, reward: float, **other: Any) -> Trajectory:
    """Returns a trajectory of one question and one answer."""
    tokens = [1, 2, *text.encode()]
    values: dict[str, Any] = dict(
        sample=0,
        tokens=tokens,
        mask=[0, 0] + [1] * (len(tokens) - 2),
        logprobs=[0.0] * len(tokens),
        prompt_length=2,
        reward=reward,
        status=Status.COMPLETED,
        turns=1,
        messages=[{"role": "user", "content": f"q{uid}"}, {"role": "assistant", "content": text}],
        metadata={"guess": len(text), "error": None},
        steps=[
            TrajectoryStep(Kind.PROMPT, 0, 2, messages=1),
            TrajectoryStep(Kind.RESPONSE, 2, len(tokens), messages=1, finish="stop"),
        ],
    )
    return Trajectory(Prompt(uid, [], "guess", {}), **{**values, **other})


def healthy(config: Config, share: float | None = None, ending: str = "", noise: float = 0.15) -> Play:
    """Returns a play of healthy steps: the real figures with random noise, and answers with the real mean reward
    (`share` overrides the mean); prompts differ in difficulty."""

    def play(rng: random.Random, step: int) -> tuple[Metrics, list[Trajectory]]:
        row = REAL[min(step, len(REAL) - 1)]
        metrics = {
            name: value
            if name.startswith(("rollout/rounds", "rollout/groups"))
            else value * rng.lognormvariate(0, noise)
            for name, value in row.items()
        }
        metrics["policy/ratio"] = 1.0
        p = metrics["reward/mean"] = min(1.0, row["reward/mean"] if share is None else share)
        played = []
        for uid in range(config.data.prompts_per_step):
            right = min(1.0, rng.betavariate(4 * p + 1e-3, 4 * (1 - p) + 1e-3))
            played += [
                said(uid, f"{rng.randrange(10**6)}{ending}", float(rng.random() < right))
                for _ in range(config.data.samples_per_prompt)
            ]
        return metrics, played

    return play


def steps(
    health: Health, play: Play, seed: int, count: int, first: int = 1
) -> Iterator[tuple[set[str], list[str], int]]:
    """Yields (kinds found, lines printed, steps stuck) of each step."""
    rng = random.Random(seed)
    for number in range(first, first + count):
        metrics, played = play(rng, number)
        verdict = health.check(number, metrics, played)
        kinds = {name.removeprefix("health/") for name in verdict.metrics if name.startswith("health/")}
        yield kinds - COUNTS, verdict.lines, verdict.stuck


def every(config: Config, change: Callable[[int, Trajectory], Trajectory | None], **figures: float) -> Play:
    """Returns a play of healthy steps in which `change` may replace each trajectory; `figures` overwrites metrics."""
    whole = healthy(config)

    def play(rng: random.Random, step: int) -> tuple[Metrics, list[Trajectory]]:
        metrics, played = whole(rng, step)
        return metrics | figures, [change(i, t) or t for i, t in enumerate(played)]

    return play


def spoiled(config: Config, **figures: float) -> Play:
    """Returns a play of healthy steps with other metrics: `NAME_times` multiplies the healthy metric, `NAME` replaces
    the value."""
    times = {name.removesuffix("_times"): value for name, value in figures.items() if name.endswith("_times")}
    fixed = {name: value for name, value in figures.items() if not name.endswith("_times")}
    whole = healthy(config)

    def play(rng: random.Random, step: int) -> tuple[Metrics, list[Trajectory]]:
        metrics, played = whole(rng, step)
        return {**metrics, **{name: metrics[name] * value for name, value in times.items()}, **fixed}, played

    return play


def equal_rewards(config: Config, **figures: float) -> Play:
    """Returns a play in which every answer earns 0."""
    return every(config, lambda i, t: said(t.prompt.uid, f"a{i}", 0.0), **figures)


def unread(i: int, t: Trajectory) -> Trajectory:
    """Returns the trajectory of an answer that the environment cannot parse; a `change` of `every`."""
    return said(t.prompt.uid, f"Guess \x1b[2J{i}", 0.0, metadata={"guess": None, "error": None})
