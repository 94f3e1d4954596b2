"""Test-sized runs of the quickstart, through the launcher, in separate processes."""

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
    "algorithm.entropy.coefficient=0.01",  # gives a gradient before any reward differs
    "algorithm.importance_cap=2",
]
"""Settings of a run with learning from the first step, for each value of `asynchrony.mode`."""
THREE_STEPS = [*LEARNS, "run.steps=3", "telemetry.trajectories_every=1", "checkpoint.export=true"]
"""Settings of the fixture `undisturbed` and of runs compared with it."""


def exported(run: Path) -> dict[str, torch.Tensor]:
    """Returns the exported weights of a finished run."""
    return load_file(run / "model" / "model.safetensors")


def differing(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of weights that differ in any bit."""
    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or not a[name].equal(b[name]))


def command(folder: Path, *settings: str) -> list[str]:
    """Returns the launcher command for the small quickstart; all files lie below `folder`."""
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
    """Starts a run whose processes are marked in their environment, for `left_over` to find."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SKYRL_MEGA_TEST": str(folder), **variables}
    return subprocess.Popen(
        command(folder, *settings), cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(folder: Path, *settings: str) -> str:
    """Runs to the end and returns the output; fails unless the exit code is 0."""
    process = start(folder, *settings)
    out, _ = process.communicate(timeout=800)
    assert process.returncode == 0, out
    return out


def user_python(folder: Path, *arguments: str) -> str:
    """Runs Python in a user's folder, like a command typed there, and returns the output; fails unless the exit code is
    0."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SKYRL_MEGA_TEST": str(folder)}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=850, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def driver(process: subprocess.Popen[str]) -> int:
    """Returns the process id of the driver under a supervising command."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def actors(folder: Path, kind: str) -> list[int]:
    """Returns the process ids of a class's actors, in runs below `folder`; children with the same process name are left
    out."""
    name = f"ray::{kind}".encode()
    pids = [pid for pid in left_over(folder) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name)]
    return [pid for pid in pids if os.getpgid(pid) == pid]


def left_over(folder: Path) -> list[int]:
    """Returns the process ids of live runs below `folder`."""
    return marked("SKYRL_MEGA_TEST", str(folder))


def marked(variable: str, value: str) -> list[int]:
    """Returns the other processes with this environment variable."""
    mark = f"{variable}={value}".encode()
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                pids.append(int(process.name))
        except OSError:  # the process ended meanwhile, or belongs to another user
            continue
    return [pid for pid in pids if pid != os.getpid()]
