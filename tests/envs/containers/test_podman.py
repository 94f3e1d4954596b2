"""The runtime `podman` on a real podman."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import images, removal
from skyrl_mega.envs.containers import memory_kills as memory_kill_log
from skyrl_mega.envs.containers.docker import Podman
from skyrl_mega.envs.containers.docker_container import CommandLineContainer
from skyrl_mega.envs.containers.registry import make_pool
from skyrl_mega.envs.faults import InfrastructureFault
from tests.envs.processes import ROOT, owner, wait_until
from tests.support.containers import IMAGE, PROGRAMS, image_archive, podman, podman_options, remove_store
from tests.support.image_registry import image_registry


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("podman")
    yield podman_options(folder)
    remove_store(folder)


@pytest.fixture
def container(options: dict[str, Any]) -> Iterator[CommandLineContainer]:
    started = Podman({**options, "memory_mib": 64, "processes": 32}).start(IMAGE, 60)
    yield started
    started.remove(60)


def names(options: dict[str, Any]) -> list[str]:
    """Returns the names of all containers in the store."""
    return podman(options["global_arguments"], "ps", "--all", "--format={{.Names}}").stdout.decode().split()


def programs(container: CommandLineContainer) -> list[str]:
    """Returns the names of all processes in a container, seen from inside, without the processes that list."""
    found = container.run(["sh", "-c", "cat /proc/[0-9]*/comm"], 30).stdout.decode().split()
    return sorted(set(found) - {"cat", "sh", "runc:[2:INIT]"})


def shell(container: CommandLineContainer, script: str, timeout_s: float = 30) -> Any:
    return container.run(["sh", "-c", script], timeout_s)


def gone(options: dict[str, Any], name: str) -> bool:
    """Waits until no container with this name exists."""
    return wait_until(lambda: name not in names(options))


def test_a_container_runs_programs_within_its_limits(container: CommandLineContainer) -> None:
    """Checks most of the contract with a single container, as every start costs half a second."""
    ran = container.run(
        ["sh", "-c", "cat; pwd; echo $A $API_KEY >&2; exit 7"],
        30,
        stdin=b"in " * 100_000,
        folder="/work",
        variables={"A": "1", "API_KEY": "k"},
    )
    assert (ran.status, ran.exit, ran.stderr) == ("failed", 7, b"1 k\n")
    assert ran.stdout == b"in " * 100_000 + b"/work\n"
    assert shell(container, "ls /sys/class/net").stdout == b"lo\n"
    assert container.run(["nothing"], 30).exit == 127
    assert shell(container, "echo 'Error: no such container' >&2; exit 125").exit == 125
    assert (
        late := shell(container, "trap '' TERM; setsid sleep 50 & sleep 60", 1.5)
    ).status == "timeout" and late.exit is None
    assert programs(container) == ["sleep"]  # of process 1
    assert container.run(["cat", "/dev/zero"], 30, limit=10**6).status == "output"
    assert shell(container, "kill -9 1; kill -TERM 1; kill -9 -1; echo here").stdout == b"here\n"
    assert shell(container, "x=x; while :; do x=$x$x; done").exit != 0
    assert shell(container, ":").status == "ok"


@pytest.mark.nightly
def test_daemons_and_fork_bombs_are_ended(container: CommandLineContainer) -> None:
    assert shell(container, "setsid sh -c 'trap \"\" TERM HUP; sleep 99' >/dev/null 2>&1 & echo up").stdout == b"up\n"
    assert programs(container) == ["sleep"] and len(pids(container)) > 2
    container.end_processes(30)
    assert len(pids(container)) == 2
    bomb = "f() { f & f & sleep 1; wait; }; f"
    assert shell(container, f"({bomb}) >/dev/null 2>&1 & while :; do {bomb}; done", 5).status in ("timeout", "failed")
    container.end_processes(60)
    assert shell(container, "echo kept > /kept; cat /kept").stdout == b"kept\n"
    assert len(pids(container)) == 2


def pids(container: CommandLineContainer) -> list[str]:
    """Returns the ids of process 1, its `sleep` and of all other processes, without the one that lists."""
    return shell(container, "set -- /proc/[0-9]*; for p; do [ $p = /proc/$$ ] || echo $p; done").stdout.decode().split()


@pytest.mark.nightly
def test_ended_processes_are_collected(container: CommandLineContainer) -> None:
    for _ in range(5):
        assert shell(container, "for i in 1 2 3 4; do (setsid sleep 50 &) ; done").status == "ok"
        container.end_processes(30)
    assert len(pids(container)) == 2


@pytest.mark.nightly
def test_a_killed_container_is_a_fault_and_an_ended_one_is_the_policys(options: dict[str, Any]) -> None:
    runtime = Podman(options)
    container = runtime.start(IMAGE, 60)
    place = options["global_arguments"]
    pid = int(podman(place, "inspect", "--format={{.State.Pid}}", container.name).stdout)
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(InfrastructureFault, match="killed from outside"):
        shell(container, "sleep 50")
    container.remove(60)
    with pytest.raises(InfrastructureFault, match="is gone"):
        shell(container, ":")
    container = runtime.start(IMAGE, 60)
    assert shell(container, "echo '#!/bin/sh\necho 99999999999' > /bin/date; kill -9 -1").status == "ok"
    time.sleep(1)
    assert (shell(container, ":").status, shell(container, ":").exit) == ("failed", None)
    container.end_processes(30)
    container.remove(60)
    container.remove(60)


@pytest.mark.nightly
def test_a_container_without_memory_is_the_policys_fault(options: dict[str, Any]) -> None:
    container = Podman({**options, "memory_mib": 40}).start(IMAGE, 60)
    hoard = (
        "echo 1000 > /proc/1/oom_score_adj; for i in 1 2 3 4 5 6; do dd if=/dev/zero of=/dev/shm/$i bs=1M count=9; done"
    )
    ran = shell(container, hoard)
    assert (ran.status, ran.exit) == ("failed", None) and b"too much memory" in ran.stderr
    assert shell(container, ":").exit is None
    container.end_processes(30)
    container.remove(60)


@pytest.mark.nightly
def test_a_killed_container_is_a_fault_although_another_ran_out_of_memory(options: dict[str, Any]) -> None:
    if not os.access(memory_kill_log.LOG, os.R_OK):
        pytest.skip("the kernel's log is not readable")
    killed, hungry = (Podman({**options, "memory_mib": 40}).start(IMAGE, 60) for _ in range(2))
    try:
        assert shell(hungry, "dd if=/dev/zero of=/dev/shm/1 bs=1M count=90").exit == 137
        podman(options["global_arguments"], "kill", "--signal=KILL", killed.name)
        time.sleep(1)
        with pytest.raises(InfrastructureFault, match="killed from outside"):
            shell(killed, ":")
    finally:
        killed.remove(60)
        hungry.remove(60)


@pytest.mark.nightly
def test_a_removal_that_was_cut_short_is_finished_later(options: dict[str, Any]) -> None:
    container = Podman(options).start(IMAGE, 60)
    script = "mkdir /many; cd /many; i=0; while [ $i -lt 60000 ]; do i=$((i+1)); : > $i; done"
    assert shell(container, script, 60).status == "ok"
    for seconds in (0.05, 0.3, 0.5):
        with suppress(InfrastructureFault):
            container.remove(seconds)
    thread = removal.start_removal(container)
    thread.join(120)
    assert not thread.is_alive() and container.name not in names(options)


@pytest.mark.nightly
@pytest.mark.parametrize("replacement", ["", "sleep", "cat"])
def test_root_that_replaces_sh_fails_and_feigns_no_fault(options: dict[str, Any], replacement: str) -> None:
    container = Podman(options).start(IMAGE, 60)
    script = f"cat /bin/{replacement} > /new; chmod 755 /new" if replacement else ":"
    assert shell(container, f"{script}; rm /bin/sh; test ! -e /new || mv /new /bin/sh").status in ("ok", "failed")
    for _ in range(2):
        assert container.run(["sh", "/nothing"], 30).status == "failed"
    container.end_processes(60)
    assert container.run(["ls", "/nothing"], 30).status == "failed"
    container.remove(60)


@pytest.mark.nightly
def test_a_container_ends_after_its_lifetime(options: dict[str, Any]) -> None:
    container = Podman({**options, "lifetime_s": 10}).start(IMAGE, 60)
    time.sleep(11)
    with pytest.raises(InfrastructureFault, match="lifetime_s"):
        shell(container, ":")
    container.remove(60)


OWNER = """
import json, os, sys, time
from skyrl_mega.envs.containers import program
from skyrl_mega.envs.containers.docker import Podman
runtime = Podman(json.loads(sys.argv[1]))
if sys.argv[2] == "running":
    print(runtime.start("localhost/machine:1", 60).name, flush=True)
    time.sleep(600)
run_program = program.run_program
def told(argv, *rest, **more):
    if "run" in argv:
        print(next(word for word in argv if word.startswith("--name=")).removeprefix("--name="), flush=True)
    return run_program(argv, *rest, **more)
program.run_program = told
runtime.start("localhost/machine:1", 60)
time.sleep(600)
"""
"""Program of an owner that prints the name of its container: once the container runs, or just before its start."""


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["running", "starting"])
def test_a_killed_owner_leaves_no_container_and_touches_no_other(options: dict[str, Any], when: str) -> None:
    other = Podman(options).start(IMAGE, 60)
    with owner(OWNER, json.dumps(options), when) as (_, name):
        assert name.startswith("skyrl-mega-")
    if when == "starting":
        time.sleep(3)  # the client of the start goes on without its owner
    assert gone(options, name)
    assert shell(other, "echo here").stdout == b"here\n"
    other.remove(60)


@pytest.mark.nightly
def test_containers_of_an_owner_killed_with_its_reaper_are_removed_by_the_next_owner(options: dict[str, Any]) -> None:
    with owner(OWNER, json.dumps(options), "running") as (process, name):
        for entry in Path("/proc").iterdir():
            if (
                entry.name.isdigit()
                and b"reaper.py" in (line := (entry / "cmdline").read_bytes())
                and f'"owner": {process.pid},'.encode() in line
            ):
                os.kill(int(entry.name), signal.SIGKILL)
    time.sleep(2)
    assert name in names(options)
    script = OWNER.replace("    time.sleep(600)\n", "    raise SystemExit\n", 1)
    subprocess.run(
        [sys.executable, "-c", script, json.dumps(options), "running"],
        check=True,
        timeout=60,
        cwd=ROOT,
        capture_output=True,
    )
    assert name not in names(options)


@pytest.mark.nightly
def test_images_are_pulled_from_a_registry_and_make_room(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "PAUSES_S", (0.1, 0.1))
    with image_registry(image_archive(PROGRAMS), failures=1) as (port, asked):
        (tmp_path / "registries.conf").write_text(f'[[registry]]\nlocation = "127.0.0.1:{port}"\ninsecure = true\n')
        monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "registries.conf"))
        runtime, image = Podman({**options, "images_gib": 1}), f"127.0.0.1:{port}/one:1"
        runtime.pull(image, 60)
        requests = len(asked)
        runtime.pull(image, 60)
        assert len(asked) == requests
        with pytest.raises(UserError, match="manifest unknown"):
            runtime.pull(f"127.0.0.1:{port}/one:2", 60)
    with pytest.raises(InfrastructureFault, match="connection refused"):
        runtime.pull(f"127.0.0.1:{port}/one:3", 60)
    container = runtime.start(image, 60)
    monkeypatch.setattr(images, "IDLE_S", -1.0)
    images.make_room(runtime, 0)
    assert runtime.image_facts(image) and runtime.image_facts(IMAGE)  # in use, and not pulled by us
    container.remove(60)
    images.make_room(runtime, 0)
    assert not runtime.image_facts(image) and runtime.image_facts(IMAGE)
    with pytest.raises(UserError, match="did not resolve to an alias"):
        runtime.pull("nothing", 60)


@pytest.mark.nightly
def test_ten_trajectories_share_two_places(options: dict[str, Any]) -> None:
    pool, most, lock = make_pool("podman", {**options, "containers": 2}, "key"), [0], threading.Lock()

    def work() -> None:
        place = pool.place()
        for _ in range(2):
            container = place.start(IMAGE, 60)
            with lock:
                most[0] = max(most[0], len(names(options)))
            assert container.run(["sh", "-c", ":"], 30).status == "ok"
            container.remove(60)
        place.close()

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads) and most[0] <= 2 and names(options) == []
