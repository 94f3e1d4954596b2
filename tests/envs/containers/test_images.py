"""Images on a machine: pulled once, and removed when they take too much disk."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import images, pulls
from skyrl_mega.envs.containers.images import make_available, make_room
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault


class Store:
    """Images of 1000 bytes in a dict.

    Args:
        failures: Standard error of the first pulls; later pulls succeed.
        seconds: Duration of a pull.
    """

    def __init__(self, *failures: bytes, seconds: float = 0) -> None:
        self.images: dict[str, str] = {}
        self.used: set[str] = set()
        self.failures, self.seconds, self.pulls = list(failures), seconds, 0

    def store_name(self) -> str:
        return "store"

    def image_facts(self, image: str) -> tuple[str, int] | None:
        return (self.images[image], 1000) if image in self.images else None

    def pull_image(self, image: str, timeout_s: float) -> CommandOutput:
        self.pulls += 1
        time.sleep(self.seconds)
        if self.failures:
            return CommandOutput("failed", 125, b"", self.failures.pop(0))
        self.images[image] = f"id of {image}"
        return CommandOutput("ok", 0, b"", b"")

    def remove_image(self, image: str) -> bool:
        return image not in self.used and self.images.pop(image, None) is not None


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "PAUSES_S", (0.01, 0.01))


def age(*names: str) -> None:
    """Makes images unused for hours, the first image for the longest time."""
    notes = {images._read(note)[0]: note for note in images.NOTES.glob("*/*.json")}
    for number, name in enumerate(names):
        used = time.time() - 3600 * (len(names) - number + 1)
        os.utime(notes[name], (used, used))


def test_an_image_is_pulled_once_however_many_need_it(capfd: pytest.CaptureFixture[str]) -> None:
    store = Store(seconds=0.3)
    threads = [threading.Thread(target=make_available, args=(store, "a", 60, None)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.pulls == 1


def test_a_slow_pull_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pulls, "REPORT_AFTER_S", 0.05)
    make_available(Store(seconds=0.3), "a", 60, None)
    assert "containers: pulling a, 0 s so far" in capfd.readouterr().err


def test_a_failed_pull_is_tried_again() -> None:
    store = Store(b"Error: 503 Service Unavailable", b"Error: timeout")
    make_available(store, "a", 60, None)
    assert store.pulls == 3
    with pytest.raises(InfrastructureFault, match="the image a cannot be pulled after 3 tries: Error: 503"):
        make_available(Store(*[b"Error: 503"] * 3), "a", 60, None)


@pytest.mark.parametrize(
    "reason",
    [
        b"Error: initializing source: reading manifest 9 in registry/a: manifest unknown",
        b"Error response from daemon: pull access denied for a, it does not exist or may require login",
        b'Error: short-name "a" did not resolve to an alias and no unqualified-search registries are defined',
    ],
)
def test_a_missing_image_is_an_error_of_the_user(reason: bytes) -> None:
    store = Store(reason)
    with pytest.raises(UserError, match="image = a: the image cannot be pulled: Error"):
        make_available(store, "a", 60, None)
    assert store.pulls == 1


def test_the_least_recently_used_images_make_room() -> None:
    store = Store()
    for name in "abc":
        make_available(store, name, 60, None)
    age("b", "a", "c")
    make_available(store, "d", 60, 2000)
    assert sorted(store.images) == ["c", "d"]


def test_used_images_and_images_of_the_user_stay(capfd: pytest.CaptureFixture[str]) -> None:
    store = Store()
    store.images["mine"] = "1"
    for name in "abc":
        make_available(store, name, 60, None)
    make_available(store, "mine", 60, None)
    store.images["b"] = "built by the user under the same name"
    store.used.add("c")
    age("a", "b", "c")
    make_room(store, 0)
    assert sorted(store.images) == ["b", "c", "mine"]
    assert "more than images_gib" in capfd.readouterr().err


def test_an_image_used_a_moment_ago_stays() -> None:
    store = Store()
    make_available(store, "a", 60, None)
    age("a")
    make_available(store, "a", 60, None)
    make_room(store, 0)
    assert "a" in store.images


def test_a_damaged_note_removes_nothing() -> None:
    store = Store()
    make_available(store, "a", 60, None)
    age("a")
    for note in images.NOTES.glob("*/*.json"):
        note.write_text("{")
    make_room(store, 0)
    assert "a" in store.images


def test_a_folder_of_notes_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    images.NOTES.mkdir()
    images.NOTES.chmod(0o777)
    with pytest.raises(UserError, match="only this user can write to"):
        make_available(Store(), "a", 60, None)


def test_a_pull_of_another_process_is_awaited_for_a_limited_time() -> None:
    store = Store(seconds=2)
    thread = threading.Thread(target=make_available, args=(store, "a", 60, None))
    thread.start()
    while not store.pulls:
        time.sleep(0.01)
    with pytest.raises(InfrastructureFault, match="did not finish the pull of a in time"):
        make_available(store, "a", 0.3, None)
    thread.join(60)
