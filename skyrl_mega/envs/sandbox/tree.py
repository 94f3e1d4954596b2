"""Folders that untrusted code filled: measured, entered and removed by descriptors, however deep, wide or locked.

A path may be too long, or lead elsewhere by the time it is used; a descriptor is neither. Nothing here recurses.
Standard library only: the jail uses it too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DEEPEST = 64
"""Folders inside each other that `measure` enters; one descriptor is open for each."""


class Size(NamedTuple):
    """What lies below a folder."""

    bytes: int
    """On disk; whatever has a name takes 512 at least."""
    entries: int
    """Files, folders, links and what else has a name; a file with several names counts once for each."""
    deep: bool
    """Whether it goes deeper than `DEEPEST`, where nothing is counted."""


def measure(folder: str, most: int, most_entries: int) -> Size:
    """Counts what lies below a folder, while programs change it; stops where it is more than `most`."""
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
                with contextlib.suppress(OSError), os.scandir(fd) as found:
                    for entry in found:
                        entries += 1
                        with contextlib.suppress(OSError):
                            info = entry.stat(follow_symlinks=False)
                            if info.st_nlink == 1 or info.st_ino not in linked or stat.S_ISDIR(info.st_mode):
                                total += max(512, info.st_blocks * 512)
                            linked.add(info.st_ino)
                            if stat.S_ISDIR(info.st_mode):
                                names.append(entry.name)
                        if total > most or entries > most_entries:
                            return Size(total, entries, False)
            fresh = False
            if not names:
                os.close(pending.pop()[0])
            elif len(pending) > DEEPEST:
                return Size(total, entries, True)
            else:
                with contextlib.suppress(OSError):  # gone, or a link by now
                    pending.append((enter(names.pop(), fd), []))
                    fresh = True
    finally:
        for fd, _ in pending:
            os.close(fd)
    return Size(total, entries, False)


def enter(name: str, parent: int | None = None) -> int:
    """Opens a folder, never through a link; one whose owner has locked himself out is unlocked first."""
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
    """Gives the owner all rights to a folder again; the descriptor may be one of O_PATH."""
    info = os.fstat(fd)
    if info.st_mode & 0o700 != 0o700 and os.geteuid() in (0, info.st_uid):
        os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(info.st_mode) | 0o700)


def folders(top: str) -> Iterator[str]:
    """Paths of every folder below `top`, itself first, in a tree that nobody changes meanwhile except who asks.

    One that is removed before the next is asked for is not entered. What has too long a path is left out.
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
        with contextlib.suppress(OSError), os.scandir(path) as found:
            pending += [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]


def remove(path: str) -> bool:
    """Removes whatever a path names, and all below it, when nobody changes it any more; whether it is gone.

    Folders inside are moved up to the top before they are emptied, so that none is too deep.
    """
    try:
        top = enter(path)
    except FileNotFoundError:
        return True
    except OSError:  # no folder
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
    """Removes a file, or a folder whose own folders are moved up to `top`; whether anything was done."""
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
                    os.close(enter(entry, fd))  # its owner may move it only with all rights to it
                    os.rename(entry, os.urandom(8).hex(), src_dir_fd=fd, dst_dir_fd=top)
                    done = True
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=top)
        done = True
    return done
