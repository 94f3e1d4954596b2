"""What micro-batches have measured, over all of them and over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor


def summed(outputs: list[dict[str, Tensor]]) -> dict[str, float]:
    """Sums (or maxima, of names that end so: `_max`) over micro-batches and over data and context ranks; empty on all
    but the last pipeline stage. One copy to the host for all of them.

    Entry i of one that is a vector is called `<name>.<i>`.
    """
    if not outputs:
        return {}
    names = sorted(outputs[0])
    entries = [f"{n}.{i}" if outputs[0][n].ndim else n for n in names for i in range(outputs[0][n].numel())]
    table = torch.stack([torch.cat([o[n].float().reshape(-1) for n in names]) for o in outputs])
    peaks = torch.tensor([n.endswith("_max") for n in entries], device=table.device)
    sums, tops = table.sum(0), table.amax(0)
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(sums, group=group)
    dist.all_reduce(tops, dist.ReduceOp.MAX, group=group)
    return dict(zip(entries, tops.where(peaks, sums).tolist(), strict=True))


def scalars(metrics: dict[str, float]) -> dict[str, float]:
    """Without the entries of vectors, which fill a page."""
    return {name: value for name, value in metrics.items() if "." not in name}
