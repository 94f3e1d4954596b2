"""Working folder for successive confined commands: created, filled, read and removed by the host.

If the machine allows mounting, the folder is a private file system in memory (`disk.py`): the kernel bounds everything
written, unlinked, linked or nested there, and frees everything with the owner. Otherwise the workspace is a folder on
disk, bounded by watching (`watch.py`), and the next start removes the leftovers of a killed owner (`folders.py`).
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
"""Bytes of disk per allowed file, folder or link."""


def inodes(disk: int) -> int:
    """Returns the maximum number of files, folders and links for a disk limit in bytes: one per 4 KiB, at least
    1024."""
    return max(1024, disk // BLOCK)


class Workspace:
    """Folder kept between commands.

    Args:
        disk: Maximum size in bytes.
        bounded: True to try a private file system.
    """

    def __init__(self, disk: int, bounded: bool = True) -> None:
        self.disk = disk
        self.namespaces: dict[str, int] = {}
        """Kind → descriptor of the namespaces with the file system at `place`; empty for a folder of the host."""
        self._top: int | None = None
        self._own_folder = folders.make()
        self.place = os.path.join(self._own_folder, "work")
        """Path inside the jail's namespaces."""
        try:
            os.mkdir(self.place, 0o700)
            if bounded:
                self._mount()
        except BaseException:
            self.close()
            raise

    @property
    def folder(self) -> Path:
        """Path for the host. For a private file system a link in `/proc`: open it, or append names to it, but do not
        resolve it, because its target is no path of the host.

        Raises:
            RuntimeError: The workspace is closed.
        """
        if not self._own_folder:
            raise RuntimeError("the workspace was given back")
        return Path(self.place if self._top is None else f"/proc/{os.getpid()}/fd/{self._top}")

    def used(self) -> tree.TreeSize:
        """Returns the bytes and entries in use, measured now. Raises RuntimeError if the workspace is closed."""
        if self._top is not None:
            held = os.fstatvfs(self._top)
            return tree.TreeSize((held.f_blocks - held.f_bfree) * held.f_frsize, held.f_files - held.f_ffree, False)
        return tree.measure(str(self.folder), self.disk, inodes(self.disk))

    def close(self) -> None:
        """Removes the folder. Never raises; may be called again."""
        held, self._own_folder = self._own_folder, ""
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
            except PermissionError:  # processes are hidden from each other: use a folder on disk, and watching
                for fd in self.namespaces.values():
                    os.close(fd)
                self.namespaces = {}
