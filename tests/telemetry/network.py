"""What a tracker does on the network: whom it asks, and where a process and its children listen."""

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
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def listening(pid: int) -> list[str]:
    """Addresses of TCP sockets that accept connections, of a process and all below it."""
    mine = set()
    for one in family(pid):
        with suppress(FileNotFoundError):  # the process has ended meanwhile
            for descriptor in Path(f"/proc/{one}/fd").iterdir():
                with suppress(OSError):  # it was closed meanwhile
                    mine.add(os.readlink(descriptor))
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
