"""Jobs on a real Slurm cluster: every way to end, and the remains.

An undisturbed Ray job on the cluster's nodes is the reference for comparison.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.telemetry.metrics import read
from tests.slurm.cluster import ROOT, Slurm
from tests.slurm.conftest import PROMPTS, SAMPLES, Submitted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Tiny = Callable[..., list[str]]
SLOW = ["data.train=[rows/train.parquet]", "data.prepare=multiply --output rows --train 10000000"]
"""A data preparation of several minutes, for tests with interruptions."""


KEPT = ("torchinductor_", "skyrl-cache-")
"""Folders of compiled code, which outlast a job."""


def assert_released(slurm: Slurm, nodes: Iterable[str]) -> None:
    """Checks these nodes for remains of a job: process, port, shared memory, temporary file, except compiled code."""
    shared = {Path(path).parts[2] for path in slurm.environment["SHARED"].split(":") if path.startswith("/tmp/")}
    for node in nodes:
        assert slurm.processes(node) == []
        assert slurm.listening(node) == []
        left = set(slurm.run("sh", "-c", "ls -A /dev/shm; ls -A /tmp", node=node).split()) - shared
        assert [name for name in left if not name.startswith(KEPT)] == []


def figures(run: Path) -> list[dict[str, Any]]:
    """Returns all rows without the values that depend on the clock."""
    rows = read(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "memory/", "idle/"))} for row in rows]


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    return [row["step"] for row in read(file)] if file.exists() else []


def test_a_job_is_shipped_and_trains_on_four_nodes(submitted: Submitted) -> None:
    rows = read(submitted.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    assert "Job 'tiny' succeeded" in submitted.output
    assert "policy ranks: 10.77.0.1: 0, 10.77.0.2: 1, 10.77.0.3: 2" in submitted.output
    assert "engines: 10.77.0.4: 0" in submitted.output
    code, variable = submitted.driver.split()
    assert "/working_dir_files/_ray_pkg_" in code and variable == "shipped"
    assert submitted.left == []


@pytest.fixture
def gate(slurm: Slurm) -> Iterator[Path]:
    """Yields the folder read by `gate.GateEnv`; afterwards opens the gate, powers node2 on and cancels all jobs."""
    folder = slurm.folder / "gate"
    yield folder
    for name in ("closed_after", "waiting"):
        (folder / name).unlink(missing_ok=True)
    if not slurm.on("node2"):
        slurm.power_on("node2")
    slurm.cancel_all()


@pytest.mark.parametrize(
    "limit", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["node", "node and time limit"]
)
def test_a_run_survives_a_lost_node(
    slurm: Slurm, tiny: Tiny, env: dict[str, str], submitted: Submitted, gate: Path, limit: bool
) -> None:
    """Starts a job two or three times: a node dies in step 2, the time limit comes in step 3, then the rest is done."""
    name = "limited" if limit else "hunted"
    run, waiting = slurm.folder / "work" / "runs" / name, gate / "waiting"
    arguments = tiny(name, "run.steps=4")
    (gate / "closed_after").write_text(str(PROMPTS * SAMPLES))  # a step for each start
    output = f"--output={slurm.folder}/%j.out"
    job = slurm.submit("--time=30", output, "slurm/searchr1_30b.sbatch", *arguments, env=env)

    slurm.until(waiting.exists, job, timeout=400)
    assert steps(run) == [1]
    nodes = slurm.run("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()
    assert nodes == ["node1", "node2", "node3", "node4"]
    assert "policy ranks: 10.77.0.1: 0, 10.77.0.2: 1, 10.77.0.3: 2" in slurm.output(job)
    assert "engines: 10.77.0.4: 0" in slurm.output(job)
    slurm.power_off("node2")
    slurm.wait_for(job, "start 1, on node[1,3-5]", timeout=200)
    waiting.unlink()

    slurm.until(waiting.exists, job, timeout=400)
    assert steps(run) == [1, 2]
    if limit:
        hours, minutes, _ = map(int, slurm.job(job)["RunTime"].split(":"))
        soon = 60 * hours + minutes + 6  # within the 600 s of --signal
        slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={soon}")
        slurm.wait_for(job, "asked to end: the launcher writes a checkpoint", timeout=120)
    (gate / "closed_after").unlink()
    if limit:
        slurm.wait_for(job, "the launcher ended with exit code 75", timeout=200)
        slurm.until(lambda: slurm.job(job)["Restarts"] == "2", job, timeout=100)
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")

    ended = slurm.wait(job, timeout=400)
    text, starts = slurm.output(job), 3 if limit else 2
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", str(starts - 1)), text
    assert "resuming after step 1" in text and ("resuming after step 2" in text) is limit
    assert text.count("4 of 4 nodes are up") == starts
    assert figures(run) == figures(submitted.run)
    assert_released(slurm, ["node1", "node3", "node4", "node5"])
    with (run / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_node_whose_ray_dies_is_left_out_and_scancel_releases_the_rest(
    slurm: Slurm, tiny: Tiny, env: dict[str, str]
) -> None:
    arguments = [*tiny("slow"), *SLOW]
    job = slurm.submit(
        "--nodes=2", "--time=30", f"--output={slurm.folder}/%j.out", "slurm/run.sbatch", *arguments, env=env
    )
    slurm.wait_for(job, "prepare data", timeout=200)
    first, second = slurm.run("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()
    slurm.run("pkill", "-KILL", "raylet", node=second)
    slurm.wait_for(job, f"exit 1: {second} failed, the job goes on without", timeout=100)
    slurm.wait_for(job, "start 1, on", timeout=100)
    assert slurm.job(job)["ExcNodeList"] == second
    assert_released(slurm, [second])

    slurm.until(lambda: slurm.output(job).count("prepare data …") == 2, job, timeout=200)
    nodes = slurm.run("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()
    assert second not in nodes
    slurm.run("scancel", str(job))
    assert slurm.wait(job, timeout=60)["JobState"] == "CANCELLED"
    assert "queued again" not in slurm.output(job)
    assert_released(slurm, {first, *nodes})


def test_wrong_input_ends_the_job_before_ray_starts(slurm: Slurm, tiny: Tiny, env: dict[str, str]) -> None:
    job = slurm.submit(f"--output={slurm.folder}/%j.out", "slurm/dapo.sbatch", *tiny("wrong"), "run.sed=1", env=env)
    assert slurm.wait(job, timeout=120)["ExitCode"] == "2:0"
    text = slurm.output(job)
    assert "error: run.sed = 1 is not known here; did you mean run.seed?" in text
    assert "Ray listens" not in text
    assert_released(slurm, ["node1", "node2"])


def test_srun_takes_the_words_for_a_container(slurm: Slurm, tiny: Tiny, env: dict[str, str]) -> None:
    """Checks the words passed to pyxis: the stand-in prints its arguments and runs the command without a container."""
    if not (slurm.folder / "etc" / "plugstack.conf").exists():
        pytest.skip("no C compiler for the plugin that stands in for pyxis")
    image = {"SKYRL_MEGA_CONTAINER": "/images/skyrl.sqsh", "SKYRL_MEGA_MOUNTS": "/data:/data"}
    arguments = ["slurm/run.sbatch", *tiny("contained"), "run.sed=1"]
    job = slurm.submit("--nodes=2", f"--output={slurm.folder}/%j.out", *arguments, env=env | image)
    assert slurm.wait(job, timeout=120)["ExitCode"] == "2:0"
    line = f"pyxis: /images/skyrl.sqsh in {ROOT} with {ROOT}:{ROOT},/data:/data"
    assert slurm.output(job).count(line) == 2


def test_scripts_differ_only_in_what_they_ask_for() -> None:
    """Compares the scripts of runs: a header and the same two lines."""
    others = ["preflight", "retriever", "seeds"]
    scripts = [script for script in sorted((ROOT / "slurm").glob("*.sbatch")) if script.stem not in others]
    assert [script.stem for script in scripts] == ["dapo", "run", "searchr1_30b", "swe_30b"]
    for script in scripts:
        text = script.read_text()
        assert re.search(
            r'\nsource "\$\{SKYRL_MEGA_HOME:-\$SLURM_SUBMIT_DIR\}/launch/slurm.sh" \|\| exit 2\nrun .*\n$', text
        )
        assert "--signal=B:USR1@600" in text and "--requeue" in text
