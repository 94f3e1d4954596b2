"""Injects every fault listed in `FAULTS` into a small real run, and prints a table of the results.

    .venv/bin/python -m benchmarks.faults [--only policy …]

A run of six steps is disturbed in the fourth. The table shows for each fault: the messages of the run, the exit code,
the seconds lost against the undisturbed run, and a bitwise comparison of the final weights with the undisturbed run's.
Exits with 1 if a run ends in another way than expected, weights differ, or a process, a port, a namespace, shared
memory or a lock is left. Takes 25 minutes on 2 cores; faults of a disk need root, for separate file systems.
benchmarks/results/faults.json keeps the last result of each fault.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from skyrl_mega.telemetry.metrics import read
from tests.trainer import quickstart

ROOT = Path(__file__).parents[1]
SETTINGS = (
    *(
        "run.name=run",
        "run.steps=6",
        "run.epochs=10",
        "checkpoint.every=2",
        "checkpoint.export=true",
        "evaluation.every=0",
    ),
    *("evaluation.before=false", "telemetry.trackers=[]", "telemetry.trajectories_every=0"),
    # Every step trains: unchanged weights would be the same after any fault.
    *("algorithm.dynamic_sampling.enabled=false", "algorithm.overlong.filter=false"),
    f"environment.classes.addition={ROOT}/benchmarks/fault_env.py:ParityEnv",
    *("cluster.call_timeout_s=20", "rollout.request_timeout_s=10", "weights.timeout_s=10"),
)
LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""
LIMIT_S = 240.0
"""Time limit of a run, exceeded only if the run hangs."""
TOLD = ("fault:", "out of service", "starts again", "resuming", "no checkpoint", "left out", "stopped by", "error:")
"""Marks of the output lines to show."""


@dataclass
class Trial:
    """A disturbed run in a separate folder."""

    folder: Path
    runs: Path
    """Value of `run.directory`."""
    out: str = ""
    codes: list[int] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    began: float | None = None
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns the seconds from the first command's start to the last command's end."""
        assert self.began is not None
        return self.ended - self.began

    def start(self, *settings: str, **variables: str) -> None:
        """Starts or resumes the run."""
        self.began = self.began or time.monotonic()
        self.process = quickstart.start(self.folder, *SETTINGS, f"run.directory={self.runs}", *settings, **variables)

    def row(self, step: int) -> None:
        """Waits until a step is done."""
        assert self.process is not None
        file, deadline = self.runs / "run" / "metrics.jsonl", time.monotonic() + LIMIT_S
        while not (file.exists() and any(row["step"] == step for row in read(file))):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise RuntimeError(f"the run ended before step {step}, with {self.codes[-1]}:\n{self.out}")
            time.sleep(0.02)

    def signal(self, actor: str, number: int) -> None:
        """Sends a signal to a process of an actor class, to the `driver`, or to the supervising `command`."""
        assert self.process is not None
        if actor == "command":
            self.process.send_signal(number)
            return
        if actor == "driver":
            os.kill(quickstart.driver(self.process), number)
            return
        pids = quickstart.actors(self.folder, actor)
        assert pids, f"no process of {actor}"
        os.kill(pids[-1], number)

    def end(self) -> None:
        """Waits for the end of the run and of all processes."""
        assert self.process is not None
        try:
            self.out += self.process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.out += self.process.communicate()[0] + f"\nno end within {LIMIT_S:g} s"
        self.codes.append(self.process.returncode)
        self.ended = time.monotonic()
        deadline = time.monotonic() + 30
        while quickstart.left_over(self.folder):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes are left: {quickstart.left_over(self.folder)}")
            time.sleep(0.1)

    def said(self) -> str:
        """Returns the relevant lines of the output."""
        lines = [line.strip() for line in self.out.splitlines() if any(mark in line for mark in TOLD)]
        lines = [line.replace(f"{self.folder}/", "") for line in lines]
        return "\n".join(line if len(line) <= 150 else line[:149] + "…" for line in lines)


def undisturbed(t: Trial) -> None:
    """Runs without a fault."""
    t.start()
    t.end()


def to(actor: str, number: int, after_s: float) -> Callable[[Trial], None]:
    """Returns a fault: a signal in the fourth step."""

    def happen(t: Trial) -> None:
        t.start()
        t.row(3)
        time.sleep(after_s)
        t.signal(actor, number)
        t.end()

    return happen


def driver_killed(t: Trial) -> None:
    """Kills the driver, and gives the command again."""
    to("driver", signal.SIGKILL, 0.3)(t)
    t.start()
    t.end()


def command_killed(t: Trial) -> None:
    """Kills the command, and gives the command again."""
    to("command", signal.SIGKILL, 0.3)(t)
    t.start()
    t.end()


def command_terminated(t: Trial) -> None:
    """Terminates the command, and gives the command again."""
    to("command", signal.SIGTERM, 0.3)(t)
    t.start()
    t.end()


def driver_stopped(t: Trial) -> None:
    """Stops the driver for ten seconds."""
    t.start()
    t.row(3)
    t.signal("driver", signal.SIGSTOP)
    time.sleep(10)
    t.signal("driver", signal.SIGCONT)
    t.end()


def truncated(t: Trial) -> None:
    """Cuts off a file of the newest checkpoint before resuming."""
    t.start()
    t.row(5)
    t.signal("command", signal.SIGKILL)
    t.end()
    victim = max((t.runs / "run" / "checkpoints" / "step_000004" / "policy").glob("*.safetensors"))
    os.truncate(victim, victim.stat().st_size // 2)
    t.start()
    t.end()


def fill(folder: Path) -> Path:
    """Makes a file to leave only 200 kB free on the folder's file system."""
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - 200_000)
    return ballast


def full_disk(t: Trial) -> None:
    """Fills the disk when a checkpoint is due, and frees space a step later."""
    t.start()
    t.row(3)
    ballast = fill(t.runs)
    t.row(5)
    ballast.unlink()
    t.end()


def full_at_first(t: Trial) -> None:
    """Fills the disk before the first checkpoint; frees space and gives the command again."""
    ballast = fill(t.runs)
    t.start()
    t.end()
    ballast.unlink()
    t.start()
    t.end()


def unreachable(t: Trial) -> None:
    """Hides the run's folder under a read-only mount; unmounts and gives the command again."""
    t.start()
    t.row(3)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "skyrl", str(t.runs)], check=True)
    t.end()
    subprocess.run(["umount", "-l", str(t.runs)], check=True)
    t.start()
    t.end()


def node(actor: str, number: int) -> Callable[[Trial], None]:
    """Returns a fault: the death of a Ray node with such an actor in the fourth step. A new node joins, as in a managed
    cluster."""

    def processes(name: str) -> list[int]:
        return quickstart.marked("SKYRL_MEGA_NODE", name)

    def happen(t: Trial) -> None:
        from ray.cluster_utils import Cluster

        cluster = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        names = [f"{t.folder}/{letter}" for letter in "abc"]

        def add(name: str) -> None:
            cluster.add_node(num_cpus=4, env_vars={"SKYRL_MEGA_NODE": name, "OMP_NUM_THREADS": "1"})

        try:
            for name in names[:2]:
                add(name)
            t.start("cluster.nodes=2", RAY_ADDRESS=cluster.address)
            t.row(3)
            time.sleep(0.4)
            title = f"ray::{actor}".encode()
            (lost,) = (n for n in names if any(title in Path(f"/proc/{p}/cmdline").read_bytes() for p in processes(n)))
            for pid in processes(lost):
                os.kill(pid, number)
            add(names[2])
            t.end()
            ours = (b"MegatronActor", b"VllmEngine", b"reaper.py")
            for pid in (pid for name in names if name != lost for pid in processes(name)):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if any(word in words for word in ours):
                    raise RuntimeError(f"left on a node: {words.decode()}")
        finally:
            for pid in (pid for name in names for pid in processes(name)):
                os.kill(pid, signal.SIGKILL)
            cluster.shutdown()

    return happen


@dataclass(frozen=True)
class Fault:
    """A fault, and the expected end of the run."""

    name: str
    happen: Callable[[Trial], None]
    codes: tuple[int, ...] = (0,)
    """Exit codes of the commands, in order."""
    same: bool = True
    """True if sampling is unchanged, hence the final weights equal the undisturbed run's."""
    disk: bool = False
    """True if the fault needs a separate file system."""


FAULTS = [
    Fault("engine SIGKILL", to("VllmEngine", signal.SIGKILL, 0.1)),
    Fault("engine SIGSTOP", to("VllmEngine", signal.SIGSTOP, 0.1)),
    Fault("policy SIGKILL", to("MegatronActor", signal.SIGKILL, 0.4)),
    Fault("policy SIGSTOP", to("MegatronActor", signal.SIGSTOP, 0.4)),
    Fault("driver SIGKILL", driver_killed, (1, 0)),
    Fault("command SIGKILL", command_killed, (-signal.SIGKILL, 0)),
    Fault("command SIGTERM", command_terminated, (75, 0)),
    Fault("driver SIGSTOP 10 s", driver_stopped),
    Fault("policy's node SIGKILL", node("MegatronActor", signal.SIGKILL)),
    Fault("policy's node SIGSTOP", node("MegatronActor", signal.SIGSTOP)),
    Fault("engine's node SIGKILL", node("VllmEngine", signal.SIGKILL)),
    Fault("checkpoint truncated", truncated, (-signal.SIGKILL, 0)),
    Fault("disk full", full_disk, disk=True),
    Fault("disk full at first", full_at_first, (1, 0), disk=True),
    Fault("shared path gone", unreachable, (1, 0), disk=True),
]


def weights(runs: Path) -> dict[str, torch.Tensor]:
    """Returns the exported weights of a finished run."""
    return load_file(runs / "run" / "model" / "model.safetensors")


def resources() -> set[str]:
    """Returns resources of this machine in use or left behind: ports, shared memory, network namespaces."""
    sockets = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    ports = {f"port {int(words[1].rpartition(':')[2], 16)}" for words in sockets if words[3] == LISTENING}
    return ports | {str(path) for place in ("/dev/shm", "/run/netns") for path in Path(place).glob("*")}


def attempt(fault: Fault, folder: Path) -> Trial:
    """Injects the fault, and checks for leftovers."""
    trial = Trial(folder, folder / "runs")
    trial.runs.mkdir(parents=True)
    if fault.disk:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "skyrl", str(trial.runs)], check=True)
    before = resources()
    fault.happen(trial)
    deadline = time.monotonic() + 30
    while left := resources() - before:
        if time.monotonic() > deadline:
            raise RuntimeError(f"left behind: {sorted(left)}")
        time.sleep(0.2)
    with (trial.runs / "run" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return trial


def main() -> int:
    """Runs all faults and prints the table; returns 0 if all ended as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="faults whose name begins so")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    picked = [f for f in FAULTS if not args.only or f.name.startswith(tuple(args.only))]
    if os.geteuid():
        console.print("not root: the faults of a disk are left out")
        picked = [f for f in picked if not f.disk]
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        whole = attempt(Fault("undisturbed", undisturbed), Path(place) / "undisturbed")
        usual = whole.seconds
        if whole.codes != [0]:
            console.print(whole.out, markup=False)
            return 1
        trained = [row["step"] for row in read(whole.runs / "run" / "metrics.jsonl") if row.get("policy/grad_norm")]
        if trained != [1, 2, 3, 4, 5, 6]:
            console.print(f"only these steps of the undisturbed run trained: {trained}")
            return 1
        expected = weights(whole.runs)
        console.print(f"undisturbed: {usual:.0f} s")
        for fault in picked:
            folder = Path(place) / re.sub(r"\W+", "-", fault.name)
            try:
                trial = attempt(fault, folder)
                seconds = trial.seconds
                final = weights(trial.runs) if trial.codes == list(fault.codes) else {}
                same = final.keys() == expected.keys() and all(torch.equal(final[n], t) for n, t in expected.items())
            finally:
                if fault.disk:
                    subprocess.run(["umount", "-l", str(folder / "runs")], check=False)
            good = trial.codes == list(fault.codes) and bool(final) and (same or not fault.same)
            results.append(
                {"fault": fault.name, "codes": trial.codes, "lost_s": round(seconds - usual, 1), "same": same}
                | {"good": good, "said": trial.said().splitlines()}
            )
            console.print(f"{fault.name}: exit {trial.codes}, {seconds - usual:+.0f} s, {'good' if good else 'BAD'}")
            if not good:
                console.print(trial.out, markup=False)
            keep(results[-1] | {"undisturbed_s": round(usual, 1)})
    console.print(table(results))
    return 0 if all(r["good"] for r in results) else 1


def keep(result: dict[str, object]) -> None:
    """Replaces the saved result of a fault."""
    file = ROOT / "benchmarks" / "results" / "faults.json"
    kept = {r["fault"]: r for r in json.loads(file.read_text())} if file.exists() else {}
    kept[result["fault"]] = result
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps([kept[f.name] for f in FAULTS if f.name in kept], indent=1) + "\n")


def table(results: list[dict[str, object]]) -> Table:
    """Returns a table with a row per fault."""
    rendered = Table("fault", "exit", "lost s", "weights", "what the run said", show_lines=True)
    for r in results:
        codes, lines = r["codes"], r["said"]
        assert isinstance(codes, list) and isinstance(lines, list)
        shown = ("same" if r["same"] else "differ") + ("" if r["good"] else " !")
        rendered.add_row(str(r["fault"]), ", ".join(map(str, codes)), str(r["lost_s"]), shown, "\n".join(lines))
    return rendered


if __name__ == "__main__":
    sys.exit(main())
