"""Imports of the fork server of ranks with Transformer Engine: a start from nothing takes a rank six seconds.

The module is imported by the server (`programs.server`), before any import of megatron-core. Changes to torch that a
program does not want are made after the fork (`simulate`).
"""

import gc
import importlib
import os

import torch

from tests.cuda import as_cpu, deepep, te_adam, te_kernels
from tests.cuda.syncs import Waits

CAPABILITY = "SKYRL_MEGA_REHEARSED_CAPABILITY"
"""Environment variable: compute capability of the simulated device, such as 9.0."""

torch.set_num_threads(1)
WAITS = Waits()
major, minor = map(int, os.environ[CAPABILITY].split("."))
deepep.install(WAITS)
te_kernels.install(WAITS, (major, minor), te_adam.KERNELS)
importlib.import_module("skyrl_mega.megatron.cpu").stand_in()
for name in ("worker", "objectives", "optimizer", "activation_offload"):
    importlib.import_module(f"skyrl_mega.megatron.{name}")
importlib.import_module("pytest")
importlib.import_module("tests.megatron.layouts")
gc.collect()
gc.freeze()


def simulate() -> None:
    """Replaces CUDA in this process, for a program that counts the host's waits."""
    as_cpu.unmapped()
    te_kernels.stand_in(WAITS)
    deepep.stand_in()
