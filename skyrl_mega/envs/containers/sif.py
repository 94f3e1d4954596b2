"""Images of Apptainer as files in a folder, pulled once for all machines that share the folder."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import owner
from skyrl_mega.envs.containers.pulls import locked, missing_image
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault

MISSING = re.compile(rb"not found|manifest unknown|does not exist|unauthorized|denied|invalid reference", re.IGNORECASE)
"""Causes of a failed pull that another try does not change."""
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
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock"), deadline, f"the pull of {image}") as alone:
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
        raise missing_image(image, ran.last_line())
    raise InfrastructureFault(f"the image {image} cannot be pulled: {ran.last_line()}")
