"""Instances of Apptainer, with a fake client whose instances are processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers.apptainer import Apptainer, ApptainerContainer
from skyrl_mega.envs.faults import InfrastructureFault
from tests.envs.containers.boxes import client
from tests.envs.containers.contract import check_programs
from tests.envs.processes import needs_namespaces, owner, wait_until

KEY = "environment.options.swe.session_options"
Start = Callable[..., ApptainerContainer]

pytestmark = needs_namespaces


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the fake client."""
    monkeypatch.setenv("APPTAINER_CONFIGDIR", str(tmp_path))
    return tmp_path


def runtime(state: Path, **options: Any) -> Apptainer:
    own = {"program": client(state, "fake_apptainer"), "folder": str(state / "images"), "scratch": str(state)}
    given = {**own, **options}
    Apptainer.check_options(given, KEY)
    return Apptainer(given)


@pytest.fixture
def start(state: Path) -> Iterator[Start]:
    """Returns a function that pulls an image and starts an instance, removed at the end of the test."""
    started = []

    def new(image: str = "python:3", **options: Any) -> ApptainerContainer:
        of = runtime(state, **options)
        of.pull(image, 30)
        started.append(of.start(image, 60))
        return started[-1]

    yield new
    for container in started:
        container.remove(20)


def test_programs_in_an_instance(state: Path, start: Start) -> None:
    box = start()
    check_programs(box, "/")
    ran = box.run(["sh", "-c", "echo $KEY $HOME"], 20, variables={"KEY": "very-secret"})
    assert ran.stdout == b"very-secret\n"
    assert "very-secret" not in (state / "log").read_text()


def test_processes_survive_until_they_are_ended(start: Start) -> None:
    box = start()
    assert box.run(["sh", "-c", "setsid sleep 98765432 >/dev/null 2>&1 & exit 0"], 20).status == "ok"
    assert b"98765432" in box.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"], 20).stdout
    box.end_processes(20)
    assert b"98765432" not in box.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"], 20).stdout


def test_an_exit_code_of_the_clients_own_is_no_fault(start: Start) -> None:
    box = start()
    ran = box.run(["sh", "-c", "echo FATAL: no >&2; exit 255"], 20)
    assert (ran.status, ran.exit) == ("failed", 255)
    missing = box.execute(["no-such-shell"], 20)
    assert missing.exit == 255
    box._refuse_ended(missing)


def test_an_ended_instance_is_a_fault(start: Start) -> None:
    box = start()
    box.runtime.client.command(["instance", "stop", box.name])
    with pytest.raises(InfrastructureFault, match=r"is lost: .*no instance found"):
        box.run(["true"], 20)
    box.remove(20)


def test_an_image_is_pulled_once(state: Path) -> None:
    of = runtime(state)
    threads = [threading.Thread(target=of.pull, args=("slow", 30)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (state / "pulls").read_text() == "slow\n"
    assert [file.suffix for file in sorted((state / "images").iterdir())] == [".lock", ".sif"]


def test_parts_of_a_killed_pull_are_removed(state: Path) -> None:
    of = runtime(state)
    of.pull("python:3", 30)
    (image,) = (state / "images").glob("*.sif")
    part = image.with_name(f"{image.name}.1-2-3.part")
    image.rename(part)
    of.pull("docker://python:3", 30)
    assert image.exists() and not part.exists()


def test_a_missing_image_is_named(state: Path) -> None:
    with pytest.raises(UserError, match=r"image = missing: .*manifest unknown"):
        runtime(state).pull("missing", 30)
    with pytest.raises(UserError, match="there is no such file"):
        runtime(state).pull(f"{state}/none.sif", 30)
    with pytest.raises(UserError, match="keeps pulled images in a folder"):
        runtime(state, folder=None).pull("python:3", 30)


def test_a_pull_waits_for_another_within_its_time(state: Path) -> None:
    of = runtime(state)
    pulling = threading.Thread(target=of.pull, args=("slow", 30))
    pulling.start()
    while not (state / "pulls").exists():
        time.sleep(0.01)
    with pytest.raises(InfrastructureFault, match="another process did not finish the pull of slow"):
        of.pull("slow", 0.1)
    pulling.join()


def test_a_broken_image_is_a_fault(state: Path, start: Start) -> None:
    (state / "own.sif").write_text("broken")
    with pytest.raises(InfrastructureFault, match="image format not recognized"):
        start(f"{state}/own.sif")
    assert not list(state.glob("*.instance"))


def test_own_files_lie_in_a_file_that_goes(state: Path, start: Start) -> None:
    box = start(disk_mib=64)
    assert len(list(state.glob("*.img"))) == 1
    (facts,) = (json.loads(file.read_text()) for file in state.glob("*.instance"))
    assert f"--overlay={state}/{box.name}.img" in facts["options"]
    assert "--network=none" in facts["options"]
    box.remove(20)
    assert not list(state.glob("*.img"))


def test_the_lifetime_ends_an_instance(state: Path, start: Start) -> None:
    box = start()
    assert box._timer is not None
    assert "7200" in box._timer.args  # type: ignore[operator]
    os.killpg(box._timer.pid, signal.SIGKILL)
    box._timer.wait()
    box.runtime.options["lifetime_s"] = 1
    box.limit_lifetime()
    assert wait_until(lambda: not list(state.glob("*.instance")))
    with pytest.raises(InfrastructureFault, match="is lost"):
        box.run(["true"], 20)


def test_a_killed_owner_leaves_no_instance(state: Path) -> None:
    script = (
        "import time\nfrom pathlib import Path\nfrom tests.envs.containers.test_apptainer import runtime\n"
        f"of = runtime(Path({str(state)!r}), disk_mib=64)\nof.pull('a', 20)\nof.start('a', 60)\n"
        "print('up', flush=True)\ntime.sleep(99)"
    )
    with owner(script) as (_, line):
        assert line == "up"
    assert wait_until(lambda: not [*state.glob("*.instance"), *state.glob("*.img")])


def test_limits_that_cannot_be_set_are_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no limit beside fakeroot"):
        runtime(state, memory_mib=100)
    with pytest.raises(UserError, match="allowed is an absolute path"):
        runtime(state, folder="images")
    of = runtime(state, memory_mib=100, fakeroot=False)
    (state / "images").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(UserError, match="a plain user's limits need systemd"):
        of.check(KEY)


def test_a_missing_client_or_folder_is_refused(state: Path) -> None:
    with pytest.raises(UserError, match="there is no program no-such-apptainer"):
        runtime(state, program="no-such-apptainer").check(KEY)
    with pytest.raises(UserError, match="this user cannot write there"):
        runtime(state).check(KEY)
