"""Imports of the fork server, for a fast start of each test's ranks."""

import gc
import importlib
import os

# Compiling would cost a rank more than its steps; the product compiles nothing on a CPU (`megatron.cpu`) either.
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

import torch

torch.set_num_threads(1)

OF_TESTS = (
    "pytest",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "skyrl_mega.export.export",
    "tests.megatron.layouts",
)
"""Modules imported by a rank together with the test module: most of a second, and three seconds with transformers."""

with importlib.import_module("skyrl_mega.megatron.without_wandb").without_wandb():
    importlib.import_module("skyrl_mega.megatron.worker")
for name in OF_TESTS:
    importlib.import_module(name)

# A rank's first garbage collection would visit, and so copy, every page: half a second per rank.
gc.collect()
gc.freeze()
