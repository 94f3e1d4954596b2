"""The owner of containers: labels that name this process, and the reaper that removes the process' containers."""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from skyrl_mega.envs.containers import reaper
from skyrl_mega.envs.containers.program import client_variables
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.sandbox import folders

PREFIX = "skyrl-mega"
"""First part of the names of containers."""
LABEL = "skyrl-mega.owner"
"""Label of a container with the name of the process that started the container (`owner`)."""

START_S = 30.0
"""Time limit in seconds for the start of a reaper."""


def owner() -> str:
    """Returns a name of this process, unique among all machines that share a runtime: `<pid>-<start time>-<boot>-<PID
    namespace>`. It is at most 63 characters of letters, digits and dashes, as labels of Kubernetes need."""
    return f"{folders.owner()}-{_place()}"


def is_dead(name: str) -> bool:
    """Returns True if a name (`owner`) belongs to a process of this boot and this PID namespace that has ended. Returns
    False for processes that this process cannot see, such as processes of other machines."""
    match = re.fullmatch(r"(\d+-\d+)-(\w+-\w+)", name)
    return match is not None and match[2] == _place() and not folders.alive(folders.PREFIX + match[1])


def start_reaper(listing: Sequence[str], removal: Sequence[str], starting: str = "") -> bool:
    """Starts a reaper and returns True. The reaper is a process that removes the containers of this process after this
    process has ended. Returns False if a reaper of this process with the same listing runs.

    Args:
        listing: Command that prints the names of this process's containers, a name per line.
        removal: Command that removes the containers named in further arguments.
        starting: Argument on the command line of this process's clients that start containers; no other program
            may have it. The reaper waits for these clients first. "" waits for none.

    Raises:
        InfrastructureFault: The reaper cannot be started.
    """
    key = (os.getpid(), tuple(listing))
    with _lock:
        if key in _guards and _guards[key].is_alive():
            return False
        _guards[key] = _Guard(reaper.request_of(os.getpid(), listing, removal, starting))
    return True


class _Guard:
    """A running reaper. It acts when this process ends, which closes `stdin`.

    Raises:
        InfrastructureFault: The reaper cannot be started.
    """

    def __init__(self, request: str) -> None:
        try:
            starter = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, request],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=client_variables(),
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureFault(f"the reaper of containers cannot be started: {error.strerror}") from error
        assert starter.stdin is not None and starter.stdout is not None
        self.stdin = starter.stdin
        with starter.stdout as output:
            printed = output.readline() if select.select([output], [], [], START_S)[0] else b""
        try:
            self.process = os.pidfd_open(int(printed))
        except (ValueError, ProcessLookupError) as error:
            raise InfrastructureFault("the reaper of containers ended as it started") from error
        finally:
            if not printed:
                starter.kill()
            starter.wait()

    def is_alive(self) -> bool:
        """Returns True if the reaper runs."""
        return not select.select([self.process], [], [], 0)[0]


def _place() -> str:
    """Returns the boot of this machine and the PID namespace of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:16]
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def host() -> str:
    """Returns the name of this machine as a label's value, for people."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip("-.")[:63] or "unknown"


_guards: dict[tuple[int, tuple[str, ...]], _Guard] = {}
_lock = threading.Lock()
