"""Kills or stops engine workers at random moments of weight syncs, in a real run.

    .venv/bin/python benchmarks/sync_faults.py [--faults 20]

SIGKILL and SIGSTOP alternate. The run is a small quickstart with two engines. Exits with 1 unless the run finishes,
every sync stays within its time limit, and after every sync the engines' log-probs equal the policy's. Writes
benchmarks/results/sync_faults.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_mega.cli import inputs, prepare
from skyrl_mega.cluster import reaper
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.telemetry.console import Console, Phase
from skyrl_mega.telemetry.run_dir import run_folder
from skyrl_mega.trainer.loop import train
from skyrl_mega.trainer.setup import open_run
from skyrl_mega.weights.sync import MARGIN_S, PLAN_S, PROBE_S

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 4.0
BOUND_S = TIMEOUT_S + PLAN_S + MARGIN_S + PROBE_S + 5.0
"""Time limit of a sync with a fault: the sync's timeout, the driver's allowance, and the following sync without the
failed engine."""
MISMATCH = 1e-3


class Saboteur(Console):
    """A console that sends signals during weight syncs."""

    def __init__(self, faults: int, seed: int) -> None:
        super().__init__()
        self.left, self.random = faults, random.Random(seed)
        self.fleet: Fleet | None = None
        self.usual = 0.05
        self.faults: list[dict[str, object]] = []

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """Enters a phase; a sync with all engines gets a fault."""
        if name != "sync" or self.fleet is None or len(self.fleet.ensure_running()) < 2 or not self.left:
            with super().phase(name, total) as phase:
                yield phase
            return
        delay = self.random.uniform(0, 1.2 * self.usual)
        thread = threading.Timer(delay, self._strike, [delay])
        thread.start()
        start = time.monotonic()
        with super().phase(name, total) as phase:
            yield phase
        thread.join()
        self.faults[-1]["sync_s"] = round(time.monotonic() - start, 3)

    def _strike(self, delay: float) -> None:
        assert self.fleet is not None
        engine = self.random.randrange(2)
        what = signal.SIGKILL if self.left % 2 else signal.SIGSTOP
        group = self.fleet.group.where[engine].pid
        workers = [pid for pid in reaper.members(group) if b"VLLM" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        victim = self.random.choice(workers)
        os.kill(victim, what)
        self.left -= 1
        self.faults.append({"engine": engine, "signal": what.name, "after_s": round(delay, 3)})
        self.say(f"benchmark: {what.name} to a worker of engine {engine}, {delay * 1000:.0f} ms into the sync")


def settings(folder: Path, faults: int) -> list[str]:
    """Returns settings of a small quickstart with two engines and an early failure of syncs."""
    data = folder / "data"
    return [
        *("model.build.hidden=64", "model.build.expert_ffn=64", "model.build.layers=4", "warmup.steps=20"),
        *("data.prompts_per_step=8", "data.samples_per_prompt=4", "algorithm.dynamic_sampling.enabled=false"),
        *("evaluation.every=0", "evaluation.before=false", "checkpoint.every=0", "telemetry.trackers=[]"),
        "run.patience=null",  # the run need not learn anything
        *("rollout.engines=2", f"rollout.restarts={faults + 2}", "rollout.request_timeout_s=20"),
        *(f"weights.timeout_s={TIMEOUT_S:g}", "weights.bucket_mib=0.02", f"run.steps={150 * faults}"),
        *(f"run.directory={folder}", f"model.path={folder}/model"),
        f"data.prepare=addition --output {data} --train 6000 --test 64 --demonstrations 400",
        *(f"data.train=[{data}/train.parquet]", f"data.eval=[{data}/test.parquet]"),
        f"warmup.files=[{data}/demonstrations.parquet]",
    ]


def main() -> int:
    """Runs, prints a table of the faults; returns 0 if all went as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-file", action="store_true", help="leave benchmarks/results alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        good = measure(Path(temporary), args)
    return 0 if good else 1


def measure(place: Path, args: argparse.Namespace) -> bool:
    """Runs with all faults."""
    config = compose(str(ROOT / "configs" / "quickstart.yaml"), settings(place, args.faults))
    check(config)
    inputs.check_inputs(config)
    with Saboteur(args.faults, args.seed) as console, run_folder(config) as folder:
        console.log_to(folder / "logs" / "run.log")
        config = prepare.prepare(config, console)
        with open_run(config, folder, console) as run:
            console.fleet = run.sync.fleet
            while console.left:
                before = len(console.faults)
                run.config.run.steps = run.step + 1
                train(run)
                if len(console.faults) == before:
                    console.usual = run_metrics(folder)[-1]["time/sync"]
            while len(run.sync.fleet.serving) < 2:  # restarts the last failed engine; then two undisturbed steps
                run.config.run.steps = run.step + 1
                train(run)
            run.config.run.steps = run.step + 2
            train(run)
        rows = run_metrics(folder)
    worst = max(row["mismatch/logprob_abs_mean"] for row in rows)
    print(f"{'fault':>5} {'engine':>6} {'signal':>8} {'after s':>8} {'sync s':>8}")
    for number, fault in enumerate(console.faults, 1):
        print(f"{number:5} {fault['engine']:6} {fault['signal']:>8} {fault['after_s']:8} {fault['sync_s']:8}")
    slowest = max(float(str(fault["sync_s"])) for fault in console.faults)
    print(
        f"steps {len(rows)}, largest mismatch {worst:.1e}, slowest sync with a fault {slowest:.2f} s of {BOUND_S:g} s"
    )
    if not args.no_file:
        file = ROOT / "benchmarks" / "results" / "sync_faults.json"
        file.parent.mkdir(exist_ok=True)
        result = {"faults": console.faults, "steps": len(rows), "bound_s": BOUND_S, "mismatch_max": worst}
        file.write_text(json.dumps(result, indent=1) + "\n")
    return slowest < BOUND_S and worst < MISMATCH and len(console.faults) == args.faults


def run_metrics(folder: Path) -> list[dict[str, float]]:
    """Returns the rows of all steps so far."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


if __name__ == "__main__":
    sys.exit(main())
