"""What every actor's process does before it becomes that actor."""

from __future__ import annotations

import fcntl
import getpass
import os
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.cluster import numa, reaper
from skyrl_mega.cluster.user import name_user


@dataclass(frozen=True)
class ActorPlace:
    """Who an actor is."""

    group: str
    """Name of its group, as errors and log files call it."""
    rank: int
    log: str | None
    """File that takes stdout and stderr of its process and of its children; None leaves them to Ray."""

    @property
    def name(self) -> str:
        """For people: `policy-3`."""
        return f"{self.group}-{self.rank}"


@dataclass(frozen=True)
class Location:
    """Where an actor's process runs."""

    machine: str
    """Identifies the running kernel, so that process ids mean something only there."""
    pid: int
    """Also the id of its process group."""
    address: str
    """IP address of its node."""
    node: str
    """Ray's id of its node."""
    gpus: tuple[str, ...]
    """GPUs that Ray has given it, as CUDA_VISIBLE_DEVICES names them."""


def machine() -> str:
    """This machine's boot id and host name."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {socket.gethostname()}"


def address_of(interface: str) -> str | None:
    """IPv4 address of a network interface of this machine; None where it has none.

    Raises:
        OSError: There is no such interface.
    """
    socket.if_nametoindex(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an IPv4 address; None where none has."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), None)


_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address."""

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Variable with the folder in which torch keeps what it has compiled."""

_guards: list[subprocess.Popen[bytes]] = []
"""Held for the life of the process: a collected one would close its pipe."""


def compiled() -> str:
    """The folder that torch takes where nobody names one. It outlasts a run, whose temporary files do not."""
    return f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"


def settle_in() -> None:
    """Gives the process a group and a temporary folder of its own, with a guard that removes both; tells the libraries
    under torch what they do not find out by themselves."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    name_user()
    # vLLM leaves sockets behind when it is ended from outside; what torch compiles is kept where it always is.
    os.environ.setdefault(CACHE, compiled())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="skyrl-actor-")
    _guards.append(start_guard("group", tempfile.tempdir))
    _guards[-1].wait()  # its first process; the guard itself is that one's child
    os.environ |= library_settings(os.environ)
    import ray

    if interface := interface_of(ray.util.get_node_ip_address()):
        # Gloo would take whatever address the host name resolves to, which may be a loopback address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def library_settings(env: Mapping[str, str]) -> dict[str, str]:
    """What CUDA, NCCL and Transformer Engine are told in every actor, where the user has not told them otherwise.

    Args:
        env: The process's environment.
    """
    # CUDA counts devices as NVML and Ray do, not by speed.
    settings = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if "NCCL_DEBUG" not in env:
        # A few lines for each communicator. Without them nobody learns that NCCL fell back to TCP.
        settings |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    cudnn = Path(sysconfig.get_path("purelib"), "nvidia", "cudnn")
    if cudnn.is_dir():
        # Transformer Engine would take the machine's, beside the one that torch has loaded.
        settings["CUDNN_PATH"] = str(cudnn)
    return {name: value for name, value in settings.items() if name not in env}


def take(seat: ActorPlace) -> None:
    """Sends the process's output to its log file, and keeps it on the CPUs nearest to its GPUs."""
    if seat.log is not None:
        log = Path(seat.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    devices = numa.visible()
    if cpus := numa.bind(devices):
        print(f"{seat.name}: on CPUs {numa.text(cpus)}, nearest to GPU {','.join(devices)}", flush=True)


def start_guard(what: str, folder: str) -> subprocess.Popen[bytes]:
    """Starts a guard of this process; see `guard`. It wakes when this process ends or closes the returned object's
    stdin. Its output goes nowhere: a full or closed log must not stop it."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, what, str(os.getpid()), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def hosted(cls: type) -> type:
    """A subclass of `cls` whose process settles in first and becomes a `cls` only when it is told which.

    So its rank may follow from where it runs.
    """

    class Hosted(cls):
        def __init__(self) -> None:
            settle_in()

        def location(self) -> Location:
            import ray

            context = ray.get_runtime_context()
            gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
            return Location(machine(), os.getpid(), ray.util.get_node_ip_address(), context.get_node_id(), gpus)

        def construct(self, seat: ActorPlace, kwargs: dict[str, Any]) -> None:
            take(seat)
            super().__init__(**kwargs)

        def free_port(self) -> int:
            """A TCP port that nobody listens on at this moment, on the actor's node."""
            with socket.socket() as probe:
                probe.bind(("", 0))
                return int(probe.getsockname()[1])

    Hosted.__name__ = Hosted.__qualname__ = cls.__name__
    return Hosted
