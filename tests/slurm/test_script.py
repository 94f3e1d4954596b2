"""`launch/slurm.sh` alone, with stand-ins for Slurm's commands and containers: the calls and arguments."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from skyrl_mega.cluster import slurm_node
from tests.slurm.batch import Batch
from tests.slurm.cluster import ROOT


def test_one_task_a_node_runs_the_environment_of_the_repository(batch: Batch) -> None:
    code, _ = batch.run("--config", "a b.yaml", "run.name='x y'")
    words = batch.called("srun")
    assert code == 0
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=96"} <= set(words)
    folder = batch.folder / "runs" / "slurm" / "7-0"
    command = [f"{batch.folder}/.venv/bin/python", "-m", "skyrl_mega.cluster.slurm_node", str(folder)]
    assert words[-7:] == [*command, "--config", "a b.yaml", "run.name='x y'"]
    assert folder.is_dir()
    assert not any("container" in word or "apptainer" in word for word in words)
    assert batch.called("scontrol") == ["show hostnames node[1-3]"]
    assert "SKYRL_MEGA_NODES=node1,node2,node3" in batch.called("env")


def test_a_job_with_gpus_takes_the_environment_for_gpus(batch: Batch) -> None:
    """Selects the GPU environment, or fails before any start if missing: the CPU environment would see no GPU."""
    code, output = batch.run("--config=x", SLURM_GPUS_ON_NODE="8")
    assert code == 2 and batch.called("srun") == []
    [error] = [line for line in output.splitlines() if "error" in line]
    assert f"{batch.folder}/.venv-cuda is not there, and this job has 8 GPUs" in error and "make cuda" in error
    python, other = batch.environment(".venv-cuda"), batch.environment("env")
    for env, expected in (
        ({"SLURM_GPUS_ON_NODE": "8"}, str(python)),
        ({"SLURM_GPUS_ON_NODE": "8", "SKYRL_MEGA_VENV": ".venv"}, f"{batch.folder}/.venv/bin/python"),
        ({"SLURM_GPUS_ON_NODE": "8", "SKYRL_MEGA_VENV": str(batch.folder / "env")}, str(other)),
        ({"SLURM_GPUS_ON_NODE": "8", "SKYRL_MEGA_PYTHON": "/env/python"}, "/env/python"),
        ({}, f"{batch.folder}/.venv/bin/python"),
    ):
        (batch.calls / "srun").unlink(missing_ok=True)
        assert batch.run("--config=x", **env)[0] == 0
        assert batch.called("srun")[-5] == expected
    code, output = batch.run("--config=x", SKYRL_MEGA_VENV="nowhere")
    assert code == 2 and "error: nowhere/bin/python is not there" in output


def test_every_job_has_a_token_of_its_own(batch: Batch) -> None:
    tokens = set()
    for _ in range(2):
        batch.run("--config=x", RAY_AUTH_TOKEN="a user's own")
        mode, token = (line for line in batch.called("env") if line.startswith("RAY_AUTH"))
        assert mode == "RAY_AUTH_MODE=token" and len(token) == len("RAY_AUTH_TOKEN=") + 64
        tokens.add(token)
    assert len(tokens) == 2


def test_an_image_runs_with_enroot_through_pyxis(batch: Batch) -> None:
    batch.run("--config=x", SKYRL_MEGA_CONTAINER="registry#team/skyrl:1", SKYRL_MEGA_MOUNTS="/data:/data,/scratch:/s")
    words = batch.called("srun")
    assert "--container-image=registry#team/skyrl:1" in words
    assert f"--container-mounts={batch.folder}:{batch.folder},/data:/data,/scratch:/s" in words
    assert f"--container-workdir={batch.folder}" in words
    assert words[-5:-2] == ["python3", "-m", "skyrl_mega.cluster.slurm_node"]


def test_a_sif_file_runs_with_apptainer(batch: Batch) -> None:
    batch.run("--config=x", SKYRL_MEGA_CONTAINER="/images/skyrl.sif", SKYRL_MEGA_PYTHON="/opt/venv/bin/python")
    words = batch.called("srun")
    start = words.index("apptainer")
    bind = f"{batch.folder}:{batch.folder}"
    inside = ["apptainer", "exec", "--nv", "--bind", bind, "--pwd", str(batch.folder), "/images/skyrl.sif"]
    assert words[start : start + 11] == [*inside, "/opt/venv/bin/python", "-m", "skyrl_mega.cluster.slurm_node"]


@pytest.mark.parametrize("code", [0, 2])
def test_an_end_that_is_final_is_the_jobs(batch: Batch, code: int) -> None:
    assert batch.run("--config=x", code=code)[0] == code
    assert batch.called("scontrol") == ["show hostnames node[1-3]"]


def test_75_queues_the_job_again(batch: Batch) -> None:
    assert batch.run("--config=x", code=75)[0] == 75
    assert batch.called("scontrol")[-1] == "requeue 7"


def test_a_task_of_an_array_is_queued_again_and_no_other(batch: Batch) -> None:
    """Requeues a task of an array. The number of an array's last task is also the array's number: requeueing this
    number would restart all tasks.
    """
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert batch.run("--config=x", code=75, **array)[0] == 75
    assert batch.called("scontrol")[-2:] == ["--oneliner show job 7_3", "requeue 7_3"]
    assert batch.run("--config=x", code=1, DEAD="node2", **array)[0] == 1
    assert batch.called("scontrol")[-2:] == ["requeue 7_3", "update JobId=7_3 ExcNodeList=node2"]


def test_tasks_that_end_without_the_launchers_code_are_a_fault(batch: Batch) -> None:
    code, out = batch.run("--config=x", srun=0, CODE="")
    assert code == 1 and "none of them has written" in out


def test_the_launchers_code_counts_and_not_that_of_a_worker_that_had_to_be_killed(batch: Batch) -> None:
    assert batch.run("--config=x", code=0, srun=137)[0] == 0


def test_a_fault_of_the_program_is_not_tried_again(batch: Batch) -> None:
    assert batch.run("--config=x", code=1)[0] == 1
    assert not any(call.startswith("requeue") for call in batch.called("scontrol"))


def test_a_node_that_does_not_answer_is_left_out(batch: Batch) -> None:
    code, out = batch.run("--config=x", code=1, DEAD="node2", EXCLUDED="node9")
    assert code == 1 and "node2 failed, the job goes on without" in out
    assert batch.called("scontrol")[-2:] == ["requeue 7", "update JobId=7 ExcNodeList=node9,node2"]


def test_where_no_node_answers_the_fault_is_not_the_nodes(batch: Batch) -> None:
    assert batch.run("--config=x", code=1, DEAD="node*")[0] == 1
    assert not any(call.startswith("requeue") for call in batch.called("scontrol"))


def test_failed_nodes_do_not_bring_a_job_back_for_ever(batch: Batch) -> None:
    assert batch.run("--config=x", code=1, DEAD="node2", SLURM_RESTART_COUNT="5")[0] == 1
    assert not any(call.startswith("requeue") for call in batch.called("scontrol"))


def test_one_interface_for_all(batch: Batch) -> None:
    batch.run("--config=x", SKYRL_MEGA_INTERFACE="ib0")
    assert "NCCL_SOCKET_IFNAME=ib0" in batch.called("env")
    batch.run("--config=x", SKYRL_MEGA_INTERFACE="ib0", NCCL_SOCKET_IFNAME="ib")
    assert "NCCL_SOCKET_IFNAME=ib" in batch.called("env")


def test_without_the_repository_it_says_where_it_looked() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "slurm" / "run.sbatch")],
        env={"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "/nowhere/launch/slurm.sh" in done.stderr


def test_a_signal_is_found_where_a_node_waits_and_raises_into_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_node, "_received_signals", [])
    monkeypatch.setattr(slurm_node, "LOOK_EVERY_S", 0.0)
    slurm_node.pause()
    before = signal.signal(signal.SIGTERM, slurm_node._record_signal)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(slurm_node.Ended, match="ended by SIGTERM") as caught:
        slurm_node.pause()
    assert caught.value.code == slurm_node.CANCELLED
