"""What stays in a GPU's memory all the time, and what takes turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.residency import PARTS

KEEP = {"[parameters,gradients]": "keeps these two", "[]": "none", "null": "all"}


@dataclass
class ResidencyConfig:
    """Policy, critic and engines that share GPUs take turns in their memory: what a phase does not need lies in host
    memory, or nowhere where it can be made again."""

    keep: Optional[list[str]] = field(default=None, metadata={"allowed": PARTS, "examples": KEEP})
    """Parts that stay on the device in every phase; None keeps all, an empty list none. engine_weights are dropped, and
    the sync fills them again; kv_cache and gradients are dropped; optimizer is master weights and moments; critic is
    all of it. In which phase which part is needed: `config/residency.py`."""
