"""Compares dry runs with real runs: random settings for tiny models on a CPU.

    .venv/bin/python benchmarks/one_truth.py [--count N] [--seed S]

Each setting gets a dry run and a whole run of a single step. Both must agree on the transfer plan's digest, the device
of every policy rank and engine worker, and the bytes received by the fullest worker. Writes
benchmarks/results/one_truth.json after all runs; exits with 1 if any differs. A run takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "one_truth.json"
FIXED = [
    "run.steps=1",
    "warmup.steps=0",
    "evaluation.every=0",
    "checkpoint.every=0",
    "checkpoint.export=false",
    "telemetry.trackers=[]",
    "model.dtype=float32",  # on some CPUs, vLLM lacks bfloat16 for tiny models
    "rollout.kv_cache_gib=0.1",
    "rollout.concurrency=8",
    "data.prompts_per_step=4",
    "data.samples_per_prompt=2",
    "algorithm.dynamic_sampling.enabled=false",
]
LIMIT_S = 900
"""Time limit of a run."""


def settings(draw: random.Random) -> list[str]:
    """Draws layouts of policy and engines, sizes of the model, and the wire."""
    ranks = draw.choice([1, 2, 2, 4])
    kind = draw.choice(["tensor", "pipeline", "expert", "data"]) if ranks > 1 else "data"
    layout = [f"policy.layout.{name}={2 if name == kind else 1}" for name in ("tensor", "pipeline", "expert")]
    tensor = draw.choice([1, 1, 2])
    engines = draw.choice([1, 2]) if tensor == 1 else 1
    shared = draw.random() < 0.3 and engines * tensor <= ranks
    return [
        f"policy.ranks={ranks}",
        *layout,
        f"rollout.engines={engines}",
        f"rollout.tensor={tensor}",
        f"cluster.shared={str(shared).lower()}",
        f"model.build.layers={draw.choice([2, 4])}",
        f"model.build.hidden={draw.choice([64, 128])}",
        f"model.build.experts={draw.choice([4, 8])}",
        f"weights.wire={draw.choice(['auto', 'fp8'])}",
        f"weights.bucket_mib={draw.choice([0.05, 0.5, 8])}",
        f"run.seed={draw.randrange(1000)}",
    ]


def launch(arguments: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    """Runs the launcher as a user would."""
    command = [sys.executable, "-m", "skyrl_mega.launch", "--config", str(ROOT / "configs" / "quickstart.yaml")]
    return subprocess.run(
        [*command, *arguments, *more],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def dry(arguments: list[str]) -> dict[str, Any]:
    """Returns the dry run's figures."""
    done = launch(arguments, "--dry-run", "--json")
    if done.returncode:
        raise SystemExit(f"the dry run refuses {' '.join(arguments)}: {done.stderr[-500:]}")
    plan = json.loads(done.stdout)["plan"]
    return {"digest": plan["digest"], "devices": plan["devices"], "bytes_in_max": plan["bytes_in_max"]}


def run(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Returns the run's figures, from the log, the plan's file and the metrics."""
    done = launch(arguments)
    text = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(f"the run of {' '.join(arguments)} ended with {done.returncode}: {text[-2000:]}")
    digests = re.findall(r"transfer plan (\w{16})", re.sub(r"\s+", " ", text))
    (metrics,) = folder.rglob("metrics.jsonl")
    (plan,) = folder.rglob("plan-*.npz")
    with np.load(plan, allow_pickle=False) as file:
        topology = json.loads(file["header"].tobytes())["topology"]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    moved = {row["sync/bytes_in_max"] for row in rows if "sync/bytes_in_max" in row}
    return {
        "digest": digests[0] if len(set(digests)) == 1 else digests,
        "devices": {"policy": topology["sources"], "engines": topology["targets"]},
        "bytes_in_max": int(moved.pop()) if len(moved) == 1 else sorted(moved),
    }


def one(number: int, seed: int) -> dict[str, Any]:
    """Compares both sides for random settings; returns settings, both results, and `equal`."""
    drawn = settings(random.Random(f"{seed}.{number}"))
    with tempfile.TemporaryDirectory(prefix="one-truth-") as place:
        data = f"{place}/data"
        prepare = f"addition --output {data} --train 64 --test 8 --demonstrations 16 --wrong 0 --seed 1"
        paths = [
            f"run.directory={place}/run",
            f"model.path={place}/model",
            f"data.prepare={prepare}",
            f"data.train=[{data}/train.parquet]",
            "data.eval=[]",
            "warmup.files=[]",
        ]
        planned = dry([*FIXED, *drawn, *paths])
        done = run([*FIXED, *drawn, *paths], Path(place) / "run")
    return {"settings": drawn, "dry_run": planned, "run": done, "equal": planned == done}


def main() -> int:
    """Runs all settings consecutively."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--count", type=int, default=10, help="random settings (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="which ones (default: %(default)s)")
    args = p.parse_args()
    rows = []
    for number in range(args.count):
        rows.append(one(number, args.seed))
        print(json.dumps(rows[-1]), flush=True)
    RESULTS.write_text(json.dumps({"seed": args.seed, "runs": rows}, indent=1) + "\n")
    print(f"{sum(row['equal'] for row in rows)} of {len(rows)} agree; {RESULTS}")
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
