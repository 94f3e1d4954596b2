"""A vLLM worker whose weights are garbage after a wake, and that tells what its process holds."""

from __future__ import annotations

import os

import torch

from skyrl_mega.engines.presence import WEIGHTS
from skyrl_mega.engines.vllm.transfer import WorkerExtension

GARBAGE = 777.0
"""A number, as the check of a sync compares padding with itself, which NaN is not equal to."""


class GarbageAfterWake(WorkerExtension):
    """vLLM's `worker_extension_cls` of engines in tests."""

    @torch.no_grad()
    def bring_back(self, parts: list[str]) -> None:
        """What an update does not bring shows."""
        super().bring_back(parts)
        if WEIGHTS in parts:
            for parameter in self.weight_transfer_engine.model.parameters():
                parameter.data.fill_(GARBAGE)

    def resident(self) -> int:
        """Bytes of the process's memory (VmRSS)."""
        with open(f"/proc/{os.getpid()}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
