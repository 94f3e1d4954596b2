"""Images of Apptainer as files in a folder, pulled once for all machines that share the folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import owner
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault

MISSING = re.compile(rb"not found|manifest unknown|does not exist|unauthorized|denied|invalid reference", re.IGNORECASE)
"""Causes of a failed pull that another try does not change."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks."""
PART = ".part"
"""Ending of a file during its pull."""


def path_of(image: str, folder: str | None) -> Path:
    """Returns the file of an image: the image itself if it is the path of a SIF file, else a file in the folder of
    images.

    Raises:
        UserError: The image is the name of an image in a registry, and there is no folder.
    """
    if image.endswith(".sif"):
        return Path(image)
    if folder is None:
        raise UserError(
            "apptainer keeps pulled images in a folder; allowed without the folder: paths of .sif files",
            key="session_options.folder",
            value=None,
            fix="give session_options.folder=/a/folder/of/all/nodes",
        )
    plain = image.removeprefix("docker://")
    number = hashlib.sha256(plain.encode()).hexdigest()[:12]
    return Path(folder) / f"{re.sub(r'[^A-Za-z0-9._-]', '+', plain)[-150:]}-{number}.sif"


def make_available(image: str, file: Path, pull: Callable[[Path, str, float], CommandOutput], timeout_s: float) -> None:
    """Pulls an image unless its file exists. One process pulls an image at a time, also among several machines if the
    file system has locks; without locks, several pull, and the last file stays.

    Args:
        image: Name of the image.
        file: The image's file (`path_of`).
        pull: Pulls an image into a file: takes file, address, and time limit in seconds.
        timeout_s: Time limit in seconds, including the wait for another pull.

    Raises:
        UserError: There is no such image or file, or its registry refuses access.
        InfrastructureFault: The pull fails, the time limit has passed, or the file cannot be written.
    """
    if file.is_file():
        return
    if image.endswith(".sif"):
        raise UserError("there is no such file", key="image", value=image, fix="correct the path, on every node")
    deadline = time.monotonic() + timeout_s
    try:
        with _locked(file.with_suffix(".lock"), deadline, image) as alone:
            if file.is_file():
                return
            if alone:  # parts of killed pulls
                for old in file.parent.glob(f"{file.name}.*{PART}"):
                    old.unlink(missing_ok=True)
            _pull(image, file, pull, deadline)
    except OSError as error:
        raise InfrastructureFault(f"{error.filename or file} cannot be written: {error.strerror}") from error


def _pull(image: str, file: Path, pull: Callable[[Path, str, float], CommandOutput], deadline: float) -> None:
    part = file.with_name(f"{file.name}.{owner.owner()}{PART}")
    try:
        ran = pull(part, f"docker://{image.removeprefix('docker://')}", max(1.0, deadline - time.monotonic()))
        if ran.status == "ok":
            os.replace(part, file)
            return
    finally:
        part.unlink(missing_ok=True)
    if MISSING.search(ran.stderr):
        raise UserError(
            f"the image cannot be pulled: {ran.last_line()}",
            key="image",
            value=image,
            fix="give the name of an existing image with its registry, and log in to the registry on this machine",
        )
    raise InfrastructureFault(f"the image {image} cannot be pulled: {ran.last_line()}")


@contextlib.contextmanager
def _locked(path: Path, deadline: float, image: str) -> Iterator[bool]:
    """Holds a lock during the `with` block; yields False on a file system without locks.

    Raises:
        InfrastructureFault: Another process still holds the lock at the deadline.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise InfrastructureFault(f"another process did not finish the pull of {image} in time") from None
                time.sleep(0.5)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                locked = False
                break
        yield locked
    finally:
        os.close(descriptor)
