"""Runs the CPU recipes with several seeds: held-out reward before and after RL, turns, mismatch, time.

    .venv/bin/python benchmarks/learning_seeds.py [quickstart|multiply_cpu] [--seeds 0 1 2]

Each seed uses a separate model, data and run folder. Exits with 1 if the reward rises less than required, the mismatch
reaches 1e-3, or the loop's overhead exceeds 2 s a step. Writes benchmarks/results/<recipe>_seeds.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Recipe:
    """A configuration of `configs/`, with folders ending in `-<seed>`."""

    data: str
    """Name of model and data."""
    score: str
    """Metric of the held-out reward."""
    rise: float
    """Smallest rise required."""


RECIPES = {
    "quickstart": Recipe("addition", "eval/addition/mean", 0.3),
    "multiply_cpu": Recipe("multiply", "eval/synthetic_multiply/mean", 0.15),
}


def measure(name: str, seed: int) -> dict[str, float]:
    """Runs a seed from scratch and returns the figures."""
    recipe = RECIPES[name]
    start = time.monotonic()
    command = [sys.executable, "-m", "skyrl_mega.launch", "--config", f"configs/{name}.yaml", f"run.seed={seed}"]
    subprocess.run(command, cwd=ROOT, check=True)
    seconds = time.monotonic() - start
    rows = [json.loads(line) for line in (ROOT / "runs" / f"{name}-{seed}" / "metrics.jsonl").open()]
    scores = [row[recipe.score] for row in rows if recipe.score in row]
    steps = rows[1:]
    return {
        "seed": seed,
        "before": scores[0],
        "after": scores[-1],
        "rise": scores[-1] - scores[0],
        "turns_first": steps[0]["rollout/turns_mean"],
        "turns_last": steps[-1]["rollout/turns_mean"],
        "mismatch_max": max(row["mismatch/logprob_abs_mean"] for row in steps),
        "step_s": sum(row["time/step"] for row in steps) / len(steps),
        "sync_s": sum(row["time/sync"] for row in steps) / len(steps),
        "other_s_max": max(row["time/other"] for row in steps),
        "run_s": seconds,
    }


def main() -> int:
    """Runs the seeds consecutively and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", choices=RECIPES, default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for seed in args.seeds:
        for folder in (
            f"{args.recipe}-{seed}",
            f"models/{args.recipe}-{seed}",
            f"data/{RECIPES[args.recipe].data}-{seed}",
        ):
            if (ROOT / "runs" / folder).exists():
                parser.error(f"runs/{folder} exists; move it away, or give other --seeds")
    results = [measure(args.recipe, seed) for seed in args.seeds]
    names = list(results[0])
    print("".join(name.rjust(14) for name in names))
    for result in results:
        print("".join(f"{result[name]:14.4g}" for name in names))
    file = ROOT / "benchmarks" / "results" / f"{args.recipe}_seeds.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    rise = RECIPES[args.recipe].rise
    good = all(r["rise"] >= rise and r["mismatch_max"] < 1e-3 and r["other_s_max"] < 2 for r in results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
