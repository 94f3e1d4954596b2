"""Runs of agents with SIGKILL in the middle: of the driver, of a program, and of a rollout worker."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from skyrl_mega.envs.sandbox import confinements
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.envs.harness.test_harness import ASK
from tests.rollout.endpoint.agent_runs import PROMPTS, SAMPLES, finish, start
from tests.trainer.quickstart import actors, left_over

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]
SLOW = ASK + (
    "import time\ntask = json.load(open(os.environ['SKYRL_TASK']))\nanswer = ask(task['prompt'][-1]['content'])\n"
    "time.sleep(2)\nprint(ask(answer or 'again'))"
)
"""A program of two requests with a pause in between, long enough to be killed in."""
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return float(str(ground_truth) in solution_str) + 0.01
"""
"""A reward that is never 0, so that a reward of 0 is a failed program's."""


def trajectories(run: Path, step: int) -> list[Trajectory]:
    return parquet.read(run / "trajectories" / f"step_{step:06d}.parquet")


def samples(of_step: list[Trajectory]) -> Counter[tuple[int, int]]:
    return Counter((t.prompt.uid, t.sample) for t in of_step)


def wait_for(process: subprocess.Popen[str], holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 600
    while not holds():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{what} does not happen"
        time.sleep(0.02)


def test_a_run_killed_among_its_agents_resumes(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import os, time, importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('whole', {str(agent.with_name('whole.py'))!r})\n"
        "whole = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(whole)\n\n"
        "class Marked(whole.CalculatorAgent):\n    def run(self, endpoint, prompt):\n"
        f"        open({str(tmp_path)!r} + f'/began-{{time.monotonic_ns()}}', 'x').close()\n"
        "        return super().run(endpoint, prompt)\n"
    )
    (tmp_path / "whole.py").write_text((Path(__file__).parents[3] / "configs" / "agent_cpu.py").read_text())
    settings = (f"environment.classes.agent={agent}:Marked", "checkpoint.every=2", "checkpoint.export=true")
    finish(start(tmp_path, "whole", 4, *settings))

    process, run = start(tmp_path, "killed", 4, *settings), tmp_path / "killed"
    rows = run / "metrics.jsonl"
    wait_for(process, lambda: rows.exists() and any(row["step"] == 3 for row in read(rows)), "step 3")
    began = len([*tmp_path.glob("began-*")])
    wait_for(process, lambda: len([*tmp_path.glob("began-*")]) > began, "an agent of step 4")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while left_over(tmp_path):
        assert time.monotonic() < deadline, "processes of a killed run stay"
        time.sleep(0.2)

    assert "resuming after step 2" in finish(start(tmp_path, "killed", 4, *settings))
    assert left_over(tmp_path) == []
    assert [row["step"] for row in read(rows)] == [1, 2, 3, 4]
    for step in range(1, 5):
        whole, resumed = (trajectories(tmp_path / name, step) for name in ("whole", "killed"))
        assert samples(resumed) == samples(whole) and set(samples(resumed).values()) == {1}
        assert len(resumed) == PROMPTS * SAMPLES and all(t.status is not Status.ERROR_ENV for t in resumed)
        assert [v for t in resumed for v, _ in t.versions] == [v for t in whole for v, _ in t.versions]
        pairs = [
            (a, b)
            for t, u in zip(whole, resumed, strict=True)
            if t.tokens == u.tokens
            for a, b in zip(t.logprobs, u.logprobs, strict=True)
        ]
        assert np.abs(np.diff(pairs)).max() < 1e-3, "the weights are not those of the checkpoint"


def test_killed_programs_and_workers_earn_nothing_and_lose_nothing(tmp_path: Path) -> None:
    """Kills programs, sandboxes and the rollout worker of a run with a harness. A killed program is a failed
    trajectory; all others are retried, and none has a reward of 0."""
    if "network namespace" not in confinements().get("network", ()):
        pytest.skip(f"this machine gives only {confinements()}")
    (tmp_path / "program.py").write_text(SLOW)
    (tmp_path / "reward.py").write_text(REWARD)
    process = start(
        tmp_path,
        "harness",
        2,
        *("environment.processes=1", "environment.slots=8", "rollout.restarts=3", "checkpoint.every=0"),
        f"environment.options.harness.command=python -S {tmp_path}/program.py",
        f"environment.options.harness.reward={tmp_path}/reward.py:score",
        "environment.options.harness.timeout_s=100",
        env="harness",
    )

    def kill_one(find: Callable[[], list[int]], what: str) -> None:
        wait_for(process, lambda: bool(find()), what)
        os.kill(find()[0], signal.SIGKILL)

    # The program last: a later kill of its worker would retry the failed trajectory before the run has heard of it.
    kill_one(lambda: actors(tmp_path, "RolloutWorker") if programs(tmp_path) else [], "a rollout worker with programs")
    wait_for(process, lambda: not programs(tmp_path), "the end of the worker's programs")
    kill_one(lambda: sandboxes(tmp_path) if programs(tmp_path) else [], "the sandbox of a program")
    kill_one(lambda: sorted(programs(tmp_path), reverse=True), "a program in another sandbox")
    output = finish(process)
    assert left_over(tmp_path) == [] and programs(tmp_path) == []
    played = [trajectories(tmp_path / "harness", step) for step in (1, 2)]
    assert all(len(step) == PROMPTS * SAMPLES and set(samples(step).values()) == {1} for step in played)
    failed = [t for step in played for t in step if t.status.failed]
    assert [t.status for t in failed] == [Status.ERROR_ENV], output
    assert "by signal 9" in failed[0].metadata["error"]
    assert all(t.reward > 0 for step in played for t in step if t not in failed)


def programs(folder: Path) -> list[int]:
    """Returns the process ids of the program itself, without the sandbox around it."""
    script = f"{folder}/program.py"
    return [pid for pid, words in commands() if words[1:3] == ["-S", script]]


def sandboxes(folder: Path) -> list[int]:
    """Returns the process ids of the sandboxes of a run's rollout workers."""
    workers = actors(folder, "RolloutWorker")
    children = [child for pid in workers for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()]  # fmt: skip
    return [pid for pid, words in commands() if str(pid) in children and any(w.endswith("jail.py") for w in words)]


def commands() -> Iterator[tuple[int, list[str]]]:
    """Yields process id and command line of all processes."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield int(entry.name), (entry / "cmdline").read_text(errors="replace").split("\0")
        except OSError:  # the process ended meanwhile
            continue
