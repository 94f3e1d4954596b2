"""SIGKILL of every role, at random moments of runs that generate ahead of training.

    .venv/bin/python -m benchmarks.kills [--kills 40] [--each 4] [--seed 0] [--modes one_step full]

Each run of eight steps is on a Ray cluster of two nodes, with two processes that play environments, and is disturbed
`--each` times: a driver, an engine, a policy rank, a process with environments, or all of a node is killed, at a moment
drawn between the kill before and the run's usual end. A killed driver's command is given again, a killed node is
replaced. Of each run it is checked that it ends well, that each group of each step was trained on exactly once and was
no older than allowed, that no process is left, and, with `one_step`, which is deterministic, that the final weights are
those of a run that nothing disturbs, to the bit. benchmarks/results/kills.json keeps every kill; 40 of them take half
an hour on 2 cores. Exits with 1 where anything was lost, doubled, too old, left over, or other than undisturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from skyrl_mega.rollout import trajectory_io
from skyrl_mega.telemetry.metrics import read
from tests.trainer import quickstart

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "kills.json"
STEPS, PROMPTS, SAMPLES, STALENESS = 8, 16, 4, {"one_step": 1, "full": 2}
SETTINGS = (
    *(f"run.steps={STEPS}", "run.epochs=10", "run.restarts=50", "rollout.restarts=50", "cluster.nodes=2"),
    *(f"data.prompts_per_step={PROMPTS}", f"data.samples_per_prompt={SAMPLES}", "environment.processes=2"),
    *("checkpoint.every=2", "checkpoint.export=true", "evaluation.every=0", "evaluation.before=false"),
    *("telemetry.trackers=[jsonl]", "telemetry.trajectories_every=1", "algorithm.importance_cap=2"),
    *("algorithm.dynamic_sampling.enabled=false", "algorithm.entropy.coefficient=0.01"),
    *("cluster.call_timeout_s=20", "rollout.request_timeout_s=10", "weights.timeout_s=10"),
)
ROLES = ("driver", "VllmEngine", "MegatronActor", "RolloutWorker", "node")
NODE = "SKYRL_MEGA_NODE"
LIMIT_S = 400.0
"""A run takes longer than this only where it hangs."""


@dataclass
class Disturbed:
    """A run on a cluster of its own, and what was done to it."""

    folder: Path
    mode: str
    cluster: Cluster
    kills: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    process: Any = None
    said: str = ""
    began: float = 0.0

    def add_node(self) -> None:
        """One more, with room for a policy's rank, an engine and environments."""
        self.nodes.append(f"{self.folder}/node-{len(self.nodes)}")
        self.cluster.add_node(num_cpus=6, env_vars={NODE: self.nodes[-1], "OMP_NUM_THREADS": "1"})

    def start(self) -> None:
        """Starts the run, or goes on with it."""
        name = (f"run.directory={self.folder}", "run.name=run", f"asynchrony.mode={self.mode}")
        ahead = f"asynchrony.max_staleness={STALENESS[self.mode]}"
        self.process = quickstart.start(self.folder, *SETTINGS, *name, ahead, RAY_ADDRESS=self.cluster.address)

    def kill(self, role: str) -> bool:
        """Kills a process of a role, or all of a node; False where none is there at the moment."""
        if role == "driver":
            with suppress(IndexError, OSError):
                os.kill(quickstart.driver(self.process), signal.SIGKILL)
                self.ended()
                self.start()
                return True
            return False
        if role == "node":
            lost, *_ = [name for name in self.nodes if marked(name)]
            for pid in marked(lost):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.add_node()
            return True
        found = [pid for name in self.nodes for pid in marked(name) if title(pid).startswith(f"ray::{role}".encode())]
        with suppress(IndexError, ProcessLookupError):
            os.kill(found[-1], signal.SIGKILL)
            return True
        return False

    def ended(self) -> int:
        """Waits for the command's end; its exit code."""
        self.said += self.process.communicate(timeout=LIMIT_S)[0]
        return int(self.process.returncode)

    def wait_for_step(self, step: int) -> None:
        """Until its row is there."""
        file, deadline = self.folder / "run" / "metrics.jsonl", time.monotonic() + LIMIT_S
        while not (file.exists() and any(row["step"] >= step for row in read(file))):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no step {step}:\n{self.process.communicate()[0][-4000:]}")
            time.sleep(0.05)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of the steps."""
        file = self.folder / "run" / "metrics.jsonl"
        return [row for row in read(file) if row["step"]] if file.exists() else []


def marked(node: str) -> list[int]:
    """Processes of a node."""
    return quickstart.marked(NODE, node)


def title(pid: int) -> bytes:
    """What a process calls itself."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextmanager
def disturbed(folder: Path, mode: str) -> Iterator[Disturbed]:
    """A run that has started, on two nodes; afterwards nothing of them is left."""
    folder.mkdir(parents=True)
    cluster = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    run = Disturbed(folder, mode, cluster)
    try:
        run.add_node()
        run.add_node()
        run.began = time.monotonic()
        run.start()
        yield run
    finally:
        for pid in (pid for name in run.nodes for pid in marked(name)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        cluster.shutdown()


def wrong(run: Disturbed, code: int, expected: dict[str, torch.Tensor] | None) -> list[str]:
    """What is not as it must be after the run's end."""
    found = [] if code == 0 else [f"exit code {code}"]
    if [row["step"] for row in run.rows] != list(range(1, STEPS + 1)):
        found.append(f"steps {[row['step'] for row in run.rows]}")
    trained: Counter[tuple[int, int]] = Counter()
    for step in range(1, STEPS + 1):
        file = run.folder / "run" / "trajectories" / f"step_{step:06d}.parquet"
        played = trajectory_io.read(file) if file.exists() else []
        trained.update((t.prompt.uid, t.sample) for t in played)
        oldest = max((step - 1 - version for t in played for version, _ in t.versions), default=0)
        if oldest > STALENESS[run.mode]:
            found.append(f"step {step}: a token of {oldest} syncs ago")
        if len(played) != PROMPTS * SAMPLES:
            found.append(f"step {step}: {len(played)} trajectories")
    if len(trained) != STEPS * PROMPTS * SAMPLES or set(trained.values()) != {1}:
        found.append(f"{len(trained)} samples, each {sorted(set(trained.values()))} times")
    if left := quickstart.left_over(run.folder):
        found.append(f"processes are left: {left}")
    if expected is not None and not found and not same(weights(run.folder), expected):
        found.append("other weights than undisturbed")
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """A finished run's."""
    return load_file(folder / "run" / "model" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def undisturbed(folder: Path, mode: str) -> tuple[dict[str, torch.Tensor], float]:
    """Final weights, and the seconds from the first step to the end."""
    with disturbed(folder, mode) as run:
        run.wait_for_step(1)
        start = time.monotonic()
        code = run.ended()
        took = time.monotonic() - start
        if mistakes := wrong(run, code, None):
            raise RuntimeError(f"the undisturbed run: {mistakes}\n{run.said[-4000:]}")
        return weights(folder), took


def disturb(folder: Path, mode: str, roles: list[str], random: Random, usual_s: float) -> Disturbed:
    """Kills one after the other, each at a moment of what is usually left of the run; then waits for the end."""
    with disturbed(folder, mode) as run:
        run.wait_for_step(1)
        for role in roles:
            left = usual_s * (1 - (run.rows[-1]["step"] - 1) / STEPS)
            time.sleep(random.uniform(0, left / 2))
            while run.process.poll() is None and not run.kill(role):
                time.sleep(0.1)
            step = run.rows[-1]["step"]
            run.kills.append({"mode": mode, "role": role, "after_step": step, "s": round(time.monotonic() - run.began)})
            print(f"  {role} after step {step}", flush=True)
        code = run.ended()
        return run if not (mistakes := wrong(run, code, EXPECTED.get(mode))) else failed(run, mistakes)


EXPECTED: dict[str, dict[str, torch.Tensor]] = {}
"""Final weights of undisturbed runs, of modes that are deterministic."""


def failed(run: Disturbed, mistakes: list[str]) -> Disturbed:
    """Notes what is wrong."""
    for kill in run.kills:
        kill["wrong"] = mistakes
    print(f"  {mistakes}\n{run.said[-6000:]}", flush=True)
    return run


def main() -> int:
    """Kills, and says what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--each", type=int, default=4, help="kills of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=list(STALENESS), choices=list(STALENESS))
    args = parser.parse_args()
    random = Random(args.seed)
    roles = list(islice(cycle(ROLES), args.kills))
    random.shuffle(roles)
    kept: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        usual: dict[str, float] = {}
        for mode in args.modes:
            found, usual[mode] = undisturbed(Path(place) / mode, mode)
            print(f"{mode}, undisturbed: {usual[mode]:.0f} s from the first step on", flush=True)
            if mode == "one_step":
                EXPECTED[mode] = found
        for number, first in enumerate(range(0, len(roles), args.each)):
            mode = args.modes[number % len(args.modes)]
            print(f"run {number}, {mode}", flush=True)
            run = disturb(Path(place) / f"run-{number}", mode, roles[first : first + args.each], random, usual[mode])
            kept += run.kills
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    bad = [kill for kill in kept if "wrong" in kill]
    print(f"{len(kept)} kills, {len(bad)} in runs that were not as they must be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
