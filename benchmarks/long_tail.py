"""Measures the gain of asynchronous rollouts for long-tailed trajectories and tools, and compares with the simulator.

    python -m benchmarks.long_tail [--seeds 0 1 2] [--steps 60] [--staleness 5] [--tool 0.25,1] [--sums 2.5,0.7]

Whole runs on this machine's CPU, with all parts of a cluster run, start at the same weights and take equal numbers of
steps and trajectories: with `asynchrony.mode=off`, and with `full`. The policy gets a core, and everything else shares
a second core, in place of the separate GPUs of a cluster. A trajectory is a conversation of several sums (a log-normal
number), with a tool call of log-normal duration after each.

The run without asynchrony provides lengths, tool times and rates; from these the simulator predicts both runs. For
`off` the prediction shows correct addition of the measured parts; for `full` and the ratio the prediction is a real
test. The settings make the policy the bottleneck, because engines, their processes and the driver share a core here,
unknown to the simulator. Printed are seconds of a step in the steady state, measured and predicted ratio, idle shares,
and held-out accuracy after equal samples. Each measurement is written to benchmarks/results/long_tail.json at once; the
same command continues with missing measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.long_tail_env import MOST_SUMS, Tail, rows
from skyrl_mega.config.compose import compose
from skyrl_mega.data.write import write_rows
from skyrl_mega.simulation.engines import Speed
from skyrl_mega.simulation.rates import Rates
from skyrl_mega.simulation.simulate import simulate
from skyrl_mega.simulation.workload import LogNormal, Recorded
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Kind, TrajectoryStep

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "long_tail"
RESULTS = ROOT / "benchmarks" / "results" / "long_tail.json"
RECIPE = "configs/quickstart.yaml"
SCORE = "eval/sums/mean"
EXACT, IDLE, LOST, LOST_ON_AVERAGE = 0.10, 0.05, 0.03, 0.015
"""Limits: error of a prediction, idle share of the busier side, and loss of accuracy, by seed and on average."""
EPOCHS = 4
"""Optimizer steps on the trajectories of a step."""
PLACES = 512
"""Sequences in the engine at once: `rollout.concurrency` of the recipe."""
SWING = 5
"""First step of the steady state; earlier steps fill the buffer of rollouts."""
SETTINGS = (
    *("algorithm=grpo", "algorithm.kl.coefficient=0", "algorithm.loss_mean=tokens", "algorithm.importance_cap=2"),
    *("run.epochs=1000", "run.patience=null", f"run.directory={FOLDER}"),
    *("model.build.max_length=128", "rollout.max_response_tokens=104", f"rollout.max_turns={MOST_SUMS}"),
    *(
        "policy.ranks=1",
        "policy.layout.expert=1",
        "policy.threads=1",
        "policy.micro_tokens=48",
        "policy.optimizer.lr=1e-4",
    ),
    *("data.prepare=null", f"data.train=[{FOLDER}/train.parquet]", f"data.eval=[{FOLDER}/test.parquet]"),
    *("data.prompts_per_step=8", "data.samples_per_prompt=8", f"data.epochs_per_step={EPOCHS}"),
    "environment.workers=1024",
    *("checkpoint.every=0", "evaluation.every=100000", "evaluation.limit=500", "evaluation.samples=4"),
    *("telemetry.trackers=[jsonl]", "telemetry.trajectories_every=1"),
    "environment.classes.sums=benchmarks.long_tail_env:Sums",
)
WARM = (
    *("run.name=start", "run.steps=1", "warmup.steps=900", f"warmup.files=[{FOLDER}/demonstrations.parquet]"),
    *("policy.micro_tokens=4096", "warmup.batch=128", f"model.path={FOLDER}/model", "checkpoint.export=true"),
)


ROWS = (("train", 6000), ("test", 500), ("demonstrations", 12000))
WRONG = 0.3
"""Share of wrong answers in the demonstrations."""


@dataclass(frozen=True)
class Work:
    """The parameters of a measurement."""

    steps: int
    staleness: int
    tail: Tail

    @property
    def words(self) -> dict[str, Any]:
        """Returns the parameters as saved in the results."""
        sums, tool = self.tail.sums, self.tail.seconds
        return {
            "steps": self.steps,
            "staleness": self.staleness,
            "sums": [sums.mean, sums.sigma],
            "tool": [tool.mean, tool.sigma],
            "start": started_by(self.tail),
            "settings": _relative((*SETTINGS, *self.learning)),
        }

    @property
    def learning(self) -> tuple[str, ...]:
        """Returns a learning rate schedule with end 0, so weights a few steps older make no difference at the end."""
        return "policy.optimizer.schedule=linear", f"policy.optimizer.decay_steps={EPOCHS * self.steps}"


def launch(*settings: str) -> None:
    """Runs the launcher; output goes to the console.

    Raises:
        CalledProcessError: The run failed.
    """
    command = [sys.executable, "-m", "skyrl_mega.launch", "--config", RECIPE, *SETTINGS, *settings]
    policys, others = sorted(os.sched_getaffinity(0))[:2]
    with subprocess.Popen(["taskset", "--cpu-list", str(others), *command], cwd=ROOT) as run:
        while run.poll() is None:
            apart("ray::MegatronActor", policys)
            time.sleep(0.2)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)


def apart(title: str, core: int) -> None:
    """Moves all threads of processes with this title to a separate core."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if "".join(process.cmdline()[:1]).startswith(title):
                for thread in process.threads():
                    with suppress(ProcessLookupError):  # the thread ended
                        os.sched_setaffinity(thread.id, {core})


def started_by(tail: Tail) -> dict[str, Any]:
    """Returns the settings of the data and of the initial weights of all runs."""
    sums = [tail.sums.mean, tail.sums.sigma]
    return {"rows": dict(ROWS), "wrong": WRONG, "sums": sums, "settings": _relative((*SETTINGS, *WARM))}


def _relative(settings: Sequence[str]) -> list[str]:
    return [setting.replace(f"{ROOT}/", "") for setting in settings]


def prepare(tail: Tail) -> None:
    """Prepares the data and the initial weights of all runs: a new model after a supervised warm-up with 30 % wrong
    answers, and a step of RL."""
    marker = FOLDER / "start.json"
    if marker.exists() and json.loads(marker.read_text()) == started_by(tail):
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    for split, count in ROWS:
        write_rows(rows(split, count, tail, seed=0, wrong=WRONG), FOLDER / f"{split}.parquet")
    launch(*WARM, "evaluation.before=false")
    marker.write_text(json.dumps(started_by(tail)))


def ahead(mode: str, work: Work) -> list[str]:
    """Returns the settings of a mode."""
    stale = [f"asynchrony.max_staleness={work.staleness}"] if mode == "full" else []
    return [f"asynchrony.mode={mode}", *stale]


def run(mode: str, seed: int, work: Work) -> Path:
    """Runs from the start and returns the folder."""
    name = f"{mode}-{seed}"
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    tool = work.tail.seconds
    launch(
        *(f"run.name={name}", f"run.seed={seed}", f"run.steps={work.steps}", "warmup.steps=0"),
        *(f"model.path={FOLDER}/start/model", "model.build=null", *ahead(mode, work), *work.learning),
        f"environment.options.sums={{mean_s: {tool.mean}, sigma: {tool.sigma}, seed: {seed}}}",
    )
    return FOLDER / name


def told(folder: Path, work: Work) -> dict[str, float]:
    """Returns seconds of a step in the steady state, idle shares and staleness, and accuracy before and after."""
    measured = read(folder / "metrics.jsonl")
    swing = measured[SWING : work.steps - work.staleness]
    mean = partial(_mean, swing)
    return {
        "step_s": mean("time/step"),
        "generate_s": mean("time/generate"),
        "idle_engines": mean("idle/engines"),
        "idle_policy": mean("idle/policy"),
        "staleness": mean("asynchrony/staleness_mean") if "asynchrony/staleness_mean" in swing[0] else 0.0,
        "before": measured[0][SCORE],
        "after": measured[-1][SCORE],
    }


def _mean(measured: Sequence[dict[str, Any]], name: str) -> float:
    return round(statistics.mean(row[name] for row in measured), 4)


def rates_of(folder: Path, work: Work) -> Rates:
    """Returns the rates of a run without asynchrony in the steady state."""
    measured = read(folder / "metrics.jsonl")[SWING : work.steps - work.staleness]
    files = [folder / "trajectories" / f"step_{row['step']:06d}.parquet" for row in measured]
    played = [[steps for group in parquet.read_steps(file) for steps in group] for file in files]
    tokens = sum(steps[-1].end for of_step in played for steps in of_step)
    rest_s = sum(row["time/step"] - row["time/generate"] - row["time/sync"] for row in measured)
    return Rates(
        engines=1,
        speed=Speed(speed_of(played), prefill_s=0.0, cache_tokens=1e9),
        train_s=rest_s / tokens,
        sync_s=_mean(measured, "time/sync"),
    )


def speed_of(played: Sequence[Sequence[Sequence[TrajectoryStep]]]) -> tuple[float, ...]:
    """Returns the seconds per token of the engine's sequences by number of running sequences, from the answers
    (including prefill).

    Args:
        played: Steps of trajectories opened together, for several batches.
    """
    at, seconds, tokens = (np.concatenate(part) for part in zip(*map(answers, played), strict=True))
    group = np.floor(2 * np.log2(np.maximum(at, 1)))  # groups of similar numbers
    alike = [group == value for value in np.unique(group)]
    known = [np.average(at[one], weights=tokens[one]) for one in alike]
    measured = [seconds[one].sum() / tokens[one].sum() for one in alike]
    return tuple(float(s) for s in np.interp(np.arange(PLACES + 1), known, measured))


def answers(played: Sequence[Sequence[TrajectoryStep]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns for each answer: the mean number of answers in flight meanwhile, the seconds, and the tokens."""
    steps = [step for steps in played for step in steps if step.kind is Kind.RESPONSE]
    start, seconds = np.array([s.at_s for s in steps]), np.array([s.generate_s for s in steps])
    end = start + seconds
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    under_way = np.cumsum(np.repeat([1.0, -1.0], len(steps))[order])
    area = np.concatenate([[0.0], np.cumsum(under_way[:-1] * np.diff(times[order]))])
    during = np.interp(end, times[order], area) - np.interp(start, times[order], area)
    return during / np.maximum(seconds, 1e-9), seconds, np.array([s.end - s.start for s in steps])


def predicted(folder: Path, mode: str, work: Work) -> float:
    """Returns the simulator's seconds of a step, from a run without asynchrony."""
    config = compose(ROOT / RECIPE, [*SETTINGS, *ahead(mode, work)])
    rates, workload = rates_of(folder, work), Recorded.of_run(folder)
    return round(simulate(config, rates, workload, steps=work.steps).seconds, 4)


def measure(seed: int, work: Work) -> dict[str, Any]:
    """Measures and predicts both modes."""
    off, full = (run(mode, seed, work) for mode in ("off", "full"))
    result: dict[str, Any] = {"off": told(off, work), "full": told(full, work)}
    for mode in result:
        result[mode]["predicted_s"] = predicted(off, mode, work)
    result["ratio"] = round(result["off"]["step_s"] / result["full"]["step_s"], 3)
    result["predicted_ratio"] = round(result["off"]["predicted_s"] / result["full"]["predicted_s"], 3)
    return result


HEAD = f"{'seed':>4}  {'mode':5}{'s a step':>9}{'simulated':>11}{'engines idle':>14}{'policy idle':>13}{'accuracy':>18}"


def show(seed: str, result: dict[str, Any], say: Callable[[str], None]) -> None:
    """Prints the lines of a seed."""
    for mode in ("off", "full"):
        m = result[mode]
        accuracy = f"{m['before']:.3f} → {m['after']:.3f}"
        idle = f"{m['idle_engines']:>14.1%}{m['idle_policy']:>13.1%}"
        say(f"{seed:>4}  {mode:5}{m['step_s']:>9.2f}{m['predicted_s']:>11.2f}{idle}{accuracy:>18}")
    say(f"{seed:>4}  ratio{result['ratio']:>9.2f}{result['predicted_ratio']:>11.2f}")


def loss_of(result: dict[str, Any]) -> float:
    """Returns the loss of accuracy against the run without asynchrony."""
    return float(result["off"]["after"] - result["full"]["after"])


def falls_short(seed: str, result: dict[str, Any]) -> list[str]:
    """Returns the failed expectations."""
    lines, off = [], abs(result["predicted_ratio"] / result["ratio"] - 1)
    if off > EXACT:
        lines.append(f"seed {seed}: the predicted ratio is off by {off:.0%}")
    if (idle := min(result["full"]["idle_engines"], result["full"]["idle_policy"])) > IDLE:
        lines.append(f"seed {seed}: the busier side is idle for {idle:.1%}")
    if (lost := loss_of(result)) > LOST:
        lines.append(f"seed {seed}: accuracy is {lost:.3f} lower")
    return lines


def main() -> int:
    """Measures the seeds and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, default=5, help="asynchrony.max_staleness")
    parser.add_argument("--tool", default="0.25,1", help="MEAN,SIGMA of its seconds")
    parser.add_argument("--sums", default="2.5,0.7", help="MEAN,SIGMA of the sums of a trajectory")
    args = parser.parse_args()
    if args.steps <= SWING + args.staleness:
        parser.error(f"--steps {args.steps}: allowed is more than {SWING} and --staleness, as only those between count")
    tail = Tail(LogNormal.parsed(args.sums, "--sums", 1, MOST_SUMS), LogNormal.parsed(args.tool, "--tool", 0, 10))
    work = Work(args.steps, args.staleness, tail)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if kept.get("work") != work.words:
        kept = {"work": work.words, "seeds": {}}
    prepare(tail)
    for seed in map(str, args.seeds):
        if seed not in kept["seeds"]:
            kept["seeds"][seed] = measure(int(seed), work)
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    print(HEAD)
    for seed, result in kept["seeds"].items():
        show(seed, result, print)
    short = [line for seed, result in kept["seeds"].items() for line in falls_short(seed, result)]
    if (lost := statistics.mean(map(loss_of, kept["seeds"].values()))) > LOST_ON_AVERAGE:
        short.append(f"accuracy is {lost:.3f} lower on average")
    print("\n".join(short))
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
