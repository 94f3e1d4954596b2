"""A single Slurm cluster for all tests of this folder, and a tiny run for the cluster."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyrl_mega.cluster.ray_session import ENVIRONMENT
from tests.slurm.batch import Batch
from tests.slurm.cluster import ROOT, ClusterFault, Slurm, cluster, unavailable

PROMPTS, SAMPLES = 8, 2
"""Prompts and samples in a step of the tiny run."""


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """Returns stand-ins for Slurm's commands in an empty folder."""
    return Batch(tmp_path)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Yields a cluster of 5 nodes with 8 declared GPUs each: one node to spare for jobs of 4."""
    if reason := unavailable():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=5, gpus=8) as up:
        yield up


@pytest.fixture(scope="session")
def env() -> dict[str, str]:
    """Returns the environment variables of a user of the cluster."""
    return {"SKYRL_MEGA_HOME": str(ROOT), "SKYRL_MEGA_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def tiny(slurm: Slurm) -> Callable[..., list[str]]:
    """Returns a function for the launcher arguments of a run on CPUs: 3 policy ranks and an engine, each on a separate
    node.
    """

    def arguments(name: str, *settings: str) -> list[str]:
        work, gate = slurm.folder / "work", slurm.folder / "gate"
        work.mkdir(exist_ok=True)
        gate.mkdir(exist_ok=True)
        return [
            "--config=configs/quickstart.yaml",
            f"--directory={work}",
            "cluster.device=cpu",
            "policy.ranks=3",
            "policy.layout.expert=1",
            "model.build.hidden=64",
            "model.build.expert_ffn=32",
            "warmup.steps=0",
            f"data.prompts_per_step={PROMPTS}",
            f"data.samples_per_prompt={SAMPLES}",
            "algorithm.dynamic_sampling.enabled=false",
            "algorithm.overlong.filter=false",
            "evaluation.before=false",
            "evaluation.every=0",
            "checkpoint.every=1",
            "telemetry.trackers=[]",
            "rollout.env_timeout_s=600",
            f"environment.classes.addition={ROOT}/tests/slurm/gate.py:GateEnv",
            f"environment.options.addition.folder={gate}",
            "data.prepare=addition --output data --train 400 --test 8 --demonstrations 8",
            "data.train=[data/train.parquet]",
            "data.eval=[]",
            "run.directory=runs",
            "model.path=model",
            f"run.name={name}",
            *settings,
        ]

    return arguments


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster started by hand. Commands in the cluster need `env`."""

    address: str
    token: str

    @property
    def env(self) -> dict[str, str]:
        return {**ENVIRONMENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}


@contextmanager
def ray_cluster(slurm: Slurm, nodes: Sequence[str]) -> Iterator[RayCluster]:
    """Runs `ray start` on these nodes, with a token and the job server at port 8265 of the first; `ray stop` at the
    end.
    """
    ray, log = f"{sys.prefix}/bin/ray", slurm.folder / "ray.log"
    cluster = RayCluster("10.77.0.1:6379", secrets.token_hex(32))
    head = "--head --port=6379 --dashboard-host=0.0.0.0"
    memory = "--num-cpus=4 --object-store-memory=100000000"
    try:
        for node in nodes:
            what = head if node == nodes[0] else f"--address={cluster.address}"
            command = f"{ray} start {what} {memory} --disable-usage-stats >>{log} 2>&1 </dev/null"
            for tried in range(3):
                try:
                    slurm.run("sh", "-c", command, node=node, env=cluster.env, timeout=120)
                    break
                except ClusterFault:  # Ray gives a node 30 s, too short on a busy machine
                    if tried == 2:
                        raise
        yield cluster
    finally:
        for node in nodes:
            slurm.run("sh", "-c", f"{ray} stop --force >>{log} 2>&1", node=node, timeout=120)
            slurm.run("sh", "-c", "rm -rf /tmp/ray /tmp/pymp-*", node=node)  # the latter of Ray's killed dashboard


@dataclass(frozen=True)
class Submitted:
    """The result of the tiny run as an undisturbed Ray job of 4 steps."""

    run: Path
    output: str
    driver: str
    """The driver's source of code, and the shipped files."""
    left: list[str]
    """Processes of the run still alive on any node after the end of the job."""


@pytest.fixture(scope="session")
def submitted(slurm: Slurm, tiny: Callable[..., list[str]]) -> Submitted:
    """Runs `launch/ray_job.sh` from a machine outside the cluster."""
    nodes = ["node1", "node2", "node3", "node4"]
    arguments = [argument for argument in tiny("job", "run.steps=4") if not argument.startswith("--directory")]
    work = slurm.folder / "work"
    with ray_cluster(slurm, nodes) as cluster:
        output = slurm.run(
            str(ROOT / "launch" / "ray_job.sh"),
            *arguments,
            "cluster.nodes=4",
            env={
                **cluster.env,
                "PATH": f"{sys.prefix}/bin:{slurm.environment['PATH']}",
                "RAY_API_SERVER_ADDRESS": "http://10.77.0.1:8265",
                "SKYRL_MEGA_DIRECTORY": str(work),
                "SKYRL_MEGA_PYTHON": sys.executable,
                "SKYRL_MEGA_JOB": "tiny",
                "SKYRL_MEGA_SHIP": "SKYRL_MEGA_TEST",
                "SKYRL_MEGA_TEST": "shipped",
            },
            timeout=900,
        )
        running = [line for node in nodes for line in slurm.processes(node)]
        ours = re.compile(r"ray::(MegatronActor|VllmEngine)|-m skyrl_mega|reaper\.py|vllm|VLLM")
        left = [line for line in running if ours.search(line)]
    return Submitted(work / "runs" / "job", output, (slurm.folder / "gate" / "driver").read_text(), left)
