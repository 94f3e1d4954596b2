"""Set-up of an actor's process before the actor is constructed."""

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
from skyrl_mega.cluster.user import set_user_variables


@dataclass(frozen=True)
class ActorIdentity:
    """Group, rank and log file of an actor."""

    group: str
    """Name of the actor's group in errors and log files."""
    rank: int
    log: str | None
    """File for stdout and stderr of the process and its children; None leaves the output to Ray."""

    @property
    def name(self) -> str:
        """Name for the user: group and rank, such as `policy-3`."""
        return f"{self.group}-{self.rank}"


@dataclass(frozen=True)
class Location:
    """Machine, process and GPUs of a running actor."""

    machine: str
    """Identifies the running kernel: process ids are only valid on this machine."""
    pid: int
    """Process id; equals the id of the process group."""
    address: str
    """IP address of the node."""
    node: str
    """Ray's id of the node."""
    gpus: tuple[str, ...]
    """GPUs assigned by Ray, in the notation of CUDA_VISIBLE_DEVICES."""


def machine() -> str:
    """Returns the boot id of the running kernel and the host name, separated by a space."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {socket.gethostname()}"


def address_of(interface: str) -> str | None:
    """Returns the IPv4 address of a network interface of this machine; None for an interface without one.

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
    """Returns the name of this machine's network interface with this IPv4 address; None if no interface has this
    address."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), None)


_SIOCGIFADDR = 0x8915
"""Linux ioctl request for the address of an interface."""

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with torch's folder for compiled code."""

_guards: list[subprocess.Popen[bytes]] = []
"""Guards of this process, kept alive on purpose: garbage collection would close the pipe to a guard."""


def compile_cache() -> str:
    """Returns the path of torch's default folder for compiled code, in the system's temporary folder. Unlike an actor's
    temporary files, this folder outlasts a run."""
    return f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"


def set_up_process() -> None:
    """Gives this process a new process group, a new temporary folder, and a guard process, which kills the group and
    removes the folder after this process ends.

    Also sets environment variables: USER and HOME if the user is unknown, TMPDIR, torch's folder for compiled code,
    those of `library_settings`, and Gloo's network interface. To be called once, in an actor's process of Ray.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    set_user_variables()
    # vLLM leaves sockets behind when it is killed; code compiled by torch stays in its usual folder.
    os.environ.setdefault(CACHE, compile_cache())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="skyrl-actor-")
    _guards.append(start_guard("group", tempfile.tempdir))
    _guards[-1].wait()  # waits for the process that forks the guard
    os.environ |= library_settings(os.environ)
    import ray

    if interface := interface_of(ray.util.get_node_ip_address()):
        # By default Gloo uses the address of the host name, which may be a loopback address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def library_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables for every actor, except those already set: `CUDA_DEVICE_ORDER`; without
    `NCCL_DEBUG` in `env` also `NCCL_DEBUG` and `NCCL_DEBUG_SUBSYS`; and `CUDNN_PATH`, for Transformer Engine, if cuDNN
    is installed as a Python package. Sets no variable.

    Args:
        env: The process's environment.
    """
    # Number devices like NVML and Ray; CUDA's default is by speed.
    settings = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if "NCCL_DEBUG" not in env:
        # A few lines per communicator; without them a fallback of NCCL to TCP stays unnoticed.
        settings |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    cudnn = Path(sysconfig.get_path("purelib"), "nvidia", "cudnn")
    if cudnn.is_dir():
        # Otherwise Transformer Engine loads the machine's cuDNN in addition to torch's.
        settings["CUDNN_PATH"] = str(cudnn)
    return {name: value for name, value in settings.items() if name not in env}


def redirect_and_bind(identity: ActorIdentity) -> None:
    """Appends stdout and stderr of this process to the actor's log file, if any, creating missing folders, and binds
    the process to the CPUs nearest to the visible GPUs. Prints these CPUs; without GPUs, NVML or such CPUs the process
    stays unbound. `identity` has the actor's name and log file. Raises OSError if the log cannot be opened."""
    if identity.log is not None:
        log = Path(identity.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    devices = numa.visible_devices()
    if cpus := numa.bind(devices):
        print(f"{identity.name}: on CPUs {numa.text(cpus)}, nearest to GPU {','.join(devices)}", flush=True)


def start_guard(kind: str, folder: str) -> subprocess.Popen[bytes]:
    """Starts a guard process, which cleans up after the end of this process. Does not wait until the guard runs.

    The guard acts when this process ends or closes the returned object's stdin, so keep the object: garbage collection
    closes it. The guard's output is discarded: a full or closed log must not stop the guard.

    Args:
        kind: `group`: the guard kills this process's group, and removes its shared memory and the folder. `cluster`:
            the guard kills the Ray processes of the folder, and removes the folder.
        folder: Temporary folder to remove.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, kind, str(os.getpid()), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def hosted(cls: type) -> type:
    """Returns a subclass of `cls` for an actor of Ray, whose constructor takes no arguments and only sets up the
    process.

    The method `construct(identity, kwargs)` redirects the output, binds the process to the CPUs nearest to its GPUs,
    and runs the constructor of `cls`. The actor's rank can therefore depend on the node and GPU of the process. The
    method `location` returns the `Location` of the process, `free_port` a free port of the node.
    """

    class Hosted(cls):
        def __init__(self) -> None:
            set_up_process()

        def location(self) -> Location:
            import ray

            context = ray.get_runtime_context()
            gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
            return Location(machine(), os.getpid(), ray.util.get_node_ip_address(), context.get_node_id(), gpus)

        def construct(self, identity: ActorIdentity, kwargs: dict[str, Any]) -> None:
            redirect_and_bind(identity)
            super().__init__(**kwargs)

        def free_port(self) -> int:
            """Returns a currently free TCP port of the actor's node."""
            with socket.socket() as probe:
                probe.bind(("", 0))
                return int(probe.getsockname()[1])

    Hosted.__name__ = Hosted.__qualname__ = cls.__name__
    return Hosted
