"""A node's part in a Slurm job: runs Ray on every node and, on the first node, the launcher once.

srun --ntasks-per-node=1 … python -m skyrl_mega.cluster.slurm_node FOLDER LAUNCHER-ARGUMENTS…

Called by `launch/slurm.sh`, in a container or not. SKYRL_MEGA_COMMAND=preflight replaces the launcher by the preflight.
The nodes find each other through FOLDER on a shared file system:

    address          address of the Ray cluster's head, with ports chosen by the system
    up/NODE          Ray runs on this node
    failed/NODE      Ray does not run on this node; the content says why
    stop             written by the batch script: checkpoint and end (SIGUSR1 for the launcher)
    code             the launcher's exit code; the job is over
    NODE.log         output of `ray start` on this node

Every wait is limited in time, and at the end a node always ends all processes started here. Signal handlers only record
a signal; the waiting loops react, so no call is interrupted. Uses the standard library only, because this process waits
for hours alongside the run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from skyrl_mega.cluster.actor_process import address_of, start_guard
from skyrl_mega.cluster.node_caches import cache_variables
from skyrl_mega.cluster.ray_session import ENVIRONMENT
from skyrl_mega.cluster.user import set_user_variables

FAULT, CANCELLED = 1, 143
LOOK_EVERY_S = 0.5
TRIES = 3
"""Number of attempts to start Ray on a node."""
TERMINATE_S = 10.0
"""Seconds until a process must end after SIGTERM: two in a row fit into Slurm's KillWait (30 s)."""

ANY_PORT = [
    f"--{port}=0"
    for port in (
        "object-manager-port",
        "node-manager-port",
        "min-worker-port",
        "max-worker-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "runtime-env-agent-port",
        "metrics-export-port",
    )
]
"""Options that let the system pick every port when it is opened, so no other run on the node can hold it."""
HEAD = ["--head", "--port=0", "--include-dashboard=false", "--no-monitor"]


class Ended(Exception):
    """This node's part is over; `code` is the exit code. `why` is the reason."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class NodeFailed(Ended):
    """This node's part is over because the node failed; the job may continue without this node."""

    def __init__(self, why: str) -> None:
        super().__init__(FAULT, why)


@dataclass(frozen=True)
class Allocation:
    """The allocation as seen by this node."""

    folder: Path
    """Folder shared by the job's nodes."""
    node: str
    """This node's name in Slurm."""
    rank: int
    """Number of this node in the job; 0 on the first node, which also runs the batch script."""
    nodes: tuple[str, ...]
    """All nodes of the job."""
    cpus: int
    """CPUs of this node; `gpus` counts the GPUs."""
    gpus: int
    """GPUs of this node; 0 on CPUs."""
    name: str
    """Unique among all jobs and all restarts of this job."""
    wait_s: float
    """Seconds until all nodes must be up."""
    interface: str | None
    """Network interface for Ray; None leaves the choice to Ray."""
    command: str = "launch"
    """`launch` or `preflight`."""
    began: float = field(default_factory=time.monotonic)
    """`time.monotonic()` at the start of this node's part."""

    @classmethod
    def of(cls, folder: Path, env: Mapping[str, str]) -> Allocation:
        """Returns the allocation described by the environment variables of Slurm and of `launch/slurm.sh`.

        Args:
            folder: Folder shared by the job's nodes.
            env: The environment variables.

        Raises:
            KeyError: `SLURMD_NODENAME`, `SLURM_PROCID`, `SLURM_CPUS_ON_NODE`, `SLURM_JOB_ID` or `SKYRL_MEGA_NODES` is
                missing. Other variables have defaults.
            ValueError: `SLURM_PROCID`, `SLURM_CPUS_ON_NODE`, `SLURM_GPUS_ON_NODE` or `SKYRL_MEGA_START_S` is no number.
        """
        return cls(
            folder=folder,
            node=env["SLURMD_NODENAME"],
            rank=int(env["SLURM_PROCID"]),
            nodes=tuple(env["SKYRL_MEGA_NODES"].split(",")),
            cpus=int(env["SLURM_CPUS_ON_NODE"]),
            gpus=int(env.get("SLURM_GPUS_ON_NODE") or 0),
            name=f"{env['SLURM_JOB_ID']}-{env.get('SLURM_RESTART_COUNT') or 0}",
            wait_s=float(env.get("SKYRL_MEGA_START_S") or 600),
            interface=env.get("SKYRL_MEGA_INTERFACE") or None,
            command=env.get("SKYRL_MEGA_COMMAND") or "launch",
        )

    def say(self, text: str) -> None:
        """Prints a line to the job's output, after the seconds since this node's process began."""
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def names(self, state: str) -> list[str]:
        """Returns the names of the nodes with this state, sorted.

        Args:
            state: `up` or `failed`.
        """
        return sorted(file.name for file in (self.folder / state).iterdir())

    def write(self, file: str, text: str = "") -> None:
        """Writes a text to a file of the shared folder atomically, replacing an existing file. `file` is a path inside
        the shared folder. Raises OSError if the file cannot be written."""
        partial = self.folder / f".{self.node}.partial"
        partial.write_text(text)
        partial.rename(self.folder / file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this node's part of a Slurm job and returns the exit code. Writes the first node's code into the shared
    folder, which ends the other nodes; writes a node's failure there too.

    Args:
        arguments: Folder shared by the job's nodes, then the launcher's command line; None takes `sys.argv`.

    Returns:
        The launcher's exit code on the first node, or that of its dry run if the launcher refuses the arguments; 0 on
        other nodes; 1 after a failure of a node or a wait, 143 after SIGTERM or SIGINT.

    Raises:
        KeyError, ValueError: A variable of Slurm is missing or no number, as in `Allocation.of`.
        OSError: The shared folder cannot be written.
    """
    folder, *launcher = sys.argv[1:] if arguments is None else arguments
    set_user_variables()
    job = Allocation.of(Path(folder), os.environ)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _record_signal)
    # some Slurm sites send it to every process; only the file `stop` matters
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for name in ("up", "failed"):
        (job.folder / name).mkdir(parents=True, exist_ok=True)
    code = FAULT
    try:
        _use_local_caches()
        code = head(job, launcher) if job.rank == 0 else worker(job)
    except Ended as ended:
        job.say(f"{job.node}: {ended}")
        # A failure of the very first Ray process points to the installation, not to this node.
        if isinstance(ended, NodeFailed) and (job.rank or job.names("up")):
            job.write(f"failed/{job.node}", str(ended))
        code = ended.code
    finally:
        if job.rank == 0:
            job.write("code", str(code))
    return code


def _use_local_caches() -> None:
    """Sets the variables of compiled code for all processes of this node.

    Raises:
        NodeFailed: This node has no safe folder for compiled code.
    """
    try:
        os.environ.update(cache_variables(os.environ))
    except OSError as error:
        raise NodeFailed(f"no folder for compiled code (SKYRL_MEGA_CACHE): {error}") from error


def head(job: Allocation, launcher: Sequence[str]) -> int:
    """Checks the settings, starts Ray's head, waits for all nodes, runs the launcher once and returns the launcher's
    exit code. Ray and the launcher end before this returns or raises.

    Raises:
        Ended: The settings are wrong, a node failed, some nodes were not up within `job.wait_s`, or a signal was
            received.
    """
    node_options = [f"cluster.nodes={len(job.nodes)}", *([f"cluster.gpus_per_node={job.gpus}"] if job.gpus else [])]
    arguments = [*node_options, *launcher]
    command = [sys.executable, "-m", f"skyrl_mega.{job.command}", *arguments]
    job.say(shlex.join(["python", *command[1:]]))
    check = [sys.executable, "-m", "skyrl_mega.launch", *arguments, "--dry-run"]
    checking = subprocess.Popen(check, stdout=subprocess.DEVNULL, env=_environment())
    try:
        while (code := checking.poll()) is None:
            pause()
    finally:
        _end(checking)
    if code:
        raise Ended(code, "the launcher refuses its arguments; its message is above")
    with RayNode(job, HEAD) as node:
        address = node.started()
        job.write("address", address)
        job.write(f"up/{job.node}")
        job.say(f"Ray listens at {address} ({job.node})")
        wait_for_all(job, node)
        process = subprocess.Popen(command, env={**_environment(), "RAY_ADDRESS": address, "PYTHONUNBUFFERED": "1"})
        try:
            code = watch(job, node, process)
        finally:
            _end(process)
        name = "launcher" if job.command == "launch" else job.command
        job.say(f"the {name} ended with exit code {code}")
        return code


def wait_for_all(job: Allocation, node: RayNode) -> None:
    """Waits until every node of the job is up, and prints the progress. Called on the first node.

    Raises:
        Ended: A node failed, or some nodes were not up within `job.wait_s`; the message names the nodes. Or a signal
            was received.
    """
    reported: list[str] = []
    while True:
        up = job.names("up")
        if up != reported:
            job.say(f"{len(up)} of {len(job.nodes)} nodes are up: {', '.join(up)}")
            reported = up
        if len(up) == len(job.nodes):
            return
        check_all(job, node)
        if time.monotonic() - job.began > job.wait_s:
            missing = ", ".join(sorted(set(job.nodes) - set(up)))
            raise Ended(FAULT, f"{missing} did not come up within {job.wait_s:g} s (SKYRL_MEGA_START_S)")
        pause()


def check_all(job: Allocation, node: RayNode) -> None:
    """Raises Ended if Ray ended on this node or another node has reported its failure. `job` is this node's part of the
    job, `node` is Ray on this node."""
    node.check()
    if failed := job.names("failed"):
        raise Ended(FAULT, "; ".join(f"{name}: {(job.folder / 'failed' / name).read_text()}" for name in failed))


def watch(job: Allocation, node: RayNode, launcher: subprocess.Popen[bytes]) -> int:
    """Waits for the launcher's end and returns the exit code, 128 + n after signal n. Asks the launcher once to stop
    (SIGUSR1) when the batch script creates the file `stop`. The wait has no limit.

    Raises:
        Ended: A node failed, or this process received a signal.
    """
    stopping = False
    while (code := launcher.poll()) is None:
        check_all(job, node)
        if not stopping and (job.folder / "stop").exists() and _takes_signals(launcher.pid):
            stopping = True
            job.say("asked to end: the launcher writes a checkpoint")
            launcher.send_signal(signal.SIGUSR1)
        pause()
    return code if code >= 0 else 128 - code


def worker(job: Allocation) -> int:
    """Waits for the head, runs Ray on a node other than the first until the job is over, and returns 0, whatever the
    job's exit code.

    Raises:
        Ended: The head was not up within `job.wait_s`, Ray failed on this node, or a signal was received.
    """
    while not (address := job.folder / "address").exists():
        if (job.folder / "code").exists():
            return 0
        if time.monotonic() - job.began > job.wait_s:
            raise Ended(FAULT, f"the head did not come up within {job.wait_s:g} s")
        pause()
    with RayNode(job, [f"--address={address.read_text()}"]) as node:
        node.started()
        job.write(f"up/{job.node}")
        while not (job.folder / "code").exists():
            node.check()
            pause()
    return 0


class RayNode:
    """`ray start --block` on this node, for the duration of a `with` block.

    Nothing remains afterwards, even if this process dies.

    Args:
        job: This node's part of the job.
        options: Further options of `ray start`.
    """

    def __init__(self, job: Allocation, options: Sequence[str]) -> None:
        self.job, self.log = job, job.folder / f"{job.node}.log"
        self.folder = Path("/tmp") / f"skyrl-{job.name}"
        self.ray = self.folder / "r"
        """Ray's temporary folder. Ray opens this folder to every user; the parent folder stays closed to
        other users."""
        self.command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *(f"--temp-dir={self.ray}", f"--num-cpus={job.cpus}", f"--num-gpus={job.gpus}"),
            *(*ANY_PORT, "--include-log-monitor=false", *options),
            *([f"--node-ip-address={_address(job.interface)}"] if job.interface else []),
            *os.environ.get("SKYRL_MEGA_RAY_OPTIONS", "").split(),
        ]

    def __enter__(self) -> RayNode:
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a power failure
        self.folder.mkdir(mode=0o700)  # fails if another user owns the name
        self._guard = start_guard("cluster", str(self.folder))
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def _start(self) -> None:
        # Temporary files of a killed Ray process are removed together with this folder.
        env = {**_environment(), "TMPDIR": str(self.folder)}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(self.command, env=env, stdout=output, stderr=output)

    def started(self) -> str:
        """Waits until this node is part of the cluster; returns the cluster's address as `host:port`.

        Raises:
            NodeFailed: Ray did not start within `job.wait_s`, or within `TRIES` attempts (on a busy machine Ray itself
                gives up after 30 s).
            Ended: A signal was received.
        """
        written = self.ray / "ray_current_cluster"  # written by Ray at the end of a node's start
        tries = 1
        while not written.exists():
            if self._process.poll() is not None and tries < TRIES:
                tries += 1
                self.job.say(f"{self.job.node}: Ray did not start; try {tries} of {TRIES}")
                self._start()
            self.check()
            if time.monotonic() - self.job.began > self.job.wait_s:
                raise NodeFailed(f"Ray did not start within {self.job.wait_s:g} s; its log: {self.log}")
            pause()
        return written.read_text().strip()

    def check(self) -> None:
        """Raises NodeFailed, with the last line of Ray's log, if Ray ended on this node before the job."""
        if self._process.poll() is not None and not (self.job.folder / "code").exists():
            lines = self.log.read_text().strip().splitlines()
            raise NodeFailed(f"Ray ended ({lines[-1].strip() if lines else 'without output'}); its log: {self.log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(TERMINATE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Returns this process's environment with Ray's settings, minus the variables for a private cluster."""
    private = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_ADDRESS")
    hook = {"RAY_START_HOOK": "skyrl_mega.cluster.slurm_node.without_client"}
    return {**ENVIRONMENT, **{k: v for k, v in os.environ.items() if k not in private}, **hook}


def without_client(parameters: Any, head: bool) -> None:
    """Disables Ray's client server before a node starts: the port is fixed, and Ray offers no flag for this. Called by
    Ray."""
    parameters.ray_client_server_port = None


def _address(interface: str) -> str:
    try:
        address = address_of(interface)
    except OSError as error:
        raise NodeFailed(f"SKYRL_MEGA_INTERFACE={interface}: there is no such network interface") from error
    if address is None:
        raise NodeFailed(f"SKYRL_MEGA_INTERFACE={interface}: it has no IPv4 address")
    return address


def _takes_signals(process: int) -> bool:
    """Returns True if a process is a supervisor already waiting for signals; an earlier signal would be lost.

    The kernel does not show an awaited signal as blocked. SIGTTOU is blocked as well, but never awaited
    (`cluster.driver`).
    """
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.partition("SigBlk:")[2].split()[0], 16) >> (signal.SIGTTOU - 1) & 1)


_received_signals: list[int] = []
"""Numbers of received signals."""


def _record_signal(number: int, frame: FrameType | None) -> None:
    _received_signals.append(number)


def pause() -> None:
    """Waits for `LOOK_EVERY_S` seconds.

    Raises:
        Ended: A signal was received.
    """
    if not _received_signals:
        time.sleep(LOOK_EVERY_S)
    if _received_signals:
        raise Ended(CANCELLED, f"ended by {signal.Signals(_received_signals[0]).name}")


if __name__ == "__main__":
    sys.exit(main())
