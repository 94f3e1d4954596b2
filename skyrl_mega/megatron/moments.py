"""Master weights, Adam's moments and its count of steps, in the distributed optimizer of megatron-core."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The optimizers that do the work: dense and expert parameters have one each. One without parameters is left out.

    A chain may hold one for a pipeline stage that trains nothing of its kind.
    """
    every = list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in every if not part.is_stub_optimizer]


def masters(part: DistributedOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of the model's parameters that this rank trains some of, with the float32 [n] weights that Adam has of it.

    megatron-core's own map from one to the other (`model_param_group_index_map`) counts parameters in the order of
    their buffers, while Adam's groups begin with those of type float32; so it is wrong where a group has both types,
    as that of a bfloat16 critic with its float32 value head.
    """
    for groups, shards in (
        (part.model_fp32_groups, part.shard_fp32_groups),
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
    ):
        for group, weights in zip(groups, shards, strict=True):
            yield from zip(group, weights, strict=True)


def allocate_moments(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter its two moments, zeros, which Adam itself would allocate in its first step.

    Moments that are there keep what they hold. The optimizer's next step is what it would have been.
    """
    for part in parts(optimizer):
        inner = part.optimizer
        new = [p for group in inner.param_groups for p in group["params"] if not inner.state[p]]
        for p in new:
            inner.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        if new and isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            for p in new:
                inner.state[p]["step"] = torch.tensor(0.0)


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Says how many steps the moments have taken. torch's Adam counts per parameter, Transformer Engine's per group."""
    for part in parts(optimizer):
        inner = part.optimizer
        per_parameter = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
        for group in inner.param_groups:
            if not per_parameter:
                group["step"] = step
                continue
            for p in group["params"]:
                inner.state[p]["step"] = torch.tensor(float(step))
