"""What the fork server imports once, so that each rank of a test starts at once."""

import gc
import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

OF_TESTS = (
    "pytest",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "skyrl_mega.export.export",
    "tests.megatron.layouts",
)
"""What a rank imports with the module of its test: most of a second, and with transformers three."""

with importlib.import_module("skyrl_mega.megatron.without_wandb").without_wandb():
    importlib.import_module("skyrl_mega.megatron.worker")
for name in OF_TESTS:
    importlib.import_module(name)

# A rank's first collection would look through all of that, and so copy every page of it: half a second a rank.
gc.collect()
gc.freeze()
