"""SIGKILL of every role, at random moments of runs that generate ahead of training.

    .venv/bin/python -m benchmarks.kills [--kills 40] [--each 4] [--seed 0] [--modes one_step full]

Each run of twenty steps is on a Ray cluster of two nodes, with two processes that play environments, and is disturbed
`--each` times: a driver, an engine, a policy rank, a process with environments, or all of a node is killed, at a moment
that is drawn from the first half of what is usually left of the run; every other one comes once the run has got further
than at the one before, the rest may hit it while it starts again. A killed driver's command is given again, and is
disturbed once it has made a step, as any fault before that but a node's ends a run; a killed node is replaced. Of each
run it is checked that it ends well, that it has trained on exactly the samples of a run that nothing disturbs, each
once and none older than allowed, that all steps have changed the weights, that no process of it is left, and, with
`one_step`, that the final weights are the undisturbed run's, to the bit. Only where the one engine died under a batch,
that batch may be of the weights which the engine came back with, and the final ones are then others: no GPU has those
that the batch began with any more. A command that does not end well is given again, so that the rest is checked of its
run too. benchmarks/results/kills.json has what was killed, the faults that each run told of, and what came of it. Exits
with 1 where a command did not end well, or anything was lost, doubled, too old, left over, or other than undisturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from ray.cluster_utils import Cluster
from safetensors import SafetensorError

from skyrl_mega.cluster.ray_session import ENVIRONMENT
from skyrl_mega.rollout import trajectory_io
from skyrl_mega.telemetry.metrics import read
from tests.trainer import quickstart

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "kills.json"
STEPS, PROMPTS, SAMPLES = 20, 16, 4
STALENESS = {"one_step": 1, "full": 2}
EXACT = {"one_step"}
"""Modes whose final weights do not depend on the clock."""
SETTINGS = (
    *(f"run.steps={STEPS}", "run.epochs=10", "run.restarts=50", "rollout.restarts=50", "cluster.nodes=2"),
    *(f"data.prompts_per_step={PROMPTS}", f"data.samples_per_prompt={SAMPLES}", "environment.processes=2"),
    *("checkpoint.every=3", "checkpoint.export=true", "evaluation.every=0", "evaluation.before=false"),
    *("telemetry.trackers=[jsonl]", "telemetry.trajectories_every=1", "algorithm.rejection.level=token"),
    *("algorithm.dynamic_sampling.enabled=false", "algorithm.entropy.coefficient=0.01"),
    *("cluster.call_timeout_s=20", "rollout.request_timeout_s=10", "weights.timeout_s=10"),
)
ROLES = ("driver", "VllmEngine", "MegatronActor", "RolloutWorker", "node")
ACTORS = (b"VllmEngine", b"MegatronActor", b"RolloutWorker", b"reaper.py")
"""What a run may leave on a node, in the names of processes."""
NODE = "SKYRL_MEGA_NODE"
GIVEN_AGAIN = 3
"""How often a command that has ended badly is."""
LIMIT_S = 400.0
"""A command takes longer than this only where it hangs."""
Weights = dict[str, torch.Tensor]
Samples = Counter[tuple[int, int]]
"""(prompt, sample) → how often it was trained on."""


class Hangs(RuntimeError):
    """A run did not go on."""


@dataclass
class Disturbed:
    """A run on a cluster of its own, and what was done to it."""

    folder: Path
    mode: str
    cluster: Cluster
    kills: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    said: str = ""
    last_said: str = ""
    """By the last command that has ended."""
    resumed_at: int = 0
    """The newest step when the command was last given."""

    def add_node(self) -> None:
        """One more, with room for a policy's ranks, an engine and environments."""
        self.nodes.append(f"{self.folder}/node-{len(self.nodes)}")
        own = {NODE: self.nodes[-1], "OMP_NUM_THREADS": "1"}
        self.cluster.add_node(num_cpus=6, env_vars=ENVIRONMENT | own)

    def start(self) -> None:
        """Starts the run, or goes on with it."""
        name = (f"run.directory={self.folder}", "run.name=run", f"asynchrony.mode={self.mode}")
        ahead = f"asynchrony.max_staleness={STALENESS[self.mode]}"
        self.resumed_at = self.step
        self.process = quickstart.start(self.folder, *SETTINGS, *name, ahead, RAY_ADDRESS=self.cluster.address)

    def kill(self, role: str, random: Random) -> bool:
        """Kills a process of a role, or all of a node; False where none is there at the moment. A driver takes the
        command along, which is given again then."""
        assert self.process is not None
        if role == "driver":
            try:
                os.kill(quickstart.driver(self.process), signal.SIGKILL)
            except (IndexError, OSError):
                return False
            return True
        if role == "node":
            killed = [marked(random.choice([name for name in self.nodes if marked(name)]))]
            self.add_node()
        else:
            found = [
                pid for name in self.nodes for pid in marked(name) if title(pid).startswith(f"ray::{role}".encode())
            ]
            found = [pid for pid in found if leads(pid)]
            killed = [[random.choice(found)]] if found else []
        for pid in (pid for pids in killed for pid in pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(killed)

    def ended(self) -> int:
        """Waits for the command's end; its exit code.

        Raises:
            Hangs: It does not end.
        """
        assert self.process is not None
        try:
            self.last_said = self.process.communicate(timeout=LIMIT_S)[0]
            self.said += self.last_said
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.last_said = self.process.communicate()[0]
            self.said += self.last_said
            raise Hangs(f"no end within {LIMIT_S:g} s") from None
        return int(self.process.returncode)

    @property
    def faults(self) -> list[str]:
        """What the run, and the supervisor of its driver, said of them."""
        lines = self.said.replace(f"{self.folder}/", "").splitlines()
        return [line for line in lines if line.startswith("fault: ")]

    @property
    def last_word(self) -> str:
        """Why the command has ended, as it says."""
        lines = self.last_said.strip().splitlines()
        reasons = [line for line in lines if line.startswith(("fault: ", "error: "))]
        return (reasons or lines or ["nothing said"])[-1]

    @property
    def over(self) -> bool:
        """Whether the command has ended."""
        return self.process is None or self.process.poll() is not None

    def wait_for_step(self, step: int) -> None:
        """Until its row is there, or the command has ended.

        Raises:
            Hangs: It takes too long.
        """
        deadline = time.monotonic() + LIMIT_S
        while self.step < step and not self.over:
            if time.monotonic() > deadline:
                raise Hangs(f"no step {step} within {LIMIT_S:g} s")
            time.sleep(0.05)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of the steps."""
        file = self.folder / "run" / "metrics.jsonl"
        return [row for row in read(file) if row["step"]] if file.exists() else []

    @property
    def step(self) -> int:
        """The newest; 0 before the first, and while a run begins anew."""
        return self.rows[-1]["step"] if self.rows else 0


def marked(node: str) -> list[int]:
    """Processes of a node."""
    return quickstart.marked(NODE, node)


def title(pid: int) -> bytes:
    """What a process calls itself."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def leads(pid: int) -> bool:
    """Whether it is an actor itself, and no child of one, which has its name."""
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


@contextmanager
def disturbed(folder: Path, mode: str) -> Iterator[Disturbed]:
    """A run that has started, on two nodes; afterwards nothing of them is there."""
    folder.mkdir(parents=True)
    cluster = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    run = Disturbed(folder, mode, cluster)
    try:
        run.add_node()
        run.add_node()
        run.start()
        yield run
    finally:
        if run.process is not None and run.process.poll() is None:
            run.process.kill()
            run.process.communicate()
        for pid in [*quickstart.left_over(folder), *(pid for name in run.nodes for pid in marked(name))]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        cluster.shutdown()


def left(run: Disturbed, within_s: float = 60.0) -> list[str]:
    """Processes of the run that are there some time after its end."""
    deadline = time.monotonic() + within_s
    while True:
        on_nodes = [title(pid) for name in run.nodes for pid in marked(name)]
        found = [words.replace(b"\0", b" ").decode() for words in on_nodes if any(name in words for name in ACTORS)]
        found += [f"process {pid}" for pid in quickstart.left_over(run.folder)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def trained(folder: Path) -> Samples:
    """What a finished run has trained on."""
    files = sorted((folder / "run" / "trajectories").glob("step_*.parquet"))
    return Counter((t.prompt.uid, t.sample) for file in files for t in trajectory_io.read(file))


@dataclass(frozen=True)
class Expected:
    """A run that nothing disturbs."""

    samples: Samples
    weights: Weights | None
    """None where they depend on the clock."""
    versions: list[set[int]]
    """Of the weights that drew each step's tokens."""
    seconds: float
    """From the first step to the end."""


def wrong(run: Disturbed, expected: Expected | None) -> list[str]:
    """What is not as it must be of what a run that has ended well leaves."""
    found = []
    if (steps := [row["step"] for row in run.rows]) != list(range(1, STEPS + 1)):
        found.append(f"steps {steps}")
    if idle := [row["step"] for row in run.rows if not row.get("policy/grad_norm")]:
        found.append(f"steps {idle} have changed nothing")
    for step in range(1, STEPS + 1):
        file = run.folder / "run" / "trajectories" / f"step_{step:06d}.parquet"
        played = trajectory_io.read(file) if file.exists() else []
        oldest = max((step - 1 - version for t in played for version, _ in t.versions), default=0)
        if oldest > STALENESS[run.mode]:
            found.append(f"step {step}: a token of {oldest} syncs ago")
        if len(played) != PROMPTS * SAMPLES:
            found.append(f"step {step}: {len(played)} trajectories")
    samples = trained(run.folder)
    if doubled := sum(count > 1 for count in samples.values()):
        found.append(f"{doubled} samples were trained on more than once")
    if expected is not None:
        if lost := len(expected.samples.keys() - samples.keys()):
            found.append(f"{lost} samples of the undisturbed run were not trained on")
        if (final := compared(run, expected)) in ("other", "no"):
            found.append(f"{final} weights than undisturbed" if final == "other" else "no weights were exported")
    return found


def compared(run: Disturbed, expected: Expected) -> str | None:
    """The final weights beside the undisturbed run's: `same`, to the bit; `redrawn`, as an engine died under a batch;
    `other`; or `no`, as there are none that can be read. None where they depend on the clock."""
    try:
        final = quickstart.exported(run.folder / "run")
    except (OSError, SafetensorError):
        return "no"
    if expected.weights is None:
        return None
    if not quickstart.differing(final, expected.weights):
        return "same"
    return "redrawn" if engine_died(run) and versions(run.folder) != expected.versions else "other"


def versions(folder: Path) -> list[set[int]]:
    """Of the weights that drew each step's tokens."""
    files = sorted((folder / "run" / "trajectories").glob("step_*.parquet"))
    return [{version for t in trajectory_io.read(file) for version, _ in t.versions} for file in files]


def engine_died(run: Disturbed) -> bool:
    """Whether it was killed, perhaps under a batch."""
    return any(one["role"] == "VllmEngine" for one in run.kills)


def undisturbed(folder: Path, mode: str) -> Expected:
    """What is expected of a mode."""
    with disturbed(folder, mode) as run:
        run.wait_for_step(1)
        start = time.monotonic()
        code = run.ended()
        took = time.monotonic() - start
        if mistakes := [f"exit code {code}"] if code else [*wrong(run, None), *left(run)]:
            raise RuntimeError(f"the undisturbed run: {mistakes}\n{run.said[-4000:]}")
    return Expected(
        trained(folder), quickstart.exported(folder / "run") if mode in EXACT else None, versions(folder), took
    )


def disturb(folder: Path, mode: str, roles: Sequence[str], random: Random, expected: Expected) -> dict[str, Any]:
    """Kills one after the other, then waits for the end; what was killed, and what came of the run."""
    mistakes: list[str] = []
    final = None
    with disturbed(folder, mode) as run:
        try:
            for number, role in enumerate(roles):
                # Every other one comes when the run has recovered from the one before; the rest may come at any moment.
                recovered = run.kills[-1]["after_step"] if run.kills and number % 2 else run.resumed_at
                run.wait_for_step(recovered + 1)
                rest = expected.seconds * (1 - run.step / STEPS)
                time.sleep(random.uniform(0, rest / 2))
                kill(run, role, random)
            while (code := run.ended()) and len(mistakes) < GIVEN_AGAIN:
                mistakes.append(f"exit code {code}: {run.last_word}")
                run.start()
            if code:
                mistakes.append(f"exit code {code} for the last time")
            else:
                final = compared(run, expected)
                mistakes += [*wrong(run, expected), *left(run)]
        except Hangs as hangs:
            mistakes.append(str(hangs))
        if mistakes:
            print(f"  {mistakes}\n{run.said[-6000:]}", flush=True)
        return {"mode": mode, "kills": run.kills, "faults": run.faults, "weights": final, "wrong": mistakes}


def kill(run: Disturbed, role: str, random: Random) -> None:
    """Kills as soon as one is there; a run that has ended is left alone.

    Raises:
        Hangs: None comes.
    """
    deadline = time.monotonic() + LIMIT_S
    while not run.over:
        step = run.step
        if run.kill(role, random):
            run.kills.append({"role": role, "after_step": step})
            print(f"  {role} after step {step}", flush=True)
            if role == "driver":
                run.ended()
                run.start()
            return
        if time.monotonic() > deadline:
            raise Hangs(f"no {role} within {LIMIT_S:g} s")
        time.sleep(0.1)


def main() -> int:
    """Kills, and says what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--each", type=int, default=4, help="kills of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=list(STALENESS), choices=list(STALENESS))
    args = parser.parse_args()
    random, most = Random(args.seed), 2 * -(-args.kills // args.each)
    roles = list(islice(cycle(ROLES), args.kills))
    random.shuffle(roles)
    kept: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        expected = {}
        for mode in args.modes:
            expected[mode] = undisturbed(Path(place) / mode, mode)
            print(f"{mode}, undisturbed: {expected[mode].seconds:.0f} s from the first step on", flush=True)
        while roles and len(kept) < most:
            number, mode = len(kept), args.modes[len(kept) % len(args.modes)]
            print(f"run {number}, {mode}", flush=True)
            kept.append(disturb(Path(place) / f"run-{number}", mode, roles[: args.each], random, expected[mode]))
            for one in kept[-1]["kills"]:
                roles.remove(one["role"])  # a run may end before all of its kills are made
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    bad, made = [one for one in kept if one["wrong"]], sum(len(one["kills"]) for one in kept)
    print(f"{made} of {args.kills} kills were made; {len(bad)} of {len(kept)} runs were not as they must be")
    return 1 if bad or made < args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
