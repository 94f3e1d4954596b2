"""Compares a critic with group baselines: GAE and GRPO learn multi-turn multiplication from the same start, with equal
samples.

    .venv/bin/python benchmarks/critic.py [--seeds 0] [--steps 60] [-- group.key=value …]

Both runs are `configs/multiply_cpu.yaml` with a single policy rank and the same seed: the same model after the same
warm-up, as shown by the evaluation before the first RL step. They run in parallel. Exits with 1 if the starts differ,
if the final held-out reward of GAE is more than 0.05 below GRPO's, or if the critic's values explain the returns no
better at the end. Writes benchmarks/results/critic.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPE = ["--config", "configs/multiply_cpu.yaml", "policy.ranks=1", "policy.layout.expert=1"]
SCORE = "eval/synthetic_multiply/mean"
GAE = ["algorithm=gae", "critic.optimizer.lr=5e-4", "critic.optimizer.beta2=0.95", "critic.epochs=2"]
RUNS = {"grpo": [], "gae": GAE}
BEHIND = 0.05
"""Largest deficit of GAE in held-out reward."""
SOME = 5
"""Number of steps averaged at each end of a curve."""
CURVES = ("critic/loss", "critic/explained_variance", "critic/value", "critic/return")


def rows_of(name: str) -> list[dict[str, Any]]:
    """Returns the metrics of a run."""
    return [json.loads(line) for line in (ROOT / "runs" / name / "metrics.jsonl").open()]


def measure(seed: int, settings: list[str]) -> dict[str, Any]:
    """Runs both from scratch, in parallel, each with a separate model; returns the figures."""
    running = []
    for name, extra in RUNS.items():
        run = f"critic_{name}-{seed}"
        for folder in (run, f"models/{run}"):
            shutil.rmtree(ROOT / "runs" / folder, ignore_errors=True)
        given = [f"run.seed={seed}", f"run.name={run}", f"model.path=runs/models/{run}", *extra, *settings]
        running.append(subprocess.Popen([sys.executable, "-m", "skyrl_mega.launch", *RECIPE, *given], cwd=ROOT))
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"seed {seed}: a run has failed")
    return {"seed": seed, **{name: figures(rows_of(f"critic_{name}-{seed}")) for name in RUNS}}


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures to save of a run."""
    steps = [row for row in rows if row["step"]]
    ends = {name: [row[name] for row in steps if name in row] for name in ("reward/mean", *CURVES)}
    return {
        "scores": {row["step"]: row[SCORE] for row in rows if SCORE in row},
        "steps": len(steps),
        "step_s": mean(row["time/step"] for row in steps),
        **{name: [mean(values[:SOME]), mean(values[-SOME:])] for name, values in ends.items() if values},
    }


def wrong(result: dict[str, Any]) -> list[str]:
    """Returns the failed expectations."""
    scores = {name: [*result[name]["scores"].values()] for name in RUNS}
    before, after = ({name: values[end] for name, values in scores.items()} for end in (0, -1))
    first, last = result["gae"]["critic/explained_variance"]
    lines = [f"before RL {before}: not the same start"] * (before["gae"] != before["grpo"])
    lines += [f"in the end {after}: GAE is behind"] * (after["gae"] < after["grpo"] - BEHIND)
    lines += [f"explained variance {first:.3f} → {last:.3f}: the critic does not learn"] * (last <= first)
    return [f"seed {result['seed']}: {line}" for line in lines]


def main() -> int:
    """Runs the seeds consecutively."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("settings", nargs="*", help="more settings of both runs")
    args = parser.parse_args()
    results = [measure(seed, [f"run.steps={args.steps}", *args.settings]) for seed in args.seeds]
    file = ROOT / "benchmarks" / "results" / "critic.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    print(file.read_text())
    lines = [line for result in results for line in wrong(result)]
    print("\n".join(lines), file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
