"""Folders filled by untrusted code: measured, entered and removed by descriptors, however deep, wide or locked.

A path may be too long, or redirected before the use; a descriptor is neither. Nothing here recurses. Standard library
only: the jail uses this module too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DEEPEST = 64
"""Maximum nesting of folders entered by `measure`; each level keeps a descriptor open."""


class TreeSize(NamedTuple):
    """Size of the content below a folder: bytes and entries."""

    bytes: int
    """Bytes on disk; every entry counts at least 512."""
    entries: int
    """Number of files, folders, links and other entries; a file with several names counts once per name."""
    deep: bool
    """True if folders nest deeper than `DEEPEST`; the rest is not counted."""


def measure(folder: str, max_bytes: int, max_entries: int) -> TreeSize:
    """Returns the size of the content below a folder, which programs may change meanwhile.

    Stops counting above `max_bytes` or `max_entries`, and at folders deeper than `DEEPEST`; the result is the count up
    to there. Raises OSError if the folder itself cannot be opened.
    """
    total = entries = 0
    linked: set[int] = set()
    names: list[str] = []
    pending: list[tuple[int, list[str]]] = []
    try:
        pending.append((enter(folder), []))
        fresh = True
        while pending:
            fd, names = pending[-1]
            if fresh:
                with contextlib.suppress(OSError), os.scandir(fd) as scan:
                    for entry in scan:
                        entries += 1
                        with contextlib.suppress(OSError):
                            info = entry.stat(follow_symlinks=False)
                            if info.st_nlink == 1 or info.st_ino not in linked or stat.S_ISDIR(info.st_mode):
                                total += max(512, info.st_blocks * 512)
                            linked.add(info.st_ino)
                            if stat.S_ISDIR(info.st_mode):
                                names.append(entry.name)
                        if total > max_bytes or entries > max_entries:
                            return TreeSize(total, entries, False)
            fresh = False
            if not names:
                os.close(pending.pop()[0])
            elif len(pending) > DEEPEST:
                return TreeSize(total, entries, True)
            else:
                with contextlib.suppress(OSError):  # removed, or a link by now
                    pending.append((enter(names.pop(), fd), []))
                    fresh = True
    finally:
        for fd, _ in pending:
            os.close(fd)
    return TreeSize(total, entries, False)


def enter(name: str, parent: int | None = None) -> int:
    """Opens a folder and returns its descriptor, which the caller closes. Restores the owner's rights to the folder.

    Args:
        name: Path, never opened through a link; relative to `parent`, if given.
        parent: Descriptor of a folder.

    Raises:
        OSError: The folder does not exist, is a link or a file, or is not accessible.
    """
    try:
        fd = os.open(name, FOLDER, dir_fd=parent)
    except PermissionError:
        fd = os.open(name, FOLDER | os.O_PATH, dir_fd=parent)
        try:
            _unlock(fd)
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            os.close(fd)
    try:
        _unlock(fd)
    except OSError:
        os.close(fd)
        raise
    return fd


def _unlock(fd: int) -> None:
    """Restores the owner's rights to a folder; the descriptor may be opened with O_PATH."""
    info = os.fstat(fd)
    if info.st_mode & 0o700 != 0o700 and os.geteuid() in (0, info.st_uid):
        os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(info.st_mode) | 0o700)


def folders(top: str) -> Iterator[str]:
    """Yields the paths of `top` and of every folder below, in a tree changed only by the caller.

    A folder removed before the next step is not entered. Folders with too long a path are skipped.
    """
    pending = [top]
    while pending:
        path = pending.pop()
        try:
            fd = enter(path) if path != top else os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        os.close(fd)
        yield path
        with contextlib.suppress(OSError), os.scandir(path) as scan:
            pending += [entry.path for entry in scan if entry.is_dir(follow_symlinks=False)]


def remove(path: str) -> bool:
    """Removes a path and everything below, once no process changes the content any more; returns True if the path is
    gone, also if it did not exist.

    Inner folders are moved up to the top before being emptied, so none is too deep.
    """
    try:
        top = enter(path)
    except FileNotFoundError:
        return True
    except OSError:  # not a folder
        with contextlib.suppress(OSError):
            os.unlink(path)
        return not os.path.lexists(path)
    try:
        busy = True
        while busy:
            busy = False
            for name in os.listdir(top):
                busy |= _remove_from(top, name)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return not os.path.lexists(path)


def _remove_from(top: int, name: str) -> bool:
    """Removes a file, or a folder after moving the inner folders up to `top`; returns True if anything was changed."""
    done = False
    try:
        os.unlink(name, dir_fd=top)
        return True
    except OSError:
        pass
    try:
        fd = enter(name, top)
    except OSError:
        return False
    try:
        for entry in os.listdir(fd):
            try:
                os.unlink(entry, dir_fd=fd)
                done = True
            except OSError:
                with contextlib.suppress(OSError):
                    os.close(enter(entry, fd))  # moving a folder needs full rights to it
                    os.rename(entry, os.urandom(8).hex(), src_dir_fd=fd, dst_dir_fd=top)
                    done = True
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=top)
        done = True
    return done
