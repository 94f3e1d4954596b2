"""Sums of metrics over micro-batches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor


def summed(outputs: list[dict[str, Tensor]]) -> dict[str, float]:
    """Returns metrics summed over micro-batches and over data and context ranks; {} without `outputs`, as on all
    pipeline stages but the last. A collective of the data and context ranks.

    Names ending in `_max` are maxima instead of sums. Entry i of a vector is named `<name>.<i>`. All outputs, also of
    the other ranks, need the same names and shapes. All metrics take one copy to the host.
    """
    if not outputs:
        return {}
    names = sorted(outputs[0])
    entries = [f"{n}.{i}" if outputs[0][n].ndim else n for n in names for i in range(outputs[0][n].numel())]
    table = torch.stack([torch.cat([o[n].float().reshape(-1) for n in names]) for o in outputs])
    is_maximum = torch.tensor([n.endswith("_max") for n in entries], device=table.device)
    sums, maxima = table.sum(0), table.amax(0)
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(sums, group=group)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    return dict(zip(entries, maxima.where(is_maximum, sums).tolist(), strict=True))


def scalars(metrics: dict[str, float]) -> dict[str, float]:
    """Returns a new dict of the metrics without entries of vectors (names with a dot), which are too many for a
    message."""
    return {name: value for name, value in metrics.items() if "." not in name}
