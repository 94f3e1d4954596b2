"""Does a policy learn in FP8? The recipes that learn on a CPU, with each of `policy.precision`, next to float32.

    python -m benchmarks.precision [--only quickstart multiply_cpu] [--recipes model fp8_blockwise …] [--seeds 0 1 2]

The runs of a seed start at the same weights, those after the supervised warm-up in float32, as RL starts from a trained
model. Each run uses a separate folder below runs/precision/ and the data of the seed. The wire is FP8 too, as on GPUs;
engines on a CPU multiply the received values in float32. Each measurement is written to
benchmarks/results/precision.json at once; the same command continues with missing measurements. Prints a table, and
exits with 1 if a recipe's held-out reward is more than 0.03 below float32's, as the mean over the seeds measured for
both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning_results import Figures, Results
from benchmarks.learning_seeds import RECIPES as RUNS
from skyrl_mega.config.precision import RECIPES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "precision.json"
BELOW = 0.03
"""Largest loss of held-out reward allowed for a recipe."""


def settings(name: str, recipe: str, seed: int) -> list[str]:
    """Returns the settings of a run over the file."""
    wire = ["weights.wire=fp8"] if recipe != "model" else []
    return [
        *(f"run.seed={seed}", f"run.name={name}-{recipe}-{seed}", "run.directory=runs/precision"),
        *(f"model.path=runs/precision/{name}-start-{seed}/model", "model.build=null", "warmup.steps=0"),
        *(f"policy.precision.recipe={recipe}", *wire),
    ]


def warmed_up(name: str, seed: int) -> list[str]:
    """Returns the settings over the file for the run that makes the initial weights: a step without changes, after the
    warm-up."""
    return [
        *(f"run.seed={seed}", f"run.name={name}-start-{seed}", "run.directory=runs/precision", "run.steps=1"),
        *(f"model.path=runs/precision/models/{name}-{seed}", "policy.optimizer.lr=0", "checkpoint.export=true"),
        *("evaluation.before=false", "evaluation.every=0"),
    ]


def launch(name: str, given: Sequence[str]) -> None:
    """Runs the launcher."""
    command = [sys.executable, "-m", "skyrl_mega.launch", "--config", f"configs/{name}.yaml"]
    subprocess.run([*command, *given], cwd=ROOT, check=True)


def measure(name: str, recipe: str, seed: int) -> Figures:
    """Runs a recipe from the seed's initial weights and returns the figures."""
    folder = ROOT / "runs" / "precision"
    if not (folder / f"{name}-start-{seed}" / "model").exists():
        launch(name, warmed_up(name, seed))
    shutil.rmtree(folder / f"{name}-{recipe}-{seed}", ignore_errors=True)
    start = time.monotonic()
    launch(name, settings(name, recipe, seed))
    seconds = time.monotonic() - start
    rows = [json.loads(line) for line in (folder / f"{name}-{recipe}-{seed}" / "metrics.jsonl").open()]
    score, steps = RUNS[name].score, rows[1:]
    scores = [row[score] for row in rows if score in row]
    return {
        "before": scores[0],
        "after": scores[-1],
        "mismatch": sum(row["mismatch/logprob_abs_mean"] for row in steps) / len(steps),
        "seconds": round(seconds),
    }


def table(results: Results, names: Sequence[str], recipes: Sequence[str]) -> tuple[list[str], bool]:
    """Returns the lines of the table, and True if every recipe stays within the limit."""
    lines = [f"{'run':14}{'recipe':15}{'seeds':8}{'before':>8}{'after':>8}{'to float32':>12}{'mismatch':>10}{'s':>7}"]
    held = True
    for name in names:
        for recipe in recipes:
            row = f"{name} {recipe}"
            if not (seeds := results.seeds(row)):
                continue
            figures = [results.of(row, seed) for seed in seeds]
            both = [seed for seed in seeds if results.has(f"{name} model", seed)]
            lost = [results.of(row, seed)["after"] - results.of(f"{name} model", seed)["after"] for seed in both]
            held &= not lost or _mean(lost) >= -BELOW
            before, after, mismatch, seconds = (
                _mean([of[key] for of in figures]) for key in ("before", "after", "mismatch", "seconds")
            )
            difference = f"{_mean(lost):+.3f}" if lost and recipe != "model" else ""
            lines.append(
                f"{name:14}{recipe:15}{','.join(map(str, seeds)):8}{before:8.3f}{after:8.3f}{difference:>12}"
                f"{mismatch:10.1e}{seconds:7.0f}"
            )
    return lines, held


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures missing runs and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*RUNS], default=[*RUNS], metavar="RUN")
    parser.add_argument("--recipes", nargs="+", choices=["model", *RECIPES], default=["model", *RECIPES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    args = parser.parse_args(arguments)
    results = Results(RESULTS, [])
    for seed in args.seeds:
        for name in args.only:
            for recipe in args.recipes:
                if not results.has(f"{name} {recipe}", seed):
                    results.keep(f"{name} {recipe}", seed, measure(name, recipe, seed))
    lines, held = table(results, args.only, args.recipes)
    print("\n".join(lines))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
