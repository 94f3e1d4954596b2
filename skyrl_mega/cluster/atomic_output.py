"""Output files and folders that appear complete, and only ever replace output of this program."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_mega.cluster.temporary_files import in_use, partial_file, temporary_folder
from skyrl_mega.common.errors import UserError

NO_ENTRY = frozenset({"lost+found"})
"""Entries of an empty file system."""


class Occupied(UserError):
    """The output path holds something that this program did not write or may not replace."""


@contextmanager
def atomic_file(file: Path, key: str, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields an empty file that replaces `file` when the block ends without an error; after an error `file` is
    unchanged. The parent folder must exist. The partial file is removed after an error.

    Args:
        file: Output path; a link is followed.
        key: Option that names the path; starts the error message.
        ours: Returns True if this program wrote the file, unchanged since, according to the content.

    Raises:
        Occupied: Something else uses the path, before or after the block.
        OSError: The file cannot be written; the error names `file`.
    """
    target = Path(os.path.realpath(file))
    refuse_file(file, key, ours)
    with partial_file(target) as partial:
        yield partial
        refuse_file(file, key, ours)
        partial.replace(target)


def refuse_file(file: Path, key: str, ours: Callable[[Path], bool]) -> None:
    """Raises Occupied if `atomic_file` must not replace the path: something exists there, and is no file, or `ours`
    returns False. See `atomic_file` for the arguments."""
    target = Path(os.path.realpath(file))
    if os.path.lexists(target) and not (target.is_file() and ours(target)):
        raise Occupied(
            f"{key}: {file} was not written by this command, or was changed since; move it, or give another path"
        )


@contextmanager
def atomic_folder(
    output: Path, key: str, ours: Callable[[Path, set[str]], bool] = lambda folder, names: False, last: str = ""
) -> Iterator[Path]:
    """Yields an empty folder; when the block ends without an error, its entries replace the entries of `output`. After
    an error in the block, `output` is unchanged, and the partial folder is removed. Creates missing parent folders.

    An existing folder is kept, as a mount point must be: the new folder is filled inside, on the same disk, and the
    entries are moved up.

    Args:
        output: Output path; a link is followed.
        key: Option that names the path; starts the error message.
        ours: Returns True if this program wrote all entries with these names and nothing was changed since; by default
            always False, so that only a new or an empty folder is allowed.
        last: Entry to mark a folder as complete; moved last.

    Raises:
        Occupied: The folder holds something else, or the path is no folder, before or after the block.
        OSError: The folder cannot be created or filled.
    """
    target = Path(os.path.realpath(output))
    prefix = f".{target.name}."
    refuse_folder(output, key, ours)
    parent = target if target.is_dir() else target.parent
    parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(parent, prefix, mode=0o777) as part:
        yield part
        refuse_folder(output, key, ours)
        if parent != target and not target.exists():
            part.rename(target)
            return
        with temporary_folder(target, prefix) as old:
            for name in sorted(_names(target), key=lambda name: name != last):
                (target / name).rename(old / name)
            for entry in sorted(part.iterdir(), key=lambda entry: entry.name == last):
                entry.rename(target / entry.name)


def refuse_folder(output: Path, key: str, ours: Callable[[Path, set[str]], bool] = lambda folder, names: False) -> None:
    """Raises Occupied if `atomic_folder` must not replace the content of the path: a file, or a folder with entries for
    which `ours` returns False. See `atomic_folder` for the arguments."""
    target = Path(os.path.realpath(output))
    if not os.path.lexists(target):
        return
    names = _names(target) if target.is_dir() else set()
    if not target.is_dir() or (names and not ours(target, names)):
        reason = f"it holds something else ({', '.join(sorted(names)[:5])})" if names else "it is no directory"
        raise Occupied(f"{key}: {reason}; allowed: a new or an empty directory")


def being_written(output: Path) -> bool:
    """Returns True if a running process of this user is inside `atomic_folder` for this path. False on a file system
    without locks, and for processes of other users. `output` is the argument of `atomic_folder`."""
    target = Path(os.path.realpath(output))
    return any(in_use(folder, f".{target.name}.") for folder in (target, target.parent) if folder.is_dir())


def _names(folder: Path) -> set[str]:
    """Returns the entries of a folder, except entries of the file system and of `atomic_folder` itself."""
    prefix = f".{folder.name}."
    return {path.name for path in folder.iterdir() if not path.name.startswith(prefix)} - NO_ENTRY
