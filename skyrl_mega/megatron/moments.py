"""Master weights, Adam's moments and Adam's step count in megatron-core's distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Keys of the moments in Adam's state."""


def inner_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """Returns the inner optimizers with parameters: one for dense and one for expert parameters.

    Chained optimizers without parameters are left out: a pipeline stage may train no parameter of a kind.
    """
    optimizers = list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in optimizers if not part.is_stub_optimizer]


def master_weights(part: DistributedOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (model parameter, float32 [n] master weight of this rank's run) for each parameter trained on this rank.
    `part` is an optimizer of `inner_optimizers`.

    megatron-core's own map (`model_param_group_index_map`) counts parameters in buffer order, but Adam's groups start
    with float32 parameters. So the map is wrong for a group with both dtypes, such as a bfloat16 critic with a float32
    value head.
    """
    for groups, shards in (
        (part.model_fp32_groups, part.shard_fp32_groups),
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
    ):
        for group, weights in zip(groups, shards, strict=True):
            yield from zip(group, weights, strict=True)


def allocate_moments(optimizer: MegatronOptimizer) -> None:
    """Allocates zero moments for every parameter, instead of leaving the allocation to Adam's first step.

    Existing moments stay unchanged. The optimizer's next step is unchanged, too.
    """
    for part in inner_optimizers(optimizer):
        allocate(part.optimizer, [weights for _, weights in master_weights(part)])


def allocate(adam: Any, weights: Iterable[Tensor]) -> None:
    """Allocates zero moments in an Adam optimizer. Existing moments stay unchanged.

    Args:
        adam: Optimizer of torch or of Transformer Engine; its own `state` is filled.
        weights: Parameters of `adam`: the float32 master weights on this rank.
    """
    for w in weights:
        if adam.state[w]:
            continue
        if hasattr(adam, "initialize_state"):  # Transformer Engine's Adam: own dtype and extra state
            adam.initialize_state(w, False)
        else:
            adam.state[w] = {kind: torch.zeros_like(w) for kind in MOMENTS}
        if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
            adam.state[w]["step"] = torch.tensor(0.0)


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Sets Adam's count of steps taken to `step`. torch's Adam counts per parameter, Transformer Engine's per group.
    Call after `allocate_moments`."""
    for part in inner_optimizers(optimizer):
        adam = part.optimizer
        per_parameter = isinstance(adam, torch.optim.Adam | torch.optim.AdamW)
        for group in adam.param_groups:
            if not per_parameter:
                group["step"] = step
                continue
            for p in group["params"]:
                adam.state[p]["step"] = torch.tensor(float(step))


class AdamWithBfloat16Moments(torch.optim.AdamW):
    """torch's AdamW with bfloat16 moments, like Transformer Engine's Adam (common/multi_tensor/adam.cu): a step
    computes in float32 and rounds the stored moments to the nearest value."""

    @classmethod
    def replacing(cls, replaced: torch.optim.Optimizer) -> AdamWithBfloat16Moments:
        """Returns a new Adam with the parameter groups of `replaced`, an Adam before its first step.

        The weights may be views, which Adam's constructor would refuse.
        """
        adam = cls([torch.zeros(())])
        adam.param_groups = replaced.param_groups
        return adam

    def initialize_state(self, weights: Tensor, _remainders: bool = False) -> None:
        """Sets both moments of `weights` to zero, in bfloat16; a former state is lost. Has the parameters of
        Transformer Engine's method, and ignores `_remainders`.

        The new state has no `step`: set `step` before the optimizer's next step, as `allocate` does.
        """
        self.state[weights] = {kind: torch.zeros_like(weights, dtype=torch.bfloat16) for kind in MOMENTS}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes one step of all weights with a gradient: computes with moments in float32, and stores the moments
        rounded to bfloat16. Returns the result of `closure`, or None without a closure."""
        moments = [
            (state, kind, state[kind])
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and (state := self.state[p])
            for kind in MOMENTS
        ]
        for state, kind, stored in moments:
            state[kind] = stored.float()
        try:
            return super().step(closure)
        finally:
            for state, kind, stored in moments:
                stored.copy_(state[kind])
                state[kind] = stored
