"""Tree search beside independent samples at equal tokens (`python -m benchmarks.tree_search`, about 25 minutes on two
cores).

Both learn the sums of `configs/quickstart.yaml` from the same supervised warm-up. An answer has about four tokens, so a
tree of one shared token and ten leaves samples as many tokens as eight independent answers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet

RESULTS = Path(__file__).parent / "results" / "tree_search.json"
TREE = (
    "rollout.generator=tree_search",
    "rollout.generator_options={depth: 1, tokens: 1}",
    "data.samples_per_prompt=10",
)
KINDS = {"independent": (), "tree": TREE}
SAMPLED, SCORE = "environment/of/sampled_tokens", "eval/addition/mean"


def launch(folder: Path, name: str, seed: int, steps: int, *settings: str) -> Path:
    """Runs or resumes a run to its end and returns its folder."""
    common = (f"run.seed={seed}", f"run.name={name}", f"run.directory={folder}", f"run.steps={steps}")
    rest = ("checkpoint.every=1000", "evaluation.every=10", "evaluation.limit=300")
    command = [sys.executable, "-m", "skyrl_mega.launch", "--config", "configs/quickstart.yaml"]
    subprocess.run([*command, *common, *rest, *settings], check=True)
    return folder / name


def figures(run: Path) -> list[dict[str, float]]:
    """Returns step, tokens sampled up to the step, and accuracy on held-out sums of each evaluation."""
    tokens = 0.0
    points: list[dict[str, float]] = []
    for row in read(run / "metrics.jsonl"):
        if row["step"]:
            count = len(parquet.read(run / "trajectories" / f"step_{int(number(row, 'step')):06d}.parquet"))
            tokens += number(row, SAMPLED) * count if SAMPLED in row else number(row, "rollout/tokens")
        if SCORE in row:
            score = number(row, SCORE)
            points.append({"step": number(row, "step"), "tokens": round(tokens), "accuracy": round(score, 4)})
    return points


def number(row: Mapping[str, float | None], name: str) -> float:
    """Returns a finite metric of a row."""
    value = row[name]
    assert value is not None
    return value


def main() -> None:
    """Trains both kinds with each seed, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("runs/tree_search"), help="folder of the runs")
    options = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for seed in options.seeds:
        start = launch(options.folder, f"start-{seed}", seed, 0)
        for kind, settings in KINDS.items():
            name = f"{kind}-{seed}"
            if not (options.folder / name).exists():
                shutil.copytree(start, options.folder / name)
            run = launch(options.folder, name, seed, options.steps, *settings)
            results.setdefault(kind, {})[str(seed)] = figures(run)
            print(name, results[kind][str(seed)][-1])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
