"""Files and folders that live as long as a block, and not longer where the process is killed in it.

They are removed by this process, or by its supervisor (`channel`), or, where both were killed, by the next process that
makes one of the same kind in the same place: whose maker lives is locked (flock), and the kernel ends the lock with it.
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

from skyrl_mega.cluster.channel import removed_at_the_end
from skyrl_mega.config.outside import writing


@contextmanager
def temporary_folder(where: Path, prefix: str, mode: int = 0o700) -> Iterator[Path]:
    """A new folder in `where`, whose name is `prefix` and eight hexadecimal digits. It may be renamed."""
    with _made(where, prefix, lambda path: path.mkdir(mode)) as folder:
        yield folder


@contextmanager
def partial_file(file: Path) -> Iterator[Path]:
    """An empty, hidden neighbour of `file`, which may take its name; an OSError inside the block names `file`."""
    with _made(file.parent, f".{file.name}.", lambda path: path.touch(exist_ok=False)) as partial, writing(file):
        yield partial


def sweep(where: Path, prefix: str) -> None:
    """Removes what killed processes of this user have left of a kind."""
    for path in where.glob(glob.escape(prefix) + "[0-9a-f]" * 8):
        with suppress(OSError), _opened(path) as descriptor:  # it may be gone, another's, or at work
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)


def at_work(where: Path, prefix: str) -> bool:
    """Returns True if a process is writing a file or a folder of a kind."""
    for path in where.glob(glob.escape(prefix) + "[0-9a-f]" * 8):
        try:
            with _opened(path) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # it is gone, another user's, or on a file system without locks
            continue
    return False


def remove(path: Path) -> None:
    """Removes a file or a folder; one that is not there is no error, nor what cannot be removed of a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _made(where: Path, prefix: str, make: Callable[[Path], None]) -> Iterator[Path]:
    sweep(where, prefix)
    while True:
        path = where / f"{prefix}{secrets.token_hex(4)}"
        with removed_at_the_end(path), ExitStack() as stack:
            stack.callback(remove, path)
            make(path)
            if _claimed(path, stack):
                yield path
                return


def _claimed(path: Path, stack: ExitStack) -> bool:
    """Locks what was just made for as long as the stack; False where somebody's sweep was quicker."""
    try:
        descriptor = stack.enter_context(_opened(path))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # a file system without locks: there nobody sweeps
        return True
    return path.exists()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of a file or folder of this user."""
    folder = stat.S_ISDIR(path.lstat().st_mode)
    # A lock of NFS wants a file that is open for writing.
    descriptor = os.open(path, (os.O_RDONLY | os.O_DIRECTORY if folder else os.O_RDWR) | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise PermissionError(f"{path} is not ours")
        yield descriptor
    finally:
        os.close(descriptor)
