"""Jobs of a week on a real Slurm cluster: a run with a retrieval service, seeds as an array, and the preflight."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.data.prepare import prepare
from skyrl_mega.retriever.embedder import model_folder
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from tests.slurm.cluster import ROOT, Slurm
from tests.slurm.conftest import PROMPTS, SAMPLES
from tests.slurm.test_jobs import assert_released, steps

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]

Tiny = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def free(slurm: Slurm) -> Iterator[None]:
    """Opens the gate and cancels all jobs after each test."""
    yield
    for name in ("closed_after", "waiting"):
        (slurm.folder / "gate" / name).unlink(missing_ok=True)
    slurm.cancel_all()


def search_arguments(slurm: Slurm, smollm2: Path) -> list[str]:
    """Returns launcher arguments of SearchR1's CPU recipe at test size, in a folder that all nodes see."""
    try:
        model_folder("minilm")
    except UserError as absent:
        pytest.skip(str(absent))
    work = slurm.folder / "search"
    if not work.exists():
        shutil.copytree(smollm2, work / "smollm2", copy_function=os.link)
    return [
        "--config=configs/searchr1_cpu.yaml",
        f"--directory={work}",
        "run.directory=runs",
        "run.steps=1",
        "model.path=smollm2",
        "data.folder=data",
        "data.prompts_per_step=2",
        "data.samples_per_prompt=2",
        "rollout.max_turns=2",
        "evaluation.before=false",
        "evaluation.every=0",
        "telemetry.trackers=[]",
        f"environment.classes.search={ROOT}/tests/recipes/partial.py:Searching",
    ]


@pytest.mark.parametrize("on", ["component", "job"])
def test_searchr1_with_a_retrieval_service_beside_it(slurm: Slurm, env: dict[str, str], smollm2: Path, on: str) -> None:
    """Trains with the retriever on another node: the second component of the job, or a job of its own."""
    arguments = [*search_arguments(slurm, smollm2), f"run.name=search_{on}"]
    env = {**env, "SKYRL_MEGA_TEST": str(slurm.folder / "search"), "OMP_NUM_THREADS": "1"}
    output = ["--time=60", f"--output={slurm.folder}/%j.out"]
    other = None
    if on == "job":
        other = slurm.submit(*output, "slurm/retriever.sbatch", *arguments, env=env)
        env["SKYRL_MEGA_RETRIEVER_ON"] = str(other)
        job = slurm.submit(*output, "slurm/run.sbatch", *arguments, env=env)
    else:
        job = slurm.submit(*output, ":", "--nodes=1", "--ntasks=1", "slurm/run.sbatch", *arguments, env=env)
    folder = ROOT / "runs" / "slurm" / (f"retriever-{other}" if other else f"{job}-0")
    file = folder / ("address" if other else "retriever")
    slurm.until(file.exists, job, timeout=400)
    address, token = file.read_text().splitlines()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    slurm.until(lambda: "skyrl_mega.launch" in commands(slurm), job, timeout=200)
    assert token not in commands(slurm) and address not in commands(slurm)

    ended = slurm.wait(job, timeout=1200)
    text = slurm.output(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert "retrieval service" in text and token not in text and address not in text
    run = slurm.folder / "search" / "runs" / f"search_{on}"
    assert address in (run / "config.yaml").read_text() and token not in (run / "config.yaml").read_text()
    assert not (run / "logs" / "retriever.log").exists()  # the run itself served nothing
    assert steps(run) == [1] and read(run / "metrics.jsonl")[0]["policy/grad_norm"] > 0
    trajectories = parquet.read(run / "trajectories" / "step_000001.parquet")
    searches = [search for t in trajectories for search in t.metadata["searches"]]
    assert searches and not any("error" in search for search in searches)
    service_node = re.findall(r"//(10\.77\.0\.\d+):", address)
    assert service_node and service_node != re.findall(r"Ray listens at (\S+):", text)
    if other:
        slurm.run("scancel", str(other))
        slurm.wait(other, timeout=60)
    assert not file.exists()
    assert_released(slurm, ["node1", "node2"])


def commands(slurm: Slurm) -> str:
    """Returns the command lines of all processes on all nodes."""
    return "\n".join(line for n in range(1, 6) for line in slurm.processes(f"node{n}"))


def test_one_of_three_seeds_is_queued_again_alone(slurm: Slurm, tiny: Tiny, env: dict[str, str]) -> None:
    gate, work = slurm.folder / "gate", slurm.folder / "work"
    arguments = [
        *tiny("seeds", "run.steps=2", "policy.ranks=1"),
        "model.path=model-${run.seed}",
        "data.train=[three/train.parquet]",
    ]
    prepare(f"addition --output {work / 'three'} --train 400 --test 8 --demonstrations 8")
    (gate / "closed_after").write_text(str(PROMPTS * SAMPLES))
    array = slurm.submit(
        *("--time=60", "--job-name=tiny", f"--output={slurm.folder}/%A_%a.out", "slurm/seeds.sbatch"),
        *arguments,
        env=env,
    )
    elements = [f"{array}_{seed}" for seed in range(3)]
    runs = [work / "runs" / f"tiny-{seed}" for seed in range(3)]
    for element, run in zip(elements, runs, strict=True):
        slurm.until(lambda run=run: steps(run) == [1], element, timeout=900)
    slurm.run("scancel", "--signal=USR1", "--batch", elements[1])
    slurm.wait_for(elements[1], "asked to end: the launcher writes a checkpoint", timeout=100)
    (gate / "closed_after").unlink()

    for seed, (element, run) in enumerate(zip(elements, runs, strict=True)):
        ended = slurm.wait(element, timeout=900)
        text, again = slurm.output(element), seed == 1
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", str(int(again))), text
        assert (", start 1, on" in text) is again and ("resuming after step 1" in text) is again
        assert steps(run) == [1, 2]
        assert f"seed: {seed}" in (run / "config.yaml").read_text()


def test_the_preflight_is_a_job_of_its_own(slurm: Slurm, tiny: Tiny, env: dict[str, str]) -> None:
    """Checks two nodes: fit, and unfit because the run's folder is not shared."""
    for settings, code, text in (
        ([], "0:0", "node"),
        (["run.directory=/tmp/nowhere"], "1:0", "paths"),
    ):
        arguments = ["slurm/preflight.sbatch", *tiny("checked"), *settings]
        job = slurm.submit("--nodes=2", f"--output={slurm.folder}/%j.out", *arguments, env=env)
        assert slurm.wait(job, timeout=300)["ExitCode"] == code, slurm.output(job)
        assert text in slurm.output(job)
