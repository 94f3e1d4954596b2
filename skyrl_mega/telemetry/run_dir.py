"""A run's folder: made, locked against a second run, and described by its resolved configuration."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_mega.config.compose import dump
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config


@contextmanager
def run_folder(config: Config) -> Iterator[Path]:
    """`<run.directory>/<run.name>` with `config.yaml` and `logs/`, ours until the context ends.

    Raises:
        UserError: the folder cannot be made, another run is at work in it, or it holds a run that is not to be resumed.
    """
    folder = Path(config.run.directory) / config.run.name
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run.directory = {config.run.directory}: {folder} cannot be made: {error.strerror}; "
            "allowed is a folder that you may write to"
        ) from error
    with locked(folder, f"run.name = {config.run.name}", "give another run.name, or end that one"):
        newest = max((folder / "checkpoints").glob("step_*"), default=None)
        if newest and not config.checkpoint.resume:
            raise UserError(
                f"checkpoint.resume = false: {folder} holds checkpoints up to {newest.name}; "
                "give another run.name, or checkpoint.resume=true to go on from them"
            )
        partial = folder / "config.yaml.partial"
        partial.write_text(dump(config))
        os.replace(partial, folder / "config.yaml")
        yield folder


@contextmanager
def locked(folder: Path, key: str, mend: str) -> Iterator[None]:
    """A folder that no other process works in until the context ends.

    The lock is the kernel's (flock on `.lock`): it ends with this process, however that ends.

    Raises:
        UserError: another one is at work in it; begins with `key`, ends with `mend`.
    """
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise UserError(
                f"{key}: another run (process {lock.read().strip() or 'unknown'}) is at work in {folder}; {mend}"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
