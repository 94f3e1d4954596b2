"""A vLLM worker with garbage weights after waking up; reports the memory of its process."""

from __future__ import annotations

import os

import torch

from skyrl_mega.engines.presence import WEIGHTS
from skyrl_mega.engines.vllm.transfer import WorkerExtension

GARBAGE = 777.0
"""A number instead of NaN: the check of a sync compares padding with itself, and NaN is unequal to itself."""


class GarbageAfterWake(WorkerExtension):
    """vLLM's `worker_extension_cls` for engines in tests."""

    @torch.no_grad()
    def bring_back(self, parts: list[str]) -> None:
        """Overwrites the weights, to show parts missing in an update."""
        super().bring_back(parts)
        if WEIGHTS in parts:
            for parameter in self.weight_transfer_engine.model.parameters():
                parameter.data.fill_(GARBAGE)

    def resident(self) -> int:
        """Returns the bytes of the process's memory (VmRSS)."""
        with open(f"/proc/{os.getpid()}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
