"""A folder in which confined commands run one after the other: it is made, filled and read by the host, and given back.

Where the machine lets mount, it is a file system of its own in memory (`disk.py`): the kernel bounds it, whatever is
written, unlinked, linked or nested there, and forgets it with its owner. Elsewhere it is a folder on disk, bounded by
looking (`watch.py`), and the next start removes what a killed owner left (`folders.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from skyrl_mega.envs.sandbox import folders, tree

DISK = Path(__file__).with_name("disk.py")
NAMESPACES = ("mnt", "user")
BLOCK = 4096


def inodes(disk: int) -> int:
    """Files, folders and links that may be in so many bytes of disk."""
    return max(1024, disk // BLOCK)


class Workspace:
    """A folder that is kept between commands.

    Args:
        disk: Bytes that it may hold.
        bounded: Whether to try a file system of its own.
    """

    def __init__(self, disk: int, bounded: bool = True) -> None:
        self.disk = disk
        self.namespaces: dict[str, int] = {}
        """Kind → descriptor of those in which `place` is the file system; empty where it is a folder of the host."""
        self._top: int | None = None
        self._held = folders.make()
        self.place = os.path.join(self._held, "work")
        """Its path, as the jail sees it."""
        try:
            os.mkdir(self.place, 0o700)
            if bounded:
                self._mount()
        except BaseException:
            self.close()
            raise

    @property
    def folder(self) -> Path:
        """Its path, as the host sees it; a link to follow where it has a file system of its own.

        Raises:
            RuntimeError: It was given back.
        """
        if not self._held:
            raise RuntimeError("the workspace was given back")
        return Path(self.place if self._top is None else f"/proc/{os.getpid()}/fd/{self._top}")

    def used(self) -> tree.Size:
        """Bytes and entries that it holds now."""
        if self._top is not None:
            held = os.fstatvfs(self._top)
            return tree.Size((held.f_blocks - held.f_bfree) * held.f_frsize, held.f_files - held.f_ffree, False)
        return tree.measure(str(self.folder), self.disk, inodes(self.disk))

    def close(self) -> None:
        """Removes it. Never raises; may be called again."""
        held, self._held = self._held, ""
        for fd in (*self.namespaces.values(), *([] if self._top is None else [self._top])):
            os.close(fd)
        self.namespaces, self._top = {}, None
        if held:
            tree.remove(held)

    def _mount(self) -> None:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", str(DISK), self.place, str(self.disk), str(inodes(self.disk))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        ) as holder:
            assert holder.stdout is not None
            if holder.stdout.readline() != b"ready\n":
                return
            kinds = NAMESPACES if os.geteuid() != 0 else NAMESPACES[:1]
            flags = os.O_RDONLY | os.O_CLOEXEC
            try:
                for kind in kinds:
                    self.namespaces[kind] = os.open(f"/proc/{holder.pid}/ns/{kind}", flags)
                self._top = os.open(f"/proc/{holder.pid}/root{self.place}", flags | os.O_DIRECTORY)
            except PermissionError:  # a machine that hides processes from each other: then a folder, and looking
                for fd in self.namespaces.values():
                    os.close(fd)
                self.namespaces = {}
