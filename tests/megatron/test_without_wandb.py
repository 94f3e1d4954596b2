"""Tests of processes without wandb tracking: wandb must not be imported, because each import creates two temporary
folders. A rank on a CPU must not import torch's compiler either, half of the start time.

A replacement of wandb, first on the import path, also creates the folders.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WANDB = """
import tempfile

made = tempfile.mkdtemp(suffix="wandb-media"), tempfile.mkdtemp(suffix="wandb-artifacts")
"""

RANK = """
import sys
from skyrl_mega.config.schema import AlgorithmConfig, BuildConfig, PolicyConfig
from skyrl_mega.megatron.actor import MegatronActor
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.dims import ParallelDims

hf, parallel = hf_config(BuildConfig()), ParallelDims(1)
rank = MegatronActor(0, parallel, hf, PolicyConfig(), AlgorithmConfig(), dtype="float32", device="cpu")
rank.join("127.0.0.1", rank.open_store("127.0.0.1", 60.0), 60.0)
from megatron.core import timers
from megatron.core.inference.contexts import dynamic_context

print("wandb" in sys.modules, timers.wandb, dynamic_context.HAVE_WANDB)
print("torch._inductor.compile_fx" in sys.modules)
import torch
print(torch.compile.__module__)
import wandb

print(len(wandb.made))
"""

DRIVER = """
import sys
import skyrl_mega.cli.inputs, skyrl_mega.trainer.setup, skyrl_mega.trainer.start_actors

print(*(name in sys.modules for name in ("torch", "ray", "megatron.core", "wandb")))
"""

ENGINE = """
import sys
import skyrl_mega.engines.vllm.actor
from vllm.v1.engine.async_llm import AsyncLLM

print(*(name in sys.modules for name in ("vllm", "wandb")))
"""


def output_of(program: str, folder: Path) -> list[str]:
    """Returns the program's output lines, with the replacement of wandb first on the path and `folder`/tmp for
    temporary files."""
    for path in ("tmp", "wandb"):
        (folder / path).mkdir()
    (folder / "wandb" / "__init__.py").write_text(WANDB)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder / "tmp")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def folders(folder: Path) -> int:
    return len(list((folder / "tmp").glob("*wandb*")))


def test_a_rank_does_without_wandb_and_compiler_and_can_have_them_later(tmp_path: Path) -> None:
    assert output_of(RANK, tmp_path) == ["False None False", "False", "torch", "2"]
    assert folders(tmp_path) == 2  # created by the import at the end


def test_the_driver_imports_neither_ray_nor_megatron_core_nor_wandb(tmp_path: Path) -> None:
    assert output_of(DRIVER, tmp_path) == ["True False False False"]
    assert folders(tmp_path) == 0


@pytest.mark.slow
def test_an_engine_does_not_import_wandb(tmp_path: Path) -> None:
    assert output_of(ENGINE, tmp_path) == ["True False"]
    assert folders(tmp_path) == 0
