"""Images on this machine: pulled once, and removed when the images that we pulled take too much disk.

Notes on the pulled images lie in a folder of this user on this machine:

    /var/tmp/skyrl-mega-images-<user id>/<store>/<image>.json     name and id of an image that we pulled; the time of
                                                                  the file is the image's last use
                                                 <image>.lock     locked during the pull
                                                 room.lock        locked while images are removed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
import time
from pathlib import Path
from typing import Protocol

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers.pool import TurnQueue
from skyrl_mega.envs.containers.pulls import locked, missing_image, reports
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault

NOTES = Path(f"/var/tmp/skyrl-mega-images-{os.geteuid()}")
"""Folder of the notes. It lies on the machine itself, as the images do, and survives a reboot."""
PULLS_AT_ONCE = 4
"""Maximum number of pulls of a process at once; more would share the same line."""
TRIES = 3
"""Maximum number of tries of a pull."""
PAUSES_S = (2.0, 10.0)
"""Seconds before the second and the third try."""
IDLE_S = 600.0
"""Seconds without a use before an image may be removed: a pulled image is about to be used."""
MISSING = re.compile(
    rb"manifest unknown|not found|does not exist|no such image|name unknown|not known to registry|invalid reference"
    rb"|access denied|unauthorized|authentication required|did not resolve to an alias",
    re.I,
)
"""Reasons of a failed pull that another try does not change."""


class ImageStore(Protocol):
    """The images of a runtime on this machine."""

    def store_name(self) -> str:
        """Returns a text that differs between two stores of images."""

    def image_facts(self, image: str) -> tuple[str, int] | None:
        """Returns id and size in bytes of an image on this machine; None without the image. Raises InfrastructureFault
        if the runtime does not work."""

    def pull_image(self, image: str, timeout_s: float) -> CommandOutput:
        """Pulls an image from its registry, once; returns status and output. A failed pull raises nothing, nor does a
        pull of more than `timeout_s` seconds."""

    def remove_image(self, image: str) -> bool:
        """Removes an image and returns True; returns False if a container uses the image, or the removal fails
        otherwise."""


def make_available(store: ImageStore, image: str, timeout_s: float, most_bytes: int | None) -> None:
    """Pulls an image unless it is on this machine, and then removes old pulled images above `most_bytes` (`make_room`).
    At most one process of the user pulls an image at a time. Prints progress of a slow pull to standard error.

    Args:
        store: The images of the runtime.
        image: Name of the image.
        timeout_s: Time limit in seconds, including the wait for another process' pull.
        most_bytes: Disk for all images that we pulled; None for no limit.

    Raises:
        UserError: There is no such image, its registry refuses access, or `NOTES` belongs to another user.
        InfrastructureFault: The image cannot be pulled in time, or the runtime does not work.
        OSError: A note on the image cannot be written below `NOTES`.
    """
    deadline = time.monotonic() + timeout_s
    folder = _folder(store)
    note = folder / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(FileNotFoundError):  # an image that we did not pull has no note
        os.utime(note)  # before the look at the image: from here on, nobody removes it
    if store.image_facts(image) is not None:
        return
    with locked(note.with_suffix(".lock"), deadline, f"the pull of {image}"):
        if store.image_facts(image) is not None:
            return
        _pulls.take(timeout_s)
        try:
            with reports(f"pulling {image}"):
                _pull(store, image, deadline)
        finally:
            _pulls.give_back()
        facts = store.image_facts(image)
        if facts is None:
            raise InfrastructureFault(f"the image {image} is missing after its pull")
        note.write_text(json.dumps({"image": image, "id": facts[0]}))
    if most_bytes is not None:
        make_room(store, most_bytes)


def make_room(store: ImageStore, most_bytes: int) -> None:
    """Removes images of `store` that we pulled, the least recently used first, until the rest takes at most
    `most_bytes`.

    Images in use, or used in the last `IDLE_S` seconds, stay; a line on standard error tells if the rest is too large.
    Layers shared by images count for each image.

    Raises:
        UserError: `NOTES` belongs to another user.
        InfrastructureFault: Another process holds the notes for a minute, or the runtime does not work.
    """
    folder = _folder(store)
    with locked(folder / "room.lock", time.monotonic() + 60.0, "the removal of images"):
        pulled = []
        for note in folder.glob("*.json"):
            image, number = _read(note)
            facts = store.image_facts(image) if image else None
            if facts is None or facts[0] != number:  # removed or replaced by the user: no longer ours
                note.unlink(missing_ok=True)
            else:
                pulled.append((note.stat().st_mtime, facts[1], image, note))
        taken = sum(size for _, size, _, _ in pulled)
        for _, size, image, note in sorted(pulled):
            if taken <= most_bytes:
                return
            if time.time() - note.stat().st_mtime > IDLE_S and store.remove_image(image):
                note.unlink(missing_ok=True)
                taken -= size
        if taken > most_bytes:
            print(
                f"containers: the pulled images take {taken / 2**30:.1f} GiB, more than images_gib, and all are in use",
                file=sys.stderr,
                flush=True,
            )


def _pull(store: ImageStore, image: str, deadline: float) -> None:
    for number in range(TRIES):
        ran = store.pull_image(image, max(1.0, deadline - time.monotonic()))
        if ran.status == "ok":
            return
        if MISSING.search(ran.stderr):
            raise missing_image(image, ran.last_line())
        if number + 1 == TRIES or time.monotonic() + PAUSES_S[number] >= deadline:
            tries = f"{number + 1} tries"
            raise InfrastructureFault(f"the image {image} cannot be pulled after {tries}: {ran.last_line()}")
        time.sleep(PAUSES_S[number])


def _folder(store: ImageStore) -> Path:
    """Returns the folder of a store's notes, which belongs to this user alone.

    Raises:
        UserError: The folder belongs to another user.
    """
    NOTES.mkdir(mode=0o700, exist_ok=True)
    info = NOTES.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise UserError("allowed is a folder that only this user can write to", key=NOTES, fix="remove or rename it")
    folder = NOTES / hashlib.sha256(store.store_name().encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _read(note: Path) -> tuple[str, str]:
    """Returns name and id of the image in a note; empty texts for a file that is no note."""
    try:
        facts = json.loads(note.read_text())
        return str(facts["image"]), str(facts["id"])
    except (OSError, ValueError, KeyError, TypeError):  # half written when its process was killed
        return "", ""


_pulls = TurnQueue(PULLS_AT_ONCE)
