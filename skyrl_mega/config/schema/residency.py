"""What stays in a GPU's memory all the time, and what takes turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass
class ResidencyConfig:
    """Policy, critic and engines that share GPUs take turns in their memory: what a phase does not need lies in host
    memory, or nowhere where it can be made again."""

    keep: Optional[list[str]] = None
    """Parts that stay on the device in every phase; None keeps all, an empty list none. Parts: engine_weights (dropped;
    the sync fills them again), kv_cache (dropped), parameters, gradients (dropped), optimizer (master weights and
    moments), critic (all of it). In which phase which part is needed: `config/residency.py`."""
