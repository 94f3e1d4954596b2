"""What the fork server imports once, so that each rank of a test starts at once."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

import skyrl_mega.policy.rank  # noqa: E402, F401
