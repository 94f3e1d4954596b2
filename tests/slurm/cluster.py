"""A real Slurm cluster on a single machine: every node is a set of Linux namespaces, and only the GPUs are stand-ins.

    if reason := unavailable():
        pytest.skip(reason)
    with cluster(folder, nodes=4, gpus=8) as slurm:
        job = slurm.submit("slurm/run.sbatch", "--config", "configs/quickstart.yaml")
        slurm.wait(job, timeout=120)

A node has a private network address, host name, process ids, /tmp, /dev/shm and GPU device files; the controller runs
next to the nodes. Everything depends on a single process, `controller.sh`: after the end, the kernel removes all the
rest. `controller.sh` is killed at the end of the block, and after the death of the test process.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOOLS = {
    "ip": "iproute2",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
}
"""Programs, and the Debian packages with these programs."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
BOOT_S = 180.0
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
"""Search path of programs: daemons are not on an ordinary user's path."""


class ClusterFault(RuntimeError):
    """A cluster without a start, or a job with an unexpected course; the message includes the logs."""


def unavailable() -> str | None:
    """Returns why this machine cannot run a cluster, in one line for a test's skip, or None."""
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool, path=SEARCHED) is None})
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install --no-install-recommends slurm-wlm munge)"
    if os.geteuid() != 0:
        return "a Slurm cluster of namespaces needs root"
    completed = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
    )
    return f"namespaces are not allowed here: {completed.stderr.strip()}" if completed.returncode else None


@dataclass
class Slurm:
    """A running cluster. `folder` is shared by all nodes and holds the logs."""

    folder: Path
    controller: int
    """Process 1 of the outer namespaces, by this machine's numbers."""
    environment: Mapping[str, str]

    def run(
        self, *command: str, node: str | None = None, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> str:
        """Runs a command next to the controller, or on a node; returns standard output.

        Raises:
            ClusterFault: The command failed.
        """
        inside = ["nsenter", "-t", str(self.controller), "-n", "-m", "-u", "-i", "-p"]
        if node is not None:
            first = (self.folder / f"{node}.pid").read_text().strip()
            inside += ["--", "nsenter", "-t", first, "-n", "-m", "-u", "-i", "-p"]
        done = subprocess.run(
            [*inside, f"--wd={ROOT}", *command],
            env={**self.environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise ClusterFault(f"{' '.join(command)}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, *arguments: str, env: Mapping[str, str] | None = None) -> int:
        """Runs `sbatch` and returns the job's number."""
        return int(self.run("sbatch", "--parsable", *arguments, env=env))

    def job(self, job: int | str) -> dict[str, str]:
        """Returns the fields of `scontrol show job`, by Slurm's names (a heterogeneous job: of the first part)."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job))
        return dict(re.findall(r"(\S+?)=(\S*)", shown.splitlines()[0]))

    def output(self, job: int | str) -> str:
        """Returns the job's output so far."""
        file = Path(self.job(job)["StdOut"])
        return file.read_text() if file.exists() else ""

    def wait(self, job: int | str, *, timeout: float) -> dict[str, str]:
        """Waits until the job ended and all nodes are free; returns `job(…)`.

        Raises:
            ClusterFault: The job did not end in time; includes its output.
        """

        def ended() -> dict[str, str] | None:
            facts = self.job(job)
            return facts if facts["JobState"] in ENDED else None

        return self.until(ended, job, timeout=timeout)

    def wait_for(self, job: int | str, text: str, *, timeout: float) -> None:
        """Waits until the job's output contains `text`.

        Raises:
            ClusterFault: The job ended, or the time passed, without the text; includes the output.
        """

        def there() -> bool:
            written = text in self.output(job)
            if not written and self.job(job)["JobState"] in ENDED:
                raise ClusterFault(f"job {job} ended without {text!r}:\n{self.output(job)}")
            return written

        self.until(there, job, timeout=timeout)

    def until(self, condition, job: int | str, *, timeout: float):  # type: ignore[no-untyped-def]
        """Waits for a true condition and returns the value."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.3)
        raise ClusterFault(f"job {job} after {timeout:g} s: {self.job(job)}\n{self.output(job)}")

    def power_off(self, node: str) -> None:
        """Removes the node's processes and cable at once, like a power failure."""
        first = (self.folder / f"{node}.pid").read_text().strip()
        subprocess.run(["nsenter", "-t", str(self.controller), "-m", "-p", "kill", "-KILL", first], check=True)

    def power_on(self, node: str) -> None:
        """Boots the node again; returns as soon as Slurm accepts the node."""
        self.run(str(HERE / "node_on.sh"), node.removeprefix("node"))
        deadline = time.monotonic() + BOOT_S
        while self.run("sinfo", "-h", "-n", node, "-o", "%T").strip() != "idle":  # `idle*` means a silent node
            if time.monotonic() > deadline:
                raise ClusterFault(f"{node} does not come back: {self.run('sinfo')}")
            time.sleep(0.3)

    def cancel_all(self) -> None:
        """Ends all jobs; returns as soon as Slurm's queue is empty."""
        deadline = time.monotonic() + BOOT_S
        while jobs := self.run("squeue", "-h", "-o", "%i").split():
            if time.monotonic() > deadline:
                raise ClusterFault(f"jobs do not end: {self.run('squeue')}")
            with suppress(ClusterFault):  # a job may have ended since
                self.run("scancel", *jobs)
            time.sleep(0.3)

    def on(self, node: str) -> bool:
        """Returns True if the node has power, independent of Slurm's state."""
        with suppress(ClusterFault):
            self.run("true", node=node)
            return True
        return False

    def processes(self, node: str) -> list[str]:
        """Returns the command lines on a node, without the node's own processes, and without Slurm's process of an
        ended step that slurmd has not waited for yet."""
        pattern = r"(\S*/)?(slurmd -N|bash \S+/node\.sh|sleep 3600$|ps -eo|\[slurmstepd\] <defunct>$)"
        listed = self.run("ps", "-eo", "args=", "ww", node=node).splitlines()
        return [line for line in listed if not re.match(pattern, line)]

    def listening(self, node: str) -> list[int]:
        """Returns the TCP ports with a listener on a node, without slurmd's own."""
        text = self.run("cat", "/proc/net/tcp", "/proc/net/tcp6", node=node)
        ports = {int(digits, 16) for digits in re.findall(r":\s\S+:([0-9A-F]{4}) \S+ 0A ", text)}
        return sorted(ports - {6818})


@contextmanager
def cluster(folder: Path, *, nodes: int = 4, gpus: int = 8) -> Iterator[Slurm]:
    """Yields a cluster of idle nodes, removed at the end of the block in every case.

    Args:
        folder: Empty or absent; shared by all nodes.
        nodes: Number of nodes, called node1, node2, ….
        gpus: GPUs per node: declared, with device files, but without hardware.

    Raises:
        ClusterFault: The cluster did not start.
    """
    _write_etc(folder, nodes, gpus)
    (folder / "state").mkdir()
    shared = {str(folder), str(ROOT), sys.prefix, sys.base_prefix}
    # Settings of Slurm, Ray or this project outside the tests must not reach the cluster.
    environment = {k: v for k, v in os.environ.items() if not re.match("(SLURM|SBATCH|SRUN|RAY|SKYRL)_", k)}
    environment |= {
        "PATH": SEARCHED,
        "HERE": str(HERE),
        "FOLDER": str(folder),
        "NODES": str(nodes),
        "GPUS": str(gpus),
        "SHARED": ":".join(sorted(shared)),
    }
    with (folder / "boot.log").open("w") as log:
        outer = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig=KILL"),  # also if this process is killed
                *("unshare", "--net", "--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child=SIGKILL"),
                *("--mount-proc", "--propagation", "private", str(HERE / "controller.sh")),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield _up(folder, outer, nodes, environment)
    finally:
        outer.send_signal(signal.SIGKILL)  # `--kill-child` ends process 1, and the kernel all the rest
        outer.wait()


def _write_etc(folder: Path, nodes: int, gpus: int) -> None:
    """Writes the files of /etc common to all nodes: Slurm's settings, munge's key, and host names."""
    etc = folder / "etc"
    etc.mkdir(parents=True)
    for name, values in (
        ("slurm.conf", {"FOLDER": str(folder), "NODES": str(nodes), "GPUS": str(gpus)}),
        ("gres.conf", {"LAST": str(gpus - 1)}),
    ):
        text = (HERE / "etc" / name).read_text()
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        (etc / name).write_text(text)
    key = etc / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    addresses = ["127.0.0.1 localhost", "10.77.0.254 controller"]
    addresses += [f"10.77.0.{n} node{n}" for n in range(1, nodes + 1)]
    (etc / "hosts").write_text("\n".join(addresses) + "\n")
    (etc / "resolv.conf").write_text("options timeout:1 attempts:1\n")  # no server answers for other names
    _container_plugin(etc)


def _container_plugin(etc: Path) -> None:
    """Compiles the stand-in for pyxis if a compiler is installed."""
    if compiler := shutil.which("cc"):
        controller = shutil.which("slurmctld", path=SEARCHED) or ""
        version = subprocess.run([controller, "-V"], capture_output=True, text=True, check=True).stdout
        major, minor, micro = map(int, re.findall(r"\d+", version)[:3])
        number = (major << 16) + (minor << 8) + micro
        source, plugin = HERE / "pyxis.c", etc / "pyxis.so"
        subprocess.run([compiler, "-shared", "-fPIC", f"-DVERSION={number}", "-o", plugin, source], check=True)
        (etc / "plugstack.conf").write_text("required /etc/slurm/pyxis.so\n")


def _up(folder: Path, outer: subprocess.Popen[bytes], nodes: int, environment: Mapping[str, str]) -> Slurm:
    """Waits until all nodes are idle."""
    deadline = time.monotonic() + BOOT_S
    seen = ""
    while time.monotonic() < deadline and outer.poll() is None:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        if children:
            slurm = Slurm(folder, int(children[0]), environment)
            try:
                seen = slurm.run("sinfo", "-h", "-N", "-o", "%N %T")
            except (ClusterFault, subprocess.TimeoutExpired) as error:
                seen = str(error)
            if len(re.findall(r"^\S+ idle$", seen, re.MULTILINE)) == nodes:
                return slurm
        time.sleep(0.1)
    raise ClusterFault(f"no cluster after {BOOT_S:g} s: {seen}\n{(folder / 'boot.log').read_text()}")
