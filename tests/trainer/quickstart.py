"""Runs of the quickstart at a size for tests, through the launcher, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SMALL = [
    "model.build.hidden=64",
    "model.build.expert_ffn=32",
    "warmup.steps=12",
    "warmup.batch=64",
    "data.prompts_per_step=16",
    "data.samples_per_prompt=4",
    "algorithm.dynamic_sampling.max_rounds=2",
    "evaluation.limit=32",
]
LEARNS = [
    "evaluation.every=2",
    "checkpoint.every=2",
    "algorithm.dynamic_sampling.enabled=false",
    "algorithm.entropy.coefficient=0.01",  # teaches where no reward does yet
    "algorithm.importance_cap=2",
]
"""A run that learns from its first step, with each of `asynchrony.mode`."""
THREE_STEPS = [*LEARNS, "run.steps=3", "telemetry.trajectories_every=1", "checkpoint.export=true"]
"""Of the run `undisturbed`, and of those that are compared with it."""


def exported(run: Path) -> dict[str, torch.Tensor]:
    """The weights that a finished run has exported."""
    return load_file(run / "model" / "model.safetensors")


def differing(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of weights that are not equal to the bit."""
    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or not a[name].equal(b[name]))


def command(folder: Path, *settings: str) -> list[str]:
    """The launcher on the small quickstart; everything lies below `folder`."""
    data = folder / "data"
    return [
        *(sys.executable, "-m", "skyrl_mega.launch", "--config", str(ROOT / "configs" / "quickstart.yaml")),
        *SMALL,
        f"run.directory={folder}",
        f"model.path={folder}/model",
        f"data.prepare=addition --output {data} --train 400 --test 64 --demonstrations 400",
        f"data.train=[{data}/train.parquet]",
        f"data.eval=[{data}/test.parquet]",
        f"warmup.files=[{data}/demonstrations.parquet]",
        *settings,
    ]


def start(folder: Path, *settings: str, **variables: str) -> subprocess.Popen[str]:
    """Starts a run whose processes carry a mark in their environment, by which `left_over` finds them."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SKYRL_MEGA_TEST": str(folder), **variables}
    return subprocess.Popen(
        command(folder, *settings), cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(folder: Path, *settings: str) -> str:
    """Runs to the end and returns what was printed; fails unless the exit code is 0."""
    process = start(folder, *settings)
    out, _ = process.communicate(timeout=800)
    assert process.returncode == 0, out
    return out


def driver(process: subprocess.Popen[str]) -> int:
    """The driver that a command supervises."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def actors(folder: Path, kind: str) -> list[int]:
    """Processes of actors of a class, of runs below `folder`; their children, which have their names, are not."""
    name = f"ray::{kind}".encode()
    found = [pid for pid in left_over(folder) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name)]
    return [pid for pid in found if os.getpgid(pid) == pid]


def left_over(folder: Path) -> list[int]:
    """Processes of runs below `folder` that are still there."""
    return marked("SKYRL_MEGA_TEST", str(folder))


def marked(variable: str, value: str) -> list[int]:
    """Processes that were started with this in their environment, but for this one."""
    mark = f"{variable}={value}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:  # it ended meanwhile, or is not ours to read
            continue
    return [pid for pid in found if pid != os.getpid()]
