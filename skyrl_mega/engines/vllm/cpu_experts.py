"""Repairs of vLLM 0.32 on a CPU for experts on several workers: expert parallelism, and data-parallel replicas.

Without the first repair a worker computes with the wrong experts or crashes; without the second the first token fails.
CUDA has both, so on a CPU the repairs rehearse the engines of a GPU.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch


def allow_expert_parallelism() -> None:
    """Makes the CPU kernel of experts respect the worker's own share of the experts.

    The kernel takes global numbers of experts as positions in the worker's weights. Numbers of other workers' experts
    become position 0 with weight 0, so that the sum over all workers is the layer's result. May be called again in the
    same process.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply
    if hasattr(apply, "__wrapped__"):
        return

    @wraps(apply)
    def with_own_experts(experts: Any, *args: Any, **kwargs: Any) -> None:
        expert_map = kwargs.get("expert_map")
        if expert_map is not None:
            local = expert_map[kwargs["topk_ids"].long()]
            kwargs["topk_weights"] = kwargs["topk_weights"].masked_fill(local < 0, 0.0)
            kwargs["topk_ids"] = local.clamp(min=0).to(kwargs["topk_ids"].dtype)
        apply(experts, *args, **kwargs)

    CPUUnquantizedExperts.apply = with_own_experts


def allow_replicas() -> None:
    """Lets a model with experts run in several data-parallel replicas on CPUs: adds the missing operations
    `all_gatherv` and `reduce_scatterv`, over gloo, to vLLM's communicator. May be called again in the same process."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(communicator: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Returns the rows of all processes of the group, one process after another; several tensors at once as a list.

    Args:
        communicator: vLLM's communicator of the group.
        tensors: A tensor, or several with equally many rows.
        dim: The dimension of the rows, 0.
        sizes: Rows of each process; None if all have equally many.
    """
    assert dim == 0, "vLLM gathers rows of tokens"
    if isinstance(tensors, list):
        return [_all_gatherv(communicator, tensor, dim, sizes) for tensor in tensors]
    counts = sizes or [tensors.shape[0]] * communicator.world_size
    rows = max(counts)  # gloo gathers equal shapes only
    padded = tensors.new_zeros(rows, *tensors.shape[1:])
    padded[: tensors.shape[0]] = tensors
    gathered = tensors.new_empty(communicator.world_size * rows, *tensors.shape[1:])
    torch.distributed.all_gather_into_tensor(gathered, padded, group=communicator.device_group)
    return torch.cat([gathered[i * rows : i * rows + count] for i, count in enumerate(counts)])


def _reduce_scatterv(communicator: Any, tensor: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """Returns this process's rows of the sum over all processes of the group.

    Args:
        communicator: vLLM's communicator of the group.
        tensor: Rows of all processes, one process after another.
        dim: The dimension of the rows, 0.
        sizes: Rows of each process; None if all have equally many.
    """
    assert dim == 0, "vLLM scatters rows of tokens"
    counts = sizes or [tensor.shape[0] // communicator.world_size] * communicator.world_size
    total = tensor.clone()
    torch.distributed.all_reduce(total, group=communicator.device_group)
    first = sum(counts[: communicator.rank_in_group])
    return total[first : first + counts[communicator.rank_in_group]]
