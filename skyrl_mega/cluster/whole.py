"""Files and folders that appear whole, and take the place only of what this program wrote itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_mega.cluster.leftovers import at_work, partial_file, temporary_folder
from skyrl_mega.config.errors import UserError

NO_ENTRY = frozenset({"lost+found"})
"""What an empty file system holds."""


class Occupied(UserError):
    """A place that holds something which this program did not write, or may not replace."""


@contextmanager
def whole_file(file: Path, key: str, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields an empty file, which takes the place of `file` when the block ends without an error.

    Args:
        file: A link is followed.
        key: The option that names it, which begins a refusal.
        ours: True for a file whose content shows that this program wrote it, and nobody since.

    Raises:
        Occupied: Something else has its name, before or after the block.
    """
    target = Path(os.path.realpath(file))
    refuse_file(file, key, ours)
    with partial_file(target) as partial:
        yield partial
        refuse_file(file, key, ours)
        partial.replace(target)


def refuse_file(file: Path, key: str, ours: Callable[[Path], bool]) -> None:
    """Refuses a place that `whole_file` may not write to.

    Raises:
        Occupied: It holds something that this program did not write.
    """
    target = Path(os.path.realpath(file))
    if os.path.lexists(target) and not (target.is_file() and ours(target)):
        raise Occupied(f"{key}: {file} was not written by this command, or was changed since; move it, or give another")


@contextmanager
def whole_folder(
    output: Path, key: str, ours: Callable[[Path, set[str]], bool] = lambda folder, names: False, last: str = ""
) -> Iterator[Path]:
    """Yields an empty folder, whose entries are those of `output` when the block ends without an error.

    A folder that is there keeps its place, as a mount point has to: the new one is filled within it, on its disk, and
    its entries are moved up.

    Args:
        output: A link is followed.
        key: The option that names it, which begins a refusal.
        ours: True for a folder with entries of these names if this program wrote all of them, and nobody since.
        last: The entry that shows that a folder is whole; it is moved after the others.

    Raises:
        Occupied: The folder holds something else, before or after the block.
    """
    target = Path(os.path.realpath(output))
    prefix = f".{target.name}."
    refuse_folder(output, key, ours)
    where = target if target.is_dir() else target.parent
    where.mkdir(parents=True, exist_ok=True)
    with temporary_folder(where, prefix, mode=0o777) as part:
        yield part
        refuse_folder(output, key, ours)
        if where != target and not target.exists():
            part.rename(target)
            return
        with temporary_folder(target, prefix) as old:
            for name in sorted(_names(target), key=lambda name: name != last):
                (target / name).rename(old / name)
            for entry in sorted(part.iterdir(), key=lambda entry: entry.name == last):
                entry.rename(target / entry.name)


def refuse_folder(output: Path, key: str, ours: Callable[[Path, set[str]], bool] = lambda folder, names: False) -> None:
    """Refuses a place that `whole_folder` may not write to.

    Raises:
        Occupied: It holds something that may not be replaced.
    """
    target = Path(os.path.realpath(output))
    if not os.path.lexists(target):
        return
    names = _names(target) if target.is_dir() else set()
    if not target.is_dir() or (names and not ours(target, names)):
        what = f"it holds something else ({', '.join(sorted(names)[:5])})" if names else "it is no directory"
        raise Occupied(f"{key}: {what}; allowed: a new or an empty directory")


def being_written(output: Path) -> bool:
    """Returns True if a process fills a folder for this place at the moment."""
    target = Path(os.path.realpath(output))
    return any(at_work(where, f".{target.name}.") for where in (target, target.parent) if where.is_dir())


def _names(folder: Path) -> set[str]:
    """The entries of a folder, without what its file system and `whole_folder` have there."""
    prefix = f".{folder.name}."
    return {path.name for path in folder.iterdir() if not path.name.startswith(prefix)} - NO_ENTRY
