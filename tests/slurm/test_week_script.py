"""Scripts for a week on a cluster, with stand-ins for Slurm: retrieval service, secrets, seeds, preflight."""

from __future__ import annotations

import re
import stat
import subprocess
from pathlib import Path

import pytest

from skyrl_mega.cluster.node_caches import CACHES, cache_variables
from skyrl_mega.cluster.slurm_node import Allocation
from tests.slurm.batch import ADDRESS, TOKEN, Batch
from tests.slurm.cluster import ROOT

COMPONENT = {"SLURM_HET_SIZE": "2", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "64(x2)"}
SCRIPTS = sorted([*(ROOT / "slurm").glob("*.sbatch"), *(ROOT / "launch").glob("*.sh")])


def shown(batch: Batch, output: str) -> str:
    """Returns everything that other users or logs could show: command lines and output."""
    return "\n".join([*batch.called("srun"), *batch.called("service"), *batch.called("scontrol"), output])


@pytest.mark.parametrize(
    "env, where",
    [
        (COMPONENT, ["--het-group=1", "--cpus-per-task=64"]),
        ({"SKYRL_MEGA_RETRIEVER_ON": "step"}, ["--overlap", "--gres=none", "-w", "node1", "--cpus-per-task=96"]),
    ],
    ids=["component", "step"],
)
def test_a_run_gets_the_address_of_its_service(batch: Batch, env: dict[str, str], where: list[str]) -> None:
    code, output = batch.run("--config", "a b.yaml", **env)
    service, tasks = batch.called("service"), batch.called("srun")
    assert code == 0, output
    folder = batch.folder / "runs" / "slurm" / "7-0"
    assert service[: len(where)] == where
    command = [f"{batch.folder}/.venv/bin/python", "-m", "skyrl_mega.retriever", "run", "--address-file"]
    assert service[-9:] == [*command, f"{folder}/retriever", "--logs", str(folder), "--config", "a b.yaml"][-9:]
    assert tasks[-3] == "a b.yaml" and "skyrl_mega.cluster.slurm_node" in tasks
    assert tasks[-2] == "environment.retriever.url=${oc.env:SKYRL_MEGA_RETRIEVER}"
    assert {f"SKYRL_MEGA_RETRIEVER={ADDRESS}", f"SKYRL_MEGA_RETRIEVER_TOKEN={TOKEN}"} <= set(batch.called("env"))
    assert ADDRESS not in shown(batch, output) and TOKEN not in shown(batch, output)


def test_without_a_service_nothing_is_handed_over(batch: Batch) -> None:
    assert batch.run("--config=x")[0] == 0
    assert batch.called("service") == [] and batch.called("srun")[-1] == "--config=x"
    assert not any("SKYRL_MEGA_RETRIEVER" in line for line in batch.called("env"))


def test_a_service_that_never_answers_ends_the_job_before_the_run(batch: Batch) -> None:
    code, output = batch.run("--config=x", SERVICE_CODE="2", **COMPONENT)
    assert code == 2 and "ended before it answered" in output
    assert batch.called("srun") == []


@pytest.mark.parametrize("start, code", [("0", 75), ("5", 1)])
def test_a_lost_service_ends_the_run_with_a_checkpoint(batch: Batch, start: str, code: int) -> None:
    """Loses the service during the run: the launcher is asked to stop, and the job is queued again, up to a limit."""
    ended, output = batch.run("--config=x", code=75, SERVICE_ENDS="1", SLURM_RESTART_COUNT=start, **COMPONENT)
    assert ended == code and "the retrieval service is lost: the run writes a checkpoint" in output
    assert ("requeue 7" in batch.called("scontrol")) is (code == 75)


def test_a_run_uses_the_service_of_another_job(batch: Batch) -> None:
    file = batch.folder / "runs" / "slurm" / "retriever-12" / "address"
    file.parent.mkdir(parents=True)
    file.write_text(f"{ADDRESS}\n{TOKEN}\n")
    code, output = batch.run("--config=x", SKYRL_MEGA_RETRIEVER_ON="12", QUEUE="RUNNING")
    assert code == 0 and batch.called("service") == []
    assert f"SKYRL_MEGA_RETRIEVER={ADDRESS}" in batch.called("env") and TOKEN not in shown(batch, output)
    code, output = batch.run("--config=x", SKYRL_MEGA_RETRIEVER_ON="nodes")
    assert code == 2 and "allowed are component, step, and" in output


@pytest.mark.parametrize(
    "env, code, calls, reason",
    [
        ({"QUEUE": "RUNNING", "SQUEUE_FAILS": "5"}, 0, 6, "retrieval service (12): ready"),
        ({"QUEUE": ""}, 2, 3, "that job is not in the queue"),
        ({"SQUEUE_FAILS": "99", "SQUEUE_ERROR": "Invalid job id specified"}, 2, 3, "that job is not in the queue"),
        ({"SQUEUE_FAILS": "99", "SQUEUE_ERROR": "Socket timed out"}, 1, 30, "no answer of squeue: Socket timed out"),
    ],
    ids=["fails for a while", "left the queue", "forgotten", "no controller"],
)
def test_a_job_is_missing_only_if_slurm_says_so(
    batch: Batch, env: dict[str, str], code: int, calls: int, reason: str
) -> None:
    file = batch.folder / "runs" / "slurm" / "retriever-12" / "address"
    file.parent.mkdir(parents=True)
    file.write_text(f"{ADDRESS}\n{TOKEN}\n")
    ended, output = batch.run("--config=x", SKYRL_MEGA_RETRIEVER_ON="12", **env)
    assert (ended, len(batch.called("squeue"))) == (code, calls) and reason in output


def test_a_service_of_its_own_writes_its_address_below_the_job(batch: Batch) -> None:
    code, output = batch.run("--config=x", script="retriever.sbatch", SERVICE_ENDS="1")
    assert code == 0, output
    folder = batch.folder / "runs" / "slurm" / "retriever-7"
    assert (folder / "address").read_text().splitlines() == [ADDRESS, TOKEN]
    assert "--cpus-per-task=96" in batch.called("service") and batch.called("srun") == []


def test_secrets_reach_the_environment_alone(batch: Batch) -> None:
    file = batch.folder / "secrets"
    file.write_text("# trackers\r\nWANDB_API_KEY= a=b c=\r\n\r\nHF_TOKEN=hf_1")
    file.chmod(0o640)
    code, output = batch.run("--config=x", SKYRL_MEGA_SECRETS=str(file))
    assert code == 2 and f"chmod 600 {file}" in output and batch.called("srun") == []
    file.chmod(0o600)
    code, output = batch.run("--config=x", SKYRL_MEGA_SECRETS=str(file))
    assert code == 0 and {"WANDB_API_KEY= a=b c=", "HF_TOKEN=hf_1"} <= set(batch.called("env"))
    assert "a=b c" not in shown(batch, output) and "hf_1" not in shown(batch, output)
    for wrong in ("export HF_TOKEN=hf_1", "hf_1"):
        file.write_text(f"# hub\n{wrong}\n")
        code, output = batch.run("--config=x", SKYRL_MEGA_SECRETS=str(file))
        assert code == 2 and f"{file}, line 2: allowed are lines NAME=VALUE" in output and "hf_1" not in output
    code, output = batch.run("--config=x", SKYRL_MEGA_SECRETS=str(batch.folder))
    assert code == 2 and "it is a folder" in output and len(output.splitlines()) == 1


def test_an_element_of_an_array_has_its_own_seed_and_run(batch: Batch) -> None:
    element = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NAME": "dapo"}
    assert batch.run("--config=x", code=75, script="seeds.sbatch", **element)[0] == 75
    assert batch.called("srun")[-3:] == ["--config=x", "run.seed=3", "run.name=dapo-3"]
    assert batch.called("scontrol")[-1] == "requeue 7_3"


def test_the_preflight_takes_the_place_of_the_launcher(batch: Batch) -> None:
    assert batch.run("--config=x", code=1, DEAD="node2", script="preflight.sbatch")[0] == 1
    assert "SKYRL_MEGA_COMMAND=preflight" in batch.called("env")
    assert not any(call.startswith("requeue") for call in batch.called("scontrol"))
    env = {"SLURMD_NODENAME": "n", "SLURM_PROCID": "0", "SKYRL_MEGA_NODES": "n", "SLURM_CPUS_ON_NODE": "1"}
    job = {**env, "SLURM_JOB_ID": "7"}
    assert Allocation.of(Path(), job).command == "launch"
    assert Allocation.of(Path(), {**job, "SKYRL_MEGA_COMMAND": "preflight"}).command == "preflight"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_and_ask_for_what_a_requeued_job_needs(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    text = script.read_text()
    assert not re.search(r"[^\"\\]\$@", text), "words of the user must be quoted"
    if script.suffix == ".sbatch" and "#SBATCH --no-requeue" not in text:
        assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(text.splitlines())
        assert re.search(r"#SBATCH --signal=B:USR1@\d+\n", text)


def test_compiled_code_stays_on_the_node(tmp_path: Path) -> None:
    folder = tmp_path / "scratch" / "me"
    variables = cache_variables({"SKYRL_MEGA_CACHE": str(folder), "TRITON_CACHE_DIR": "/mine"})
    assert set(variables) == set(CACHES) - {"TRITON_CACHE_DIR"}
    assert {Path(value).parent for value in variables.values()} == {folder}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_variables({**variables, "TRITON_CACHE_DIR": "/mine"}) == {}


def test_code_of_another_user_is_never_run(tmp_path: Path) -> None:
    """Refuses a folder that others can write to, and a link: cached code is executed."""
    shared, link = tmp_path / "shared", tmp_path / "link"
    shared.mkdir()
    shared.chmod(0o777)
    link.symlink_to(tmp_path)
    for folder in (shared, link):
        with pytest.raises(OSError, match="folder of this user"):
            cache_variables({"SKYRL_MEGA_CACHE": str(folder)})
