"""The benchmark of long-tailed trajectories without runs: the training data, and the measurements taken from a run."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from array import array
from pathlib import Path
from typing import Any

import pytest

from benchmarks.long_tail import (
    RECIPE,
    ROOT,
    SETTINGS,
    SWING,
    WARM,
    Work,
    ahead,
    answers,
    apart,
    predicted,
    rates_of,
    speed_of,
)
from benchmarks.long_tail_env import MOST_SUMS, TOOL_S, Sums, Tail, rows
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.envs.base import BaseTextEnvStepOutput
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.simulation.workload import LogNormal
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Kind, Status, Trajectory, TrajectoryStep

TAIL = Tail(LogNormal(2.5, 0.7), LogNormal(0.3, 1.0))


def opened(row: dict[str, Any], **options: float) -> Sums:
    env = Sums(env_config=options, extras=row)
    env.init(row["prompt"])
    return env


def earned(output: BaseTextEnvStepOutput) -> float:
    assert isinstance(output["reward"], float)
    return output["reward"]


def test_a_demonstration_without_mistakes_earns_everything() -> None:
    seen = set()
    for row in rows("demonstrations", 200, TAIL, seed=1):
        env, demonstration = opened(row), row["extra_info"]["demonstration"]
        given = [env.step(message["content"]) for message in demonstration if message["role"] == "assistant"]
        assert sum(earned(output) for output in given) == pytest.approx(1)
        assert [output["done"] for output in given] == [False] * (len(given) - 1) + [True]
        messages = [message for output in given for message in output["observations"]]
        assert messages == [message for message in demonstration if message["role"] == "user"]
        seen.add(len(given))
    assert {1, 2, 3, MOST_SUMS} <= seen


def test_wrong_answers_earn_nothing_and_are_as_many_as_was_asked_for() -> None:
    right = []
    for row in rows("demonstrations", 500, TAIL, seed=2, wrong=0.4):
        env = opened(row)
        demonstrated = [
            message["content"] for message in row["extra_info"]["demonstration"] if message["role"] == "assistant"
        ]
        right += [earned(env.step(text)) > 0 for text in demonstrated]
    assert sum(right) / len(right) == pytest.approx(0.6, abs=0.05)


def test_the_tool_takes_its_time_in_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for split in ("train", "test"):
        (row,) = rows(split, 1, Tail(LogNormal(1, 0), LogNormal(1, 0)), seed=0)
        opened(row, mean_s=0.02, sigma=0.0).step("1")
        opened(row, mean_s=3.0, sigma=3.0).step("1")
    assert slept[0] == 0.02 and len(slept) == 2 and 0 < slept[1] <= TOOL_S


@pytest.mark.parametrize("mode", ["off", "full"])
def test_settings_are_ones_that_a_run_takes(mode: str) -> None:
    check(compose(ROOT / RECIPE, [*SETTINGS, *WARM]))
    run_settings = ["model.build=null", "environment.options.sums={mean_s: 0.3, sigma: 1.0, seed: 0}"]
    check(compose(ROOT / RECIPE, [*SETTINGS, *run_settings, *ahead(mode, Work(24, 2, TAIL))]))


def test_how_many_answers_were_under_way() -> None:
    """Computes answers in flight: the first alone for 2 s and with the second for 1 s; the second with the first for
    1 s and alone for 1 s."""
    first = TrajectoryStep(Kind.RESPONSE, 0, 5, at_s=0.0, generate_s=3.0)
    second = TrajectoryStep(Kind.RESPONSE, 9, 10, at_s=2.0, generate_s=2.0)
    prompt = TrajectoryStep(Kind.PROMPT, 0, 9)
    under_way, seconds, tokens = answers([[first], [prompt, second]])
    assert under_way.tolist() == pytest.approx([4 / 3, 3 / 2])
    assert (seconds.tolist(), tokens.tolist()) == ([3.0, 2.0], [5, 1])


def test_an_engine_is_as_fast_as_it_was_with_so_many_sequences() -> None:
    """Computes the speed by sequences in flight: 0.1 s per token for 2 sequences, 0.2 s for 8."""

    def together(count: int, token_s: float) -> list[list[TrajectoryStep]]:
        return [[TrajectoryStep(Kind.RESPONSE, 0, 10, at_s=0.0, generate_s=10 * token_s)] for _ in range(count)]

    speed = speed_of([together(2, 0.1), together(8, 0.2)])
    assert [speed[n] for n in (1, 2, 5, 8, 512)] == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.2])


def test_a_process_gets_a_core_of_its_own() -> None:
    name, core = f"ray::{uuid.uuid4().hex}", max(os.sched_getaffinity(0))
    with subprocess.Popen(["bash", "-c", f"exec -a {name} sleep 60"]) as other:
        try:
            for _ in range(100):
                apart(name, core)
                if os.sched_getaffinity(other.pid) == {core}:
                    break
                time.sleep(0.05)
            assert os.sched_getaffinity(other.pid) == {core} != os.sched_getaffinity(0)
        finally:
            other.kill()


def test_rates_are_those_of_the_run_without_asynchrony(tmp_path: Path) -> None:
    work = Work(steps=SWING + 4, staleness=2, tail=TAIL)
    steps = [
        TrajectoryStep(Kind.PROMPT, 0, 6),
        TrajectoryStep(Kind.RESPONSE, 6, 10, generate_s=0.4, env_s=2.0),
        TrajectoryStep(Kind.OBSERVATION, 10, 14),
        TrajectoryStep(Kind.RESPONSE, 14, 20, at_s=2.4, generate_s=0.8, env_s=1.0),
    ]
    whole = array("i", [0] * 20), array("b", [0] * 20), array("f", [0.0] * 20)
    trajectory = Trajectory(Prompt(0, [], "sums", {}), 0, *whole, 6, 0.0, Status.COMPLETED, 2, steps=steps)
    lines = [{"step": 0}]
    for step in range(1, work.steps + 1):
        parquet.write(tmp_path / "trajectories" / f"step_{step:06d}.parquet", [trajectory] * 64)
        lines.append({"step": step, "time/step": 9.0, "time/generate": 5.0, "time/sync": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rates = rates_of(tmp_path, work)
    assert rates.speed.seconds[1] == rates.speed.seconds[-1] == pytest.approx(0.12)
    assert (rates.train_s, rates.sync_s) == pytest.approx((3.5 / (64 * 20), 0.5))
    # All trajectories are alike: 1.2 s of answers and 3 s of tools, then the policy's time; asynchronous runs take only
    # the latter.
    assert predicted(tmp_path, "off", work) == pytest.approx(4.2 + 3.5 + 0.5, rel=0.01)
    assert predicted(tmp_path, "full", work) == pytest.approx(3.5 + 0.5, rel=0.01)
