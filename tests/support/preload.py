"""What the fork server imports once, so that each rank of a test starts at once."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

from skyrl_mega.megatron.without_wandb import without_wandb  # noqa: E402

with without_wandb():
    import skyrl_mega.megatron.worker

# What a rank imports with the module of its test: most of a second, and with transformers three.
import pytest  # noqa: E402, F401
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402, F401

import skyrl_mega.export.export  # noqa: E402, F401
import tests.megatron.layouts  # noqa: E402, F401

# A rank's first collection would look through all of that, and so copy every page of it: half a second a rank.
gc.collect()
gc.freeze()
