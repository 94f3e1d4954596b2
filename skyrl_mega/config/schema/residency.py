"""Settings of offloading: parts of a run that stay in GPU memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.residency import PARTS

KEEP = {"[parameters,gradients]": "keeps these two", "[]": "none", "null": "all"}


@dataclass
class ResidencyConfig:
    """Offloading of policy, critic and engines on shared GPUs: a part not needed in a phase moves to host memory, or is
    dropped if recomputable."""

    keep: Optional[list[str]] = field(default=None, metadata={"allowed": PARTS, "examples": KEEP})
    """Parts to keep on the device in every phase; null keeps all parts, an empty list none. Otherwise engine_weights
    are dropped and refilled by the next weight sync; kv_cache and gradients are dropped; optimizer is master weights
    and moments; critic is the whole critic. `config/residency.py` lists the parts needed in each phase."""
