"""Distributed checkpoints: every rank writes its own shards, and any layout reads them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

# Adam's moments and master weights are stored by parameter and not by data-parallel bucket, so that another layout
# reads them. A layout with expert parallelism chains two optimizers where one without has a single one; hence no
# prefix by optimizer, and nothing of the optimizer but tensors: its settings come from the configuration, its step
# count is the schedule's.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


def save(folder: Path, chunks: list[Any], optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler) -> None:
    """Writes model, optimizer and schedule to `folder`, which must exist and be empty. A collective.

    Raises:
        RuntimeError: A rank could not write; says which, and why.
    """
    for part in _parts(optimizer):
        if not part.optimizer.state:  # before the first step
            _allocate(part)
            _set_step(part, 0)
    state = _state(chunks, optimizer, loading=False)
    state["schedule"] = schedule.state_dict()
    try:
        dist_checkpointing.save(state, str(folder))
    except CheckpointException as error:  # raised on every rank, and only one knows why
        told = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        everybody: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everybody, "; ".join(told))
        raise RuntimeError("; ".join(filter(None, everybody)) or "no rank says why") from error


def load(folder: Path, chunks: list[Any], optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler) -> None:
    """Reads `folder` into model, optimizer and schedule, in this layout. A collective."""
    for part in _parts(optimizer):
        _allocate(part)
    loaded = dist_checkpointing.load(_state(chunks, optimizer, loading=True), str(folder))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded["model"][i], strict=True)
    schedule.num_steps = 0  # it counts on from where it stands
    schedule.load_state_dict(loaded["schedule"])
    for i, part in enumerate(_parts(optimizer)):
        part.load_parameter_state_from_fully_reshardable(loaded["optimizer"][i])
        _set_step(part, schedule.num_steps)


def _state(chunks: list[Any], optimizer: MegatronOptimizer, loading: bool) -> dict[str, Any]:
    model = {i: chunk.sharded_state_dict(metadata=_METADATA) for i, chunk in enumerate(chunks)}
    moments = {
        i: part.sharded_param_state_fully_reshardable(model, is_loading=loading, metadata=_METADATA)
        for i, part in enumerate(_parts(optimizer))
    }
    return {"model": model, "optimizer": moments}


def _parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """Dense and expert parameters have an optimizer each."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _allocate(part: DistributedOptimizer) -> None:
    """Moments to load into, which Adam itself allocates in its first step.

    Without torch's `step`, which is not a moment.
    """
    inner = part.optimizer
    for group in inner.param_groups:
        for p in group["params"]:
            inner.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def _set_step(part: DistributedOptimizer, step: int) -> None:
    """torch's Adam counts steps per parameter, Transformer Engine's and apex's per group."""
    inner = part.optimizer
    per_parameter = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    for group in inner.param_groups:
        if not per_parameter:
            group["step"] = step
            continue
        for p in group["params"]:
            inner.state[p]["step"] = torch.tensor(float(step))
