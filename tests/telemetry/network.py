"""What a tracker does on the network: whom it asks, and where a process and its children listen."""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path

LISTENS = "0A"


class Proxy(threading.Thread):
    """What HTTP clients are told to ask: it counts who does."""

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
    """A process and all below it."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()
    ]
    return [pid, *(one for child in children for one in family(child))]


def listening(pid: int) -> list[str]:
    """Addresses of TCP sockets that accept connections, of a process and all below it."""
    mine = set()
    for one in family(pid):
        for descriptor in Path(f"/proc/{one}/fd").iterdir():
            try:
                mine.add(os.readlink(descriptor))
            except OSError:  # it was closed meanwhile
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in mine:
                found.append(_address(fields[1].partition(":")[0]))
    return found


def _address(digits: str) -> str:
    """The kernel's form: words of 32 bits, each with its bytes turned."""
    words = [struct.pack("<I", int(digits[i : i + 8], 16)) for i in range(0, len(digits), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
