"""Compares predicted seconds of an RL step with a real run on this CPU, phase by phase.

    python -m benchmarks.bet --config configs/quickstart.yaml [--prompts 16 32 48 64] [--steps 10] [--no-cases]
        [--output FILE.json] [--rates FILE.json] [--set warmup.steps=200 …]

- A supervised warm-up, if the recipe has one, is run once; all runs below begin with its weights.
- Short runs with all sizes of `--prompts` (`data.prompts_per_step`) but the last measure this CPU's rates. `--rates`
  keeps the rates, a file for `cluster.rates_file`.
- The dry run and the simulation predict a step of the last size. Lengths and the share of groups with a signal come
  from the largest measured run (`--like`), so nothing of the last run enters the prediction.
- The last run is the truth: medians of the steps after the first two, phase by phase.
- `CASES` changes other settings of the last size: the same rates predict each of them, and the mean of its steps is
  compared with the error bar. `--no-cases` leaves them out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.cli import dry_run, workload
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import fit, micro_tokens, rates
from skyrl_mega.simulation.rates import Rates
from skyrl_mega.simulation.simulate import simulate
from skyrl_mega.telemetry.metrics import read

ROOT = Path(__file__).parents[1]
WARM = 2
"""Number of first steps left out of each run."""
PHASES = ("generate", "logprobs", "train", "sync", "step")
LEAST = 0.05
"""Share of a step below which a phase is shown, but not judged."""
WITHIN = 0.2
SIMULATED_STEPS = 8
CASES: Mapping[str, tuple[str, ...]] = {
    "as it is": (),
    "more prompts": ("data.prompts_per_step=96",),
    "fewer samples": ("data.samples_per_prompt=4",),
    "more samples": ("data.samples_per_prompt=16",),
    "4 mini-batches": ("data.mini_batch_prompts=16",),
    "recomputation": ("policy.recompute=full",),
    "small micro-batches": ("policy.micro_tokens=1024",),
    "reference": ("algorithm.kl.coefficient=0.01",),
    "no dynamic sampling": ("algorithm.dynamic_sampling.enabled=false",),
    "2 engines": ("rollout.engines=2",),
}
"""Case → settings changed in the last run. The first is the last run itself."""
NEUTRAL = {
    "rates.tflops": 1e6,
    "rates.tflops_share": 1.0,
    "rates.memory_gb_s": 1e6,
    "rates.memory_share": 1.0,
    "rates.layer_us": 0.0,
    "rates.engine_layer_us": 0.0,
    "rates.engine_step_us": 0.0,
    "rates.trajectory_us": 0.0,
    "rates.sync_s": 0.0,
    "rates.step_s": 0.0,
    "topology.fabric_gb_s": 1e6,
    "topology.nic_gb_s": 1e6,
}
"""Rates with which nothing takes time."""
Row = Mapping[str, float | None]


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run."""

    settings: tuple[str, ...]
    """Settings of the run besides the recipe's."""
    folder: Path

    @property
    def rows(self) -> list[Row]:
        """Returns the metrics of the steps after the first ones."""
        return [row for row in read(self.folder / "metrics.jsonl") if row["step"] and row["step"] > WARM]

    def seconds(self, phase: str) -> float:
        """Returns the median seconds of a phase."""
        return statistics.median(row.get(f"time/{phase}") or 0.0 for row in self.rows)

    @property
    def mean_step(self) -> float:
        """Returns the mean seconds of a step: the rounds of dynamic sampling differ from step to step."""
        return statistics.mean(row["time/step"] or 0.0 for row in self.rows)


@dataclass(frozen=True)
class Bet:
    """A recipe with further settings, and a folder for runs."""

    config: str
    settings: tuple[str, ...]
    steps: int
    folder: Path

    def warmed_up(self) -> Bet:
        """Runs the recipe's supervised warm-up and returns the same recipe with the weights after it, and without a
        warm-up; returns this recipe if it has none."""
        config = compose(ROOT / self.config, [*self.settings])
        if not config.warmup.steps:
            return self
        self._launch("warm_up", ["run.steps=1", "policy.optimizer.lr=0", "checkpoint.export=true"])
        start = [f"model.path={self.folder}/warm_up/model", "model.build=null", "warmup.steps=0"]
        return replace(self, settings=(*self.settings, *start))

    def run(self, name: str, settings: tuple[str, ...]) -> MeasuredRun:
        """Runs the recipe with further settings."""
        steps = [f"run.steps={self.steps + WARM}", "telemetry.trajectories_every=1"]
        self._launch(name.replace(" ", "_"), [*settings, *steps])
        measured = MeasuredRun(settings, self.folder / name.replace(" ", "_"))
        each = ", ".join(f"{phase} {measured.seconds(phase):.3f}" for phase in PHASES)
        print(f"{name}: {each} s", file=sys.stderr, flush=True)
        return measured

    def _launch(self, name: str, settings: Sequence[str]) -> None:
        """Runs the recipe with further settings as the run `name` in `folder`, without evaluations and checkpoints."""
        where = [f"run.directory={self.folder}", f"run.name={name}"]
        quiet = ["evaluation.every=0", "evaluation.before=false", "checkpoint.every=0", "telemetry.trackers=[]"]
        command = [sys.executable, "-m", "skyrl_mega.launch", "--config", self.config]
        ended = subprocess.run([*command, *self.settings, *where, *quiet, *settings], cwd=ROOT, capture_output=True)
        if ended.returncode:
            sys.exit(f"{name} ended with {ended.returncode}:\n{ended.stdout.decode()}{ended.stderr.decode()}")

    def settings_of(self, settings: Sequence[str], given: Mapping[str, float]) -> Config:
        """Returns the recipe's settings with further settings and a file of rates."""
        file = self.folder / "rates.json"
        write_rates(file, given)
        steps = [
            f"run.steps={self.steps + WARM}",
            "evaluation.every=0",
            "evaluation.before=false",
            "checkpoint.every=0",
        ]
        return compose(ROOT / self.config, [*self.settings, *settings, *steps, f"cluster.rates_file={file}"])

    def dry_run(self, settings: Sequence[str], like: MeasuredRun, given: Mapping[str, float]) -> dict[str, Any]:
        """Returns the values of a dry run."""
        config = self.settings_of(settings, given)
        return dry_run.values(config, dry_run.checked(config)[0], args=options(like))

    def simulated(self, settings: Sequence[str], like: MeasuredRun, given: Mapping[str, float], sync: float) -> float:
        """Returns the seconds of a simulated step."""
        config = self.settings_of(settings, given)
        hf, _ = dry_run.checked(config)
        config, _ = rates.with_measured(micro_tokens.with_micro_tokens(config, hf))
        played = workload.workload_of(config, options(like))
        planned = Rates.planned(config, architecture(hf).describe(hf), fit.parallel_of(config)[0], played.length)
        planned = Rates(planned.engines, planned.speed, planned.train_s, sync, planned.other_s)
        return simulate(config, planned, played, steps=SIMULATED_STEPS).seconds


def of_size(prompts: int) -> tuple[str, ...]:
    """Returns the settings for a number of prompts per step in a single mini-batch."""
    return f"data.prompts_per_step={prompts}", "data.mini_batch_prompts=null"


def options(like: MeasuredRun) -> argparse.Namespace:
    """Returns the options of a command line with `--like`."""
    return argparse.Namespace(like=str(like.folder), tokens=None, environment=None, turns=None)


def write_rates(file: Path, given: Mapping[str, float]) -> None:
    """Writes a file for `cluster.rates_file`."""
    file.write_text(json.dumps({"device": {"name": "this CPU"}, "rates": dict(given)}, indent=1) + "\n")


def fitted(costs: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Returns the non-negative numbers x with the smallest relative error of costs · x = seconds.

    Args:
        costs: Seconds per unit of each unknown, a row for each run.
        seconds: Measured seconds of each run.
    """
    matrix, best = np.array(costs) / np.array(seconds)[:, None], (np.inf, [0.0] * len(costs[0]))
    for count in range(1, matrix.shape[1] + 1):
        for chosen in combinations(range(matrix.shape[1]), count):
            part, *_ = np.linalg.lstsq(matrix[:, chosen], np.ones(len(matrix)), rcond=None)
            error = float(np.abs(matrix[:, chosen] @ part - 1).max())
            if (part >= 0).all() and error < best[0] - 1e-9:
                values = dict(zip(chosen, map(float, part), strict=True))
                best = error, [values.get(i, 0.0) for i in range(matrix.shape[1])]
    return best[1]


def measured_rates(bet: Bet, runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Returns the rates with which the dry run gives the seconds of the runs.

    Training decides `tflops` and `layer_us`, and generation the cost of an engine's step and of a trajectory. A sync
    between processes of a machine takes the same time whatever the size of the step, so all of it is `sync_s`. What
    the step takes besides is `step_s`.
    """

    def seconds(run: MeasuredRun, phase: str, **changes: float) -> float:
        given = NEUTRAL | {f"rates.{name}": value for name, value in changes.items()}
        return float(bet.dry_run(run.settings, run, given)["seconds"][phase])

    def costs(run: MeasuredRun, phase: str, units: Sequence[Mapping[str, float]], **known: float) -> list[float]:
        """Returns what each of `units` adds to a phase, and the measured seconds not explained by `known`."""
        base = seconds(run, phase, **known)
        added = [seconds(run, phase, **{**known, **unit}) - base for unit in units]
        return [*added, max(1e-3, run.seconds(phase) - base)]

    def solved(phase: str, units: Sequence[Mapping[str, float]], **known: float) -> list[float]:
        rows = [costs(run, phase, units, **known) for run in runs]
        return fitted([row[:-1] for row in rows], [row[-1] for row in rows])

    per_flop, layers = solved("train", [{"tflops": 1.0}, {"layer_us": 1000.0}])
    speed = {"tflops": 1 / per_flop if per_flop else 1e6, "layer_us": 1000.0 * layers}
    step, trajectory = solved("generate", [{"engine_step_us": 1000.0}, {"trajectory_us": 1000.0}], **speed)
    found = {**speed, "engine_step_us": 1000.0 * step, "trajectory_us": 1000.0 * trajectory}
    found["sync_s"] = max(0.0, statistics.median(run.seconds("sync") - seconds(run, "sync") for run in runs))
    found["step_s"] = max(0.0, statistics.median(run.seconds("step") - seconds(run, "step", **found) for run in runs))
    return NEUTRAL | {f"rates.{name}": value for name, value in found.items()}


def compared(
    bet: Bet, sizes: Sequence[int], cases: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns the predictions beside the real runs, and the measured rates."""
    runs = [bet.run(f"{size} prompts", of_size(size)) for size in sizes[:-1]]
    given = measured_rates(bet, runs)
    result: dict[str, Any] = {"prompts": [*sizes], "cases": {}}
    for name, changes in cases.items():
        settings = (*of_size(sizes[-1]), *changes)
        values = bet.dry_run(settings, runs[-1], given)
        seconds, (low, high) = values["seconds"], values["time"]["run"]["factors"]
        if not changes:
            simulated = bet.simulated(settings, runs[-1], given, seconds["sync"])
            result |= {"dry_run_s": {phase: seconds[phase] for phase in PHASES}, "simulated_s": {"step": simulated}}
            result["dry_run_s"]["generate"] += seconds["tools"]
        real = bet.run(name, settings)
        if not changes:
            result["measured_s"] = {phase: real.seconds(phase) for phase in PHASES}
        result["cases"][name] = {
            "settings": [*changes],
            "dry_run_s": seconds["step"],
            "bar_s": [seconds["step"] * low, seconds["step"] * high],
            "measured_s": real.mean_step,
            "steps_s": [row["time/step"] for row in real.rows],
        }
    return result | {"trajectories": values["time"]["trajectories"]}, given


def is_inside(case: Mapping[str, Any]) -> bool:
    """Returns True if the mean step of a case lies inside the error bar."""
    low, high = case["bar_s"]
    return bool(low <= case["measured_s"] <= high)


def table(result: Mapping[str, Any]) -> str:
    """Returns the table of phases, and the table of cases with their error bars."""
    step, lines = (
        result["measured_s"]["step"],
        [f"{'phase':10}{'dry run':>9}{'simulated':>11}{'measured':>10}{'ratio':>7}"],
    )
    for phase in PHASES:
        real, dry = result["measured_s"][phase], result["dry_run_s"][phase]
        simulation = result["simulated_s"].get(phase)
        judged = real >= LEAST * step
        mark = "" if not judged else "  within 20 %" if abs(dry / real - 1) <= WITHIN else "  off"
        shown = "–" if simulation is None else f"{simulation:.3f}"
        ratio = f"{dry / real:.2f}" if real else "–"
        lines.append(f"{phase:10}{dry:9.3f}{shown:>11}{real:10.3f}{ratio:>7}{mark}")
    width = max(map(len, result["cases"]))
    lines.append(f"{'case':{width}}{'dry run':>9}{'measured':>10}{'ratio':>7}  error bar")
    for name, case in result["cases"].items():
        dry, real, (low, high) = case["dry_run_s"], case["measured_s"], case["bar_s"]
        mark = "" if is_inside(case) else "  outside"
        lines.append(f"{name:{width}}{dry:9.3f}{real:10.3f}{dry / real:7.2f}  {low:.2f} to {high:.2f} s{mark}")
    inside = sum(map(is_inside, result["cases"].values()))
    lines.append(f"the error bar holds in {inside} of {len(result['cases'])} cases")
    return "\n".join(lines)


def main() -> None:
    """Measures, predicts, runs, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 32, 48, 64], help="the last is predicted")
    parser.add_argument("--steps", type=int, default=10, help=f"of each run, after {WARM} more")
    parser.add_argument("--no-cases", action="store_true", help="predicts the last run only")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more settings")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rates", type=Path, metavar="FILE", help="keeps the measured rates")
    args = parser.parse_args()
    if len(args.prompts) < 3:
        parser.error("--prompts: two sizes are measured, and a third is predicted")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bet = Bet(args.config, tuple(args.set), args.steps, Path(folder)).warmed_up()
        cases = {name: changes for name, changes in CASES.items() if not (changes and args.no_cases)}
        result, given = compared(bet, args.prompts, cases)
    print(table(result))
    if args.rates:
        write_rates(args.rates, given)
    if args.output:
        args.output.write_text(json.dumps(result | {"config": args.config, "rates": given}, indent=1) + "\n")


if __name__ == "__main__":
    main()
