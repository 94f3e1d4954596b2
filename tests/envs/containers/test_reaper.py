"""The reaper of containers: removes what a killed owner leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from skyrl_mega.envs.containers import owner, reaper
from tests.envs.processes import children, wait_until
from tests.envs.processes import owner as new_owner
from tests.support import fake_podman

OWNER = """
import sys, time
from skyrl_mega.envs.containers.docker import Podman
runtime = Podman({"program": sys.argv[1], "global_arguments": ["--root=" + sys.argv[2]]})
container = runtime.start("image", 60)
print(container.name, flush=True)
time.sleep(600)
"""
"""Program that starts a container and waits."""


def test_containers_of_a_killed_owner_are_removed_and_no_others(tmp_path: Path) -> None:
    places, words = tmp_path / "containers", (fake_podman.__file__, str(tmp_path))
    with new_owner(OWNER, *words) as (_, other):
        with new_owner(OWNER, *words) as (_, name):
            assert (places / name).exists() and (places / other).exists()
        assert wait_until(lambda: not (places / name).exists())
        late = f"{name}-late"  # a start in flight creates a container after the end of its owner
        (places / late).write_text("true false 0")
        (places / f".{late}").write_text(f"skyrl-mega.owner={name.removeprefix('skyrl-mega-').rpartition('-')[0]}")
        assert wait_until(lambda: not (places / late).exists())
        assert (places / other).exists()
    assert wait_until(lambda: not (places / other).exists())


def ignored(pid: int) -> int:
    """Returns the mask of the signals that a process ignores."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0], 16)


def test_a_reaper_ignores_the_signals_of_a_job_that_ends(tmp_path: Path) -> None:
    removed = tmp_path / "removed"
    listing = ["sh", "-c", f"test -e {removed} || echo box"]
    request = reaper.request_of(os.getpid(), listing, ["sh", "-c", f'echo "$0" > {removed}'])
    guard = owner._Guard(request)
    pid = int(re.search(r"Pid:\t(\d+)", Path(f"/proc/self/fdinfo/{guard.process}").read_text())[1])  # type: ignore[index]
    assert wait_until(lambda: ignored(pid) & 0x4003 == 0x4003)  # SIGHUP, SIGINT, SIGTERM
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGHUP)
    assert guard.is_alive() and pid not in children(os.getpid())  # Ray kills children of its workers
    guard.stdin.close()  # the owner ends
    assert wait_until(lambda: removed.exists() and removed.read_text() == "box\n")
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not guard.is_alive())


def test_a_failing_listing_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "ROUND_S", 0.01)
    tries, removed = tmp_path / "tries", tmp_path / "removed"
    listing = ["sh", "-c", f"echo x >> {tries}; test $(wc -l < {tries}) -gt 2 || exit 1; test -e {removed} || echo box"]
    reaper.remove_all(listing, ["sh", "-c", f"echo $0 > {removed}"], 0.0)
    assert removed.read_text() == "box\n"


def test_a_reaper_waits_for_clients_that_start_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "ROUND_S", 0.05)
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    mark = f"--label=owner={tmp_path}"
    client = subprocess.Popen(["sh", "-c", 'sleep 2; touch "$0"/box', str(boxes), mark])
    assert wait_until(lambda: reaper.runs_with(mark))
    reaper.remove_all(["ls", str(boxes)], ["sh", "-c", f"rm {boxes}/$0"], 0.0, mark)
    assert client.wait() == 0 and not list(boxes.iterdir())


def test_a_container_started_during_the_listing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "ROUND_S", 0.05)
    boxes, listed = tmp_path / "boxes", tmp_path / "listed"
    boxes.mkdir()
    mark = f"--label=owner={tmp_path}"
    start = 'until [ -e "$0" ]; do sleep 0.05; done; touch "$1"/box'
    client = subprocess.Popen(["sh", "-c", start, str(listed), str(boxes), mark])
    assert wait_until(lambda: reaper.runs_with(mark))
    listing = ["sh", "-c", f"ls {boxes}; [ -e {listed} ] || (touch {listed}; sleep 1)"]  # the client ends meanwhile
    reaper.remove_all(listing, ["sh", "-c", f"rm {boxes}/$0"], 0.0, mark)
    assert client.wait() == 0 and not list(boxes.iterdir())


def test_a_slow_listing_is_no_quiet_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "ROUND_S", 0.05)
    boxes, listed = tmp_path / "boxes", tmp_path / "listed"
    boxes.mkdir()
    listing = ["sh", "-c", f"ls {boxes}; [ -e {listed} ] || (sleep 1; touch {listed} {boxes}/late)"]
    reaper.remove_all(listing, ["sh", "-c", f"rm {boxes}/$0"], 0.5)
    assert listed.exists() and not list(boxes.iterdir())


def test_a_process_has_one_reaper_for_a_listing() -> None:
    assert owner.start_reaper(["true"], ["true"])
    assert not owner.start_reaper(["true"], ["true"])
    assert owner.start_reaper(["false"], ["true"])


def test_a_name_is_dead_if_its_process_was_seen_to_end() -> None:
    name = owner.owner()
    pid, start, boot, namespace = name.split("-")
    assert not owner.is_dead(name) and len(name) <= 63
    assert owner.is_dead(f"{pid}-{int(start) + 1}-{boot}-{namespace}")
    assert not owner.is_dead(f"{pid}-{int(start) + 1}-{boot}-1")
    assert not owner.is_dead(f"{pid}-{int(start) + 1}-{'0' * len(boot)}-{namespace}")
    assert not owner.is_dead("mine")
