"""Distributed checkpoints: every rank writes its own shards, and any layout reads them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

# Optimizer state is stored by parameter and not by data-parallel bucket, so that another layout can read it.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}


def save(folder: Path, chunks: list[Any], optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler) -> None:
    """Writes model, optimizer and schedule to `folder`, which must exist and be empty. A collective."""
    state = _sharded(chunks, optimizer, loading=False)
    state["schedule"] = schedule.state_dict()
    dist_checkpointing.save(state, str(folder), content_metadata=_METADATA)


def load(folder: Path, chunks: list[Any], optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler) -> None:
    """Reads `folder` into model, optimizer and schedule, in this layout. A collective."""
    state = _sharded(chunks, optimizer, loading=True)
    state["schedule"] = schedule.state_dict()
    loaded = dist_checkpointing.load(state, str(folder))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["schedule"])


def _sharded(chunks: list[Any], optimizer: MegatronOptimizer, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {f"model{i}": chunk.sharded_state_dict(metadata=_METADATA) for i, chunk in enumerate(chunks)}
    state["optimizer"] = optimizer.sharded_state_dict(
        {k: v for k, v in state.items()}, is_loading=loading, metadata=_METADATA
    )
    return state
