"""Ten tasks in containers of a real podman: verdicts of honest work and of cheats, and killed processes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _pytest
import iniconfig
import packaging
import pluggy
import pygments
import pytest

from skyrl_mega.data.prepare import prepare
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.telemetry.metrics import read
from tests.envs.processes import owner, wait_until
from tests.envs.swe.toys import CHEATS, Toy, opened, shown, write_toys
from tests.support.containers import IMAGE, image_archive, podman, podman_options, remove_store
from tests.trainer import quickstart

pytestmark = pytest.mark.nightly
PROGRAMS = (
    "sh bash find tar xargs head git cat ls rm mkdir mktemp ln mv cp touch chmod grep sed sleep date setsid env id dd"
)
"""Programs of the image, besides Python."""
INSIDE = {
    "other programs": "for p in tar find xargs git python sed; do printf '#!/bin/sh\\nexit 0\\n' > /bin/$p; done",
    "no shell": "rm -f /bin/sh /bin/bash",
    "programs that never end": "for p in tar find; do printf '#!/bin/sh\\nsleep 9999\\n' > /bin/$p; done",
    "programs that print for ever": "for p in tar find; do printf '#!/bin/sh\\ncat /dev/zero\\n' > /bin/$p; done",
    "pytest changed": "echo 'import os; os._exit(0)' > /usr/lib/python3.11/_pytest/__init__.py",
    "no repository": "rm -rf /repos",
    "setuid": "cp /bin/sh sh; chmod 6755 sh; id > who",
    "daemons": "setsid sh -c 'while :; do echo x >> tests/test_old.py; done' >/dev/null 2>&1 & (setsid sleep 999 &)",
    "all processes killed": "kill -9 -1; kill -9 1",
    "memory": "python -c 'x = bytes(1 << 33)'",
    "a large file": "dd if=/dev/zero of=large bs=1M count=99 2>/dev/null",
    "a hole": "dd if=/dev/zero of=hole bs=1 count=1 seek=1T 2>/dev/null",
    "many names": "mkdir d; cd d; i=0; while [ $i -lt 20000 ]; do : > $i; i=$((i+1)); done",
    "strange names": "touch -- '-rf' '*' 'a b' \"$(printf 'a\\nb')\"; mkdir '..x'; touch '..x/y'",
}
"""Commands that need a real container; none solves a task."""


def archive_of(repos: Path) -> bytes:
    """Returns an image of this machine's programs, Python with pytest, and the repositories."""
    python = Path(shutil.which("python3.11", path="/usr/bin") or pytest.skip("this machine has no /usr/bin/python3.11"))
    stream = io.BytesIO(image_archive([*PROGRAMS.split(), python.name]))
    library = Path("/usr/lib/python3.11")

    def wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = set(info.name.split("/"))
        return None if parts & {"__pycache__", "test", "idlelib", "lib2to3", "config-3.11-x86_64-linux-gnu"} else info

    with tarfile.open(fileobj=stream, mode="a") as archive:
        link = tarfile.TarInfo("bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, python.name
        archive.addfile(link)
        archive.add(library, str(library), filter=wanted)
        for module in (_pytest, pluggy, iniconfig, packaging, pygments, pytest):
            folder = Path(module.__file__ or "").parent
            archive.add(folder, f"{library}/{folder.name}", filter=wanted)
        packages = Path(pytest.__file__).parents[1]
        for path in (packages / "py.py", *packages.glob("pluggy-*.dist-info"), *packages.glob("pytest-*.dist-info")):
            archive.add(path, f"{library}/{path.name}")
        archive.add(repos, "repos")
    return stream.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Toy], dict[str, Any]]]:
    folder, store = tmp_path_factory.mktemp("toys"), tmp_path_factory.mktemp("podman")
    toys = write_toys(folder)
    options = podman_options(store, archive_of(folder / "images" / IMAGE / "repos"))
    yield toys, options
    remove_store(store)


def containers(options: dict[str, Any]) -> list[str]:
    return podman(options["global_arguments"], "ps", "--all", "--format={{.Names}}").stdout.decode().split()


def override(value: Any) -> str:
    """Returns a value in the notation of the launcher's overrides."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {override(inner)}" for key, inner in value.items()) + "}"
    return "[" + ", ".join(map(override, value)) + "]" if isinstance(value, list) else json.dumps(value)


def test_ten_tasks_are_judged_right(place: Any) -> None:
    toys, options = place
    for toy in toys.values():
        for command, reward in ((toy.repair, 1.0), ("true", 0.0)):
            env = opened(toy, "podman", options)
            assert "test_new.py" not in shown(env, "ls tests; git log --oneline")
            shown(env, command)
            output = env.step("<submit/>")
            assert output["reward"] == reward, f"{toy.name}: {output}"
            assert len(containers(options)) == 0
            env.close()


@pytest.mark.parametrize("cheat", [*CHEATS, *INSIDE])
def test_a_cheat_earns_nothing(place: Any, cheat: str) -> None:
    toys, options = place
    toy = list(toys.values())[len(cheat) % len(toys)]
    env = opened(toy, "podman", options, command_timeout_s=20)
    try:
        shown(env, (CHEATS | INSIDE)[cheat])
        output = env.step("<submit/>")
        assert output["reward"] == 0.0, output["metadata"]
    finally:
        env.close()
    assert containers(options) == []


@pytest.mark.parametrize("what", ["setuid", "strange names", "all processes killed", "daemons"])
def test_harmless_oddities_do_not_spoil_honest_work(place: Any, what: str) -> None:
    toys, options = place
    env = opened(toys["spread"], "podman", options)
    shown(env, INSIDE[what])
    shown(env, toys["spread"].repair)
    output = env.step("<submit/>")
    assert output["reward"] == 1.0, output["metadata"]
    env.close()


def test_a_killed_container_is_a_fault(place: Any) -> None:
    toys, options = place
    env = opened(toys["spread"], "podman", options)
    client = options["global_arguments"]
    pid = int(podman(client, "inspect", "--format={{.State.Pid}}", containers(options)[0]).stdout)
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(InfrastructureFault):
        env.step("<bash>sleep 30</bash>")
    with pytest.raises(InfrastructureFault):
        env.step("<submit/>")
    env.close()
    assert containers(options) == []


def test_a_killed_process_leaves_no_container(place: Any) -> None:
    toys, options = place
    code = (
        "import json, sys, time\nfrom pathlib import Path\nfrom tests.envs.swe.toys import Toy, opened\n"
        "name, tasks, report, options = json.loads(sys.argv[1])\n"
        "env = opened(Toy(name, Path(tasks), report), 'podman', options)\nprint('open', flush=True)\n"
        "env.step('<bash>sleep 60</bash>')\n"
    )
    toy = toys["mean"]
    given = json.dumps([toy.name, str(toy.tasks), toy.report, options])
    with owner(code, given) as (_, line):
        assert line == "open" and len(containers(options)) == 1
    assert wait_until(lambda: not containers(options))


@pytest.mark.timeout(1800)
def test_a_killed_run_leaves_no_container_and_runs_again_to_the_end(place: Any, tmp_path: Path) -> None:
    toys, options = place
    prepare(f"swe --output {tmp_path / 'rows'} --source {next(iter(toys.values())).tasks}")
    swe = {
        "tasks": str(next(iter(toys.values())).tasks),
        "session": "podman",
        "session_options": {**options, "containers": 2},
        "command_timeout_s": 120,
        "test_timeout_s": 300,
        "checks": 1,
    }
    settings = (
        "run.name=swe",
        "run.steps=2",
        "warmup.steps=2",
        "evaluation.every=0",
        "algorithm.dynamic_sampling.enabled=false",
        "data.prompts_per_step=2",
        "data.samples_per_prompt=2",
        f"data.train=[{tmp_path}/rows/train.parquet]",
        "environment.default=swe",
        f"environment.options={override({'swe': swe})}",
        "model.build.max_length=2048",
        "rollout.max_prompt_tokens=1024",
        "rollout.max_turns=2",
        "rollout.env_timeout_s=600",
    )
    process = quickstart.start(tmp_path, *settings)
    wait_until(lambda: containers(options) or process.poll() is not None, 900)
    assert process.poll() is None, process.communicate()[0]
    assert containers(options) != []
    os.kill(quickstart.driver(process), signal.SIGKILL)
    said, _ = process.communicate(timeout=180)
    wait_until(lambda: not containers(options) and not quickstart.left_over(tmp_path), 90)
    assert containers(options) == [], said[-3000:]
    assert quickstart.left_over(tmp_path) == []

    quickstart.finish(tmp_path, *settings)
    assert containers(options) == []
    rows = [row for row in read(tmp_path / "swe" / "metrics.jsonl") if row["step"]]  # step 0 is an evaluation
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["rollout/failed_fraction"] == 0 for row in rows), rows
