"""One Slurm cluster for all tests of this folder, and a tiny run for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, Slurm, cluster, unavailable

PROMPTS, SAMPLES = 8, 2
"""Of a step of the tiny run."""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """5 nodes of 8 declared GPUs each: one to spare for jobs of 4."""
    if reason := unavailable():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=5, gpus=8) as up:
        yield up


@pytest.fixture(scope="session")
def env() -> dict[str, str]:
    """What a user of the cluster has in the environment."""
    return {"SKYRL_MEGA_HOME": str(ROOT), "SKYRL_MEGA_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def tiny(slurm: Slurm) -> Callable[..., list[str]]:
    """Launcher arguments of a run on CPUs: 3 policy ranks and an engine, of which each finds a node of its own."""

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
            "evaluation.before=false",
            "evaluation.every=0",
            "checkpoint.every=1",
            "telemetry.tensorboard=false",
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
