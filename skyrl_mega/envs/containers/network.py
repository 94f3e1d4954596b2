"""A listening socket in the network namespace of a container: the container reaches the policy, without a network."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from skyrl_mega.envs.containers.runtime import Container
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.sandbox import kernel
from skyrl_mega.envs.sandbox.listen import listen


@runtime_checkable
class LocalContainer(Container, Protocol):
    """A container on this machine."""

    def process(self) -> int:
        """Returns the id, on this machine, of a process of the container. Raises InfrastructureFault if the container
        does not run."""


def listen_inside(process: int) -> socket.socket | None:
    """Returns a socket that listens on loopback, at a free port, in the network namespace of a process. Needs root.

    Args:
        process: Id of a process on this machine.

    Returns:
        The socket, or None if the process has the network of this process.

    Raises:
        InfrastructureFault: The process has ended, or the kernel refuses.
    """
    try:
        with ThreadPoolExecutor(1) as thread:  # the namespace belongs to the thread, which ends here
            return thread.submit(_listen_inside, process).result()
    except OSError as error:
        raise InfrastructureFault(f"no address of the policy in the container: {error}") from error


def _listen_inside(process: int) -> socket.socket | None:
    with open(f"/proc/{process}/ns/net", "rb") as namespace:
        if os.path.samestat(os.fstat(namespace.fileno()), os.stat("/proc/thread-self/ns/net")):
            return None
        kernel.join(namespace.fileno(), kernel.CLONE_NEWNET)
        return listen(0)
