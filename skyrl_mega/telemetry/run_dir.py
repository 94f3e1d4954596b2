"""A run's folder: creation, lock against a second run, and the resolved configuration inside."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import dump
from skyrl_mega.config.schema import Config

SIGNED = "# Written by a run; sha256 of what follows: "
_STEP = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,})")
"""Name of a step's output, without file extension."""


EARLIER = "earlier"
"""Folder for earlier results found at the start of a run."""
RESULTS = (
    *("metrics.jsonl", "events.jsonl", "trajectories", "timeline", "profile", "tensorboard", "trackers", "report.html"),
    *("estimate.json", "preflight.json", "model", "logs", "config.yaml"),
)
"""Output of a run other than checkpoints, which must not mix with the output of another run."""


def by_step(folder: Path, ending: str = "") -> dict[int, Path]:
    """Returns step -> output of a run (`step_000010` plus `ending`), in ascending order.

    Copies under other names, such as `step_000010_best`, belong to the user and are left out. {} without the folder.
    """
    names = ((path, _STEP.fullmatch(path.name.removesuffix(ending))) for path in folder.glob(f"step_*{ending}"))
    return dict(sorted((int(match[1]), path) for path, match in names if match))


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Returns step -> checkpoint in a run's `checkpoints/`, in ascending order. Links are left out."""
    return {step: path for step, path in by_step(folder).items() if path.is_dir() and not path.is_symlink()}


@contextmanager
def run_folder(config: Config, say: Callable[[str], None] = print) -> Iterator[Path]:
    """Creates and yields `<run.directory>/<run.name>` with `config.yaml` and `logs/`, locked until the context ends.

    If the folder has metrics but no checkpoint, earlier results are moved to a new folder in `earlier/`, and `say`
    prints the new path.

    Raises:
        UserError: The folder or `config.yaml` cannot be written, the folder is in use by another run or has checkpoints
            while `checkpoint.resume` is false, or its `config.yaml` was written or edited by hand.
        OSError: Earlier results cannot be moved, or the folder's file system has no locks.
    """
    folder = Path(config.run.directory) / config.run.name
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "logs" / "run.log").open("a").close()
        if (folder / "checkpoints").exists() and not (folder / "checkpoints").is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder / "checkpoints"))
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be made: {error.strerror}; allowed is a folder that you may write to",
            key="run.directory",
            value=config.run.directory,
        ) from error
    with locked(folder, f"run.name = {config.run.name}", "give another run.name, or end that one"):
        saved = list(checkpoints_in(folder / "checkpoints").values())
        if saved and not config.checkpoint.resume:
            raise UserError(
                f"{folder} holds checkpoints up to {saved[-1].name}; give another run.name, or "
                "checkpoint.resume=true to resume from the newest",
                key="checkpoint.resume",
                value="false",
            )
        _refuse_user_settings(folder, config)
        if not saved and (aside := _set_aside(folder)):
            say(f"note: {folder} has results and no checkpoint to resume from; the results are moved to {aside}")
        _write_config(folder, config)
        yield folder


def _set_aside(folder: Path) -> Path | None:
    """Moves results to a new folder in `earlier/` and returns the folder; None if there are no results."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file() or not metrics.stat().st_size:
        return None
    (folder / EARLIER).mkdir(exist_ok=True)
    aside = next(path for n in count(1) if not os.path.lexists(path := folder / EARLIER / str(n)))
    aside.mkdir()
    for name in RESULTS:
        if os.path.lexists(folder / name):
            (folder / name).rename(aside / name)
    (folder / "logs").mkdir()
    return aside


def _refuse_user_settings(folder: Path, config: Config) -> None:
    """Raises UserError if the user wrote or edited `config.yaml`."""
    file = folder / "config.yaml"
    try:
        if file.is_symlink() or (file.exists() and not written_by_run(file.read_bytes())):
            raise UserError(
                f"{file} was written or edited by hand, or is a link, and a run writes its "
                "settings there; move it to another folder, or give another run.name or "
                "run.directory",
                key="run.name",
                value=config.run.name,
            )
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}", key="run.name", value=config.run.name) from error


def _write_config(folder: Path, config: Config) -> None:
    """Writes `config.yaml`.

    Raises:
        UserError: The file cannot be written.
    """
    file, partial = folder / "config.yaml", folder / "config.yaml.partial"
    text = dump(config)
    try:
        if partial.is_symlink():
            partial.unlink()  # the target of the link is not ours
        partial.write_text(f"{SIGNED}{_digest(text)}\n{text}", encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise UserError(
            f"{error.filename or file} cannot be written: {error.strerror}; allowed is a folder "
            "with room that you may write to",
            key="run.directory",
            value=config.run.directory,
        ) from error


def written_by_run(content: bytes) -> bool:
    """Returns True if this `config.yaml` was written by a run and not changed since: the first line contains a hash of
    the rest."""
    first, _, rest = content.decode(errors="replace").partition("\n")
    return first == SIGNED + _digest(rest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_at_work(folder: Path) -> bool:
    """Returns True if a run in a process of this machine holds the lock of a run's folder; False without `/proc`.

    Reads the kernel's list of locks, because trying the lock could fail the start of a run.
    """
    try:
        inode = f":{(folder / '.lock').stat().st_ino}"
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:  # the folder was never locked, or there is no /proc
        return False
    return any("FLOCK" in fields and any(field.endswith(inode) for field in fields) for fields in locks)


@contextmanager
def locked(folder: Path, key: str, fix: str) -> Iterator[None]:
    """Locks a folder against other processes until the context ends.

    The kernel holds the lock (flock on `.lock`) and releases it when this process ends, even after a crash.

    Args:
        folder: The folder.
        key: Beginning of the error: the setting with the folder.
        fix: Remedy if another run is using the folder.

    Raises:
        UserError: Another run is using the folder, or `.lock` cannot be opened.
        OSError: The file system has no locks.
    """
    try:
        opened = (folder / ".lock").open("a+", errors="replace")
    except OSError as error:
        raise UserError(
            f"{folder / '.lock'} cannot be opened: {error.strerror}",
            key=key,
            fix="make it a file that you may write to, or give another folder",
        ) from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise UserError(
                f"another run (process {lock.read().strip() or 'unknown'}) is using {folder}", key=key, fix=fix
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
