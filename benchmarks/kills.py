"""Kills processes of every role at random moments of runs with asynchronous rollouts, and checks the results.

    .venv/bin/python -m benchmarks.kills [--kills 40] [--each 4] [--seed 0] [--modes one_step full]

Each run of twenty steps uses a Ray cluster of two nodes with two environment processes, and is disturbed `--each`
times: SIGKILL hits the driver, an engine, a policy rank, an environment process, or all processes of a node. The moment
is drawn from the first half of the usual remaining time. Every other kill waits until the run is past the step of the
previous kill; the others may hit a restarting run. After the death of a driver the command is given again, and
disturbed again only after a step, because before the first step any fault except a node's ends a run. A killed node is
replaced.

Checks of each run: a good end; training on exactly the samples of an undisturbed run, each once and none older than
allowed; changed weights in every step; no process left; and with `one_step`, final weights equal to the undisturbed
run's, to the bit. There is an exception: if the only engine died during a batch, the batch may come from the weights
loaded by the restarted engine, and the final weights differ, because no GPU holds the weights used at the start of the
batch any more. A command with a bad end is given again, to check the rest of the run.

benchmarks/results/kills.json lists the kills, the faults reported by each run, and the results. Exits with 1 if a
command ended badly, or if anything was lost, doubled, too old, left over, or different from the undisturbed run.
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
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from tests.trainer import quickstart

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "kills.json"
STEPS, PROMPTS, SAMPLES = 20, 16, 4
STALENESS = {"one_step": 1, "full": 2}
EXACT = {"one_step"}
"""Modes with final weights independent of timing."""
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
"""Process names to look for on a node after a run."""
NODE = "SKYRL_MEGA_NODE"
GIVEN_AGAIN = 3
"""Number of repetitions of a command with a bad end."""
LIMIT_S = 400.0
"""Time limit of a command, exceeded only if the run hangs."""
Weights = dict[str, torch.Tensor]
Samples = Counter[tuple[int, int]]
"""(prompt, sample) → number of times trained on."""


class Hangs(RuntimeError):
    """Error for a run without progress."""


@dataclass
class Disturbed:
    """A run on a separate cluster, with a record of the kills."""

    folder: Path
    mode: str
    cluster: Cluster
    kills: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    said: str = ""
    last_said: str = ""
    """Output of the last finished command."""
    resumed_at: int = 0
    """Newest step when the command was last given."""

    def add_node(self) -> None:
        """Adds a node for a policy's ranks, an engine and environments."""
        self.nodes.append(f"{self.folder}/node-{len(self.nodes)}")
        variables = {NODE: self.nodes[-1], "OMP_NUM_THREADS": "1"}
        self.cluster.add_node(num_cpus=6, env_vars=ENVIRONMENT | variables)

    def start(self) -> None:
        """Starts or resumes the run."""
        name = (f"run.directory={self.folder}", "run.name=run", f"asynchrony.mode={self.mode}")
        ahead = f"asynchrony.max_staleness={STALENESS[self.mode]}"
        self.resumed_at = self.step
        self.process = quickstart.start(self.folder, *SETTINGS, *name, ahead, RAY_ADDRESS=self.cluster.address)

    def kill(self, role: str, random: Random) -> bool:
        """Kills a process of a role, or all of a node; False if no such process exists now. After the death of a driver
        the command must be given again."""
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
            candidates = [
                pid for name in self.nodes for pid in marked(name) if title(pid).startswith(f"ray::{role}".encode())
            ]
            candidates = [pid for pid in candidates if leads(pid)]
            killed = [[random.choice(candidates)]] if candidates else []
        for pid in (pid for pids in killed for pid in pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(killed)

    def ended(self) -> int:
        """Waits for the command's end and returns the exit code.

        Raises:
            Hangs: The command does not end.
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
        """Returns the faults reported by the run and by the driver's supervisor."""
        lines = self.said.replace(f"{self.folder}/", "").splitlines()
        return [line for line in lines if line.startswith("fault: ")]

    @property
    def last_word(self) -> str:
        """Returns the reason printed at the end of the command."""
        lines = self.last_said.strip().splitlines()
        reasons = [line for line in lines if line.startswith(("fault: ", "error: "))]
        return (reasons or lines or ["nothing said"])[-1]

    @property
    def over(self) -> bool:
        """Returns True if the command ended."""
        return self.process is None or self.process.poll() is not None

    def wait_for_step(self, step: int) -> None:
        """Waits for the step's row, or for the command's end.

        Raises:
            Hangs: The step takes too long.
        """
        deadline = time.monotonic() + LIMIT_S
        while self.step < step and not self.over:
            if time.monotonic() > deadline:
                raise Hangs(f"no step {step} within {LIMIT_S:g} s")
            time.sleep(0.05)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the steps."""
        file = self.folder / "run" / "metrics.jsonl"
        return [row for row in read(file) if row["step"]] if file.exists() else []

    @property
    def step(self) -> int:
        """Returns the newest step; 0 before the first step and at a restart from the beginning."""
        return self.rows[-1]["step"] if self.rows else 0


def marked(node: str) -> list[int]:
    """Returns the processes of a node."""
    return quickstart.marked(NODE, node)


def title(pid: int) -> bytes:
    """Returns the title of a process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def leads(pid: int) -> bool:
    """Returns True for an actor's main process; children share the actor's title."""
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


@contextmanager
def disturbed(folder: Path, mode: str) -> Iterator[Disturbed]:
    """Starts a run on two nodes; at the end, kills everything."""
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
    """Returns processes of the run left some time after the end."""
    deadline = time.monotonic() + within_s
    while True:
        on_nodes = [title(pid) for name in run.nodes for pid in marked(name)]
        leftovers = [words.replace(b"\0", b" ").decode() for words in on_nodes if any(name in words for name in ACTORS)]
        leftovers += [f"process {pid}" for pid in quickstart.left_over(run.folder)]
        if not leftovers or time.monotonic() > deadline:
            return leftovers
        time.sleep(0.2)


def trained(folder: Path) -> Samples:
    """Returns the samples of a finished run."""
    files = sorted((folder / "run" / "trajectories").glob("step_*.parquet"))
    return Counter((t.prompt.uid, t.sample) for file in files for t in parquet.read(file))


@dataclass(frozen=True)
class Expected:
    """An undisturbed run."""

    samples: Samples
    weights: Weights | None
    """Final weights, or None if dependent on timing."""
    versions: list[set[int]]
    """Weight versions of each step's tokens."""
    seconds: float
    """Seconds from the first step to the end."""


def wrong(run: Disturbed, expected: Expected | None) -> list[str]:
    """Returns the failed expectations of a run with a good end."""
    mistakes = []
    if (steps := [row["step"] for row in run.rows]) != list(range(1, STEPS + 1)):
        mistakes.append(f"steps {steps}")
    if idle := [row["step"] for row in run.rows if not row.get("policy/grad_norm")]:
        mistakes.append(f"steps {idle} have changed nothing")
    for step in range(1, STEPS + 1):
        file = run.folder / "run" / "trajectories" / f"step_{step:06d}.parquet"
        played = parquet.read(file) if file.exists() else []
        oldest = max((step - 1 - version for t in played for version, _ in t.versions), default=0)
        if oldest > STALENESS[run.mode]:
            mistakes.append(f"step {step}: a token of {oldest} syncs ago")
        if len(played) != PROMPTS * SAMPLES:
            mistakes.append(f"step {step}: {len(played)} trajectories")
    samples = trained(run.folder)
    if doubled := sum(count > 1 for count in samples.values()):
        mistakes.append(f"{doubled} samples were trained on more than once")
    if expected is not None:
        if lost := len(expected.samples.keys() - samples.keys()):
            mistakes.append(f"{lost} samples of the undisturbed run were not trained on")
        if (final := compared(run, expected)) in ("other", "no"):
            mistakes.append(f"{final} weights than undisturbed" if final == "other" else "no weights were exported")
    return mistakes


def compared(run: Disturbed, expected: Expected) -> str | None:
    """Compares the final weights with the undisturbed run's: `same`, to the bit; `redrawn`, after an engine died during
    a batch; `other`; or `no`, without readable weights. None if the weights depend on timing."""
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
    """Returns the weight versions of each step's tokens."""
    files = sorted((folder / "run" / "trajectories").glob("step_*.parquet"))
    return [{version for t in parquet.read(file) for version, _ in t.versions} for file in files]


def engine_died(run: Disturbed) -> bool:
    """Returns True if an engine was killed, perhaps during a batch."""
    return any(one["role"] == "VllmEngine" for one in run.kills)


def undisturbed(folder: Path, mode: str) -> Expected:
    """Runs a mode without kills; returns the expected results."""
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
    """Kills roles in order, then waits for the end; returns the kills and the results."""
    mistakes: list[str] = []
    final = None
    with disturbed(folder, mode) as run:
        try:
            for number, role in enumerate(roles):
                # Every other kill waits for recovery from the previous kill; the others come at any moment.
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
    """Kills a process of the role as soon as possible; a finished run is left alone.

    Raises:
        Hangs: No such process appears.
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
    """Kills, and prints the results."""
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
                roles.remove(one["role"])  # a run may end before all kills
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    bad, kill_count = [one for one in kept if one["wrong"]], sum(len(one["kills"]) for one in kept)
    print(f"{kill_count} of {args.kills} kills were made; {len(bad)} of {len(kept)} runs were not as they must be")
    return 1 if bad or kill_count < args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
