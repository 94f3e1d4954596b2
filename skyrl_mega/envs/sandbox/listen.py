"""A listening socket in the network namespace of a command, passed to the host: the only address within reach of the
command. Standard library only: the jail uses this module too.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Callable

HOST, PORT = "127.0.0.1", 8000
"""Address of the socket inside; the namespace has no other socket, so the port is free."""
BACKLOG = 128
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
INTERFACE = "16sh22x"
"""`struct ifreq` with flags."""


class SandboxListener:
    """Host side: waits for the listening socket of a command.

    Args:
        serve: Receives the listening socket, and closes it in the end.
    """

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._here, self.there = socket.socketpair()
        """Both ends; `there` is for the jail."""

    def fileno(self) -> int:
        """Returns the descriptor for `receive`, readable on the arrival of the socket and after the end of the jail."""
        return self._here.fileno()

    def receive(self) -> bool:
        """Passes the arrived socket to `serve`; returns False after the end of the jail."""
        data, fds, _, _ = socket.recv_fds(self._here, 1, 1, socket.MSG_CMSG_CLOEXEC)
        for fd in fds:
            self._serve(socket.socket(fileno=fd))
        return bool(data)

    def close(self) -> None:
        """Closes both ends."""
        self._here.close()
        self.there.close()


def listen(port: int) -> socket.socket:
    """Starts the loopback interface of this thread's network namespace and returns a socket that listens on `HOST`.

    Args:
        port: Port of the socket; 0 chooses a free port.

    Raises:
        OSError: The kernel refuses.
    """
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        present = fcntl.ioctl(listener, SIOCGIFFLAGS, struct.pack(INTERFACE, b"lo", 0))
        flags = struct.unpack(INTERFACE, present)[1]
        if not flags & IFF_UP:
            fcntl.ioctl(listener, SIOCSIFFLAGS, struct.pack(INTERFACE, b"lo", flags | IFF_UP))
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
        undo.pop_all()
    return listener


def send_listener(channel: int) -> None:
    """Starts the loopback interface of this network namespace, listens on `PORT` and sends the socket to the host.
    Closes `channel` in any case. For the jail.

    Args:
        channel: Descriptor of `SandboxListener.there`.

    Raises:
        OSError: The kernel refuses; the host receives no socket.
    """
    with socket.socket(fileno=channel) as out, listen(PORT) as listener:
        socket.send_fds(out, [b"\0"], [listener.fileno()])
