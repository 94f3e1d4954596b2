"""Master weights, Adam's moments and its count of steps, in the distributed optimizer of megatron-core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam calls them in its state."""


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
        allocate(part.optimizer, [weights for _, weights in masters(part)])


def allocate(inner: Any, weights: Iterable[Tensor]) -> None:
    """The same of some weights of an Adam."""
    for w in weights:
        if inner.state[w]:
            continue
        if hasattr(inner, "initialize_state"):  # Transformer Engine's: in its own type, with what it keeps beside
            inner.initialize_state(w, False)
        else:
            inner.state[w] = {kind: torch.zeros_like(w) for kind in MOMENTS}
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            inner.state[w]["step"] = torch.tensor(0.0)


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


class SmallMoments(torch.optim.AdamW):
    """torch's AdamW with moments in bfloat16, as Transformer Engine's Adam has them: a step computes in float32, and
    what it keeps of the moments is rounded to the nearest (common/multi_tensor/adam.cu)."""

    @classmethod
    def instead_of(cls, inner: torch.optim.Optimizer) -> SmallMoments:
        """An Adam that has not stepped, with smaller moments; its weights may be views, which a new one refuses."""
        made = cls([torch.zeros(())])
        made.param_groups = inner.param_groups
        return made

    def initialize_state(self, weights: Tensor, _remainders: bool = False) -> None:
        """Zeros in the place of the moments; called as Transformer Engine's is."""
        self.state[weights] = {kind: torch.zeros_like(weights, dtype=torch.bfloat16) for kind in MOMENTS}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of all weights that have a gradient."""
        kept = [
            (state, kind, state[kind])
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and (state := self.state[p])
            for kind in MOMENTS
        ]
        for state, kind, small in kept:
            state[kind] = small.float()
        try:
            return super().step(closure)
        finally:
            for state, kind, small in kept:
                small.copy_(state[kind])
                state[kind] = small
