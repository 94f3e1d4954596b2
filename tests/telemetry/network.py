"""Network use of a tracker: requests, and listening sockets of a process tree."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

import psutil

LISTENS = "0A"


class Proxy(threading.Thread):
    """An HTTP proxy with a count of the clients' requests."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.asked: list[bytes] = []

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(1000))


def family(pid: int) -> list[int]:
    """Returns a process and all descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def listening(pid: int) -> list[str]:
    """Returns the addresses of accepting TCP sockets of a process and all descendants."""
    sockets = set()
    for one in family(pid):
        with suppress(FileNotFoundError):  # the process ended meanwhile
            for descriptor in Path(f"/proc/{one}/fd").iterdir():
                with suppress(OSError):  # the descriptor was closed meanwhile
                    sockets.add(os.readlink(descriptor))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets:
                addresses.append(_address(fields[1].partition(":")[0]))
    return addresses


def _address(digits: str) -> str:
    """Returns an address from the kernel's form: words of 32 bits with reversed bytes."""
    words = [struct.pack("<I", int(digits[i : i + 8], 16)) for i in range(0, len(digits), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
