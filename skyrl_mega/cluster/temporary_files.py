"""Temporary files and folders, removed at the end of a block even if the process is killed inside the block.

The removal is done by this process or else by the supervisor (`channel`). If both were killed, it is done by the next
process with an entry of the same kind in the same place. A file lock (flock) marks entries in use; the kernel drops the
lock when the owner dies.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from skyrl_mega.cluster.channel import removed_after_crash
from skyrl_mega.common.safe_read import writing


@contextmanager
def temporary_folder(parent: Path, prefix: str, mode: int = 0o700) -> Iterator[Path]:
    """Yields a new folder in `parent`, named `prefix` plus eight hexadecimal digits, and removes it at the end of the
    `with` block. The caller may rename the folder, which is then kept. First removes such folders left behind by killed
    processes of this user. `parent` must exist; raises OSError if the folder cannot be created. `mode` is the folder's
    access mode."""
    with _new_entry(parent, prefix, lambda path: path.mkdir(mode)) as folder:
        yield folder


@contextmanager
def partial_file(file: Path) -> Iterator[Path]:
    """Yields an empty, hidden file next to `file`, which the caller fills and renames to `file`. Not renamed, the
    hidden file is removed at the end of the `with` block. First removes such files left behind by killed processes of
    this user. An OSError inside the block names `file`; also raises OSError if the hidden file cannot be created."""
    with _new_entry(file.parent, f".{file.name}.", lambda path: path.touch(exist_ok=False)) as partial, writing(file):
        yield partial


def write_whole(file: Path, content: bytes) -> None:
    """Writes a file in one go: `file` has its earlier content until it has all of `content`. Raises OSError if the file
    cannot be written."""
    with partial_file(file) as partial:
        partial.write_bytes(content)
        partial.replace(file)


def remove_stale(folder: Path, prefix: str) -> None:
    """Removes files and folders of `folder` with this name prefix and eight hexadecimal digits, left behind by killed
    processes of this user. Skips entries in use, of other users, or on a file system without locks."""
    for path in folder.glob(glob.escape(prefix) + "[0-9a-f]" * 8):
        with suppress(OSError), _open_owned(path) as descriptor:  # gone, owned by another user, or in use
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)


def in_use(folder: Path, prefix: str) -> bool:
    """Returns True if a process of this user is inside `temporary_folder` for this folder and prefix, or inside
    `partial_file` for a file `name` in `folder`, whose prefix is `.name.`. False on a file system without locks."""
    for path in folder.glob(glob.escape(prefix) + "[0-9a-f]" * 8):
        try:
            with _open_owned(path) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # gone, owned by another user, or on a file system without locks
            continue
    return False


def remove(path: Path) -> None:
    """Removes a file or a folder. A missing path is not an error; a folder's undeletable entries are skipped. For an
    undeletable file raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _new_entry(folder: Path, prefix: str, make: Callable[[Path], None]) -> Iterator[Path]:
    remove_stale(folder, prefix)
    while True:
        path = folder / f"{prefix}{secrets.token_hex(4)}"
        with removed_after_crash(path), ExitStack() as stack:
            stack.callback(remove, path)
            make(path)
            if _claim(path, stack):
                yield path
                return


def _claim(path: Path, stack: ExitStack) -> bool:
    """Locks a newly created path until the stack closes; returns False if another process removed or locked the path
    first."""
    try:
        descriptor = stack.enter_context(_open_owned(path))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # a file system without locks, where no process sweeps
        return True
    return path.exists()


@contextmanager
def _open_owned(path: Path) -> Iterator[int]:
    """Yields a file descriptor of a file or folder owned by this user."""
    folder = stat.S_ISDIR(path.lstat().st_mode)
    # NFS locks require a file that is open for writing.
    descriptor = os.open(path, (os.O_RDONLY | os.O_DIRECTORY if folder else os.O_RDWR) | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise PermissionError(f"{path} is not ours")
        yield descriptor
    finally:
        os.close(descriptor)
