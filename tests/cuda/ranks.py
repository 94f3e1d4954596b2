"""All ranks of a layout in a single process, in sequence, over torch's fake process group."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from skyrl_mega.config.schema import OptimizerConfig, PolicyConfig
from skyrl_mega.parallel.dims import ParallelDims

ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "allreduce", "sequence_parallel", "shared", "shared_embedding")
"""Attributes of a parameter read by megatron-core."""


@dataclass(frozen=True)
class Case:
    """A model in a layout."""

    hf: dict[str, Any]
    parallel: ParallelDims
    spec: str
    dtype: str
    gradients: dict[str, Tensor]
    """Gradients of the whole model, by Hugging Face name."""


@dataclass(frozen=True)
class Updated:
    """Optimizer data of a parameter on a rank."""

    decay: float
    """Factor of the weight decay."""
    run: tuple[int, int]
    """Range of the flattened parameter updated by this rank."""
    squares: float
    """Sum of squares of the gradient, as counted in the norm."""


@dataclass
class Built:
    """Model, sharded state and optimizers built by a rank."""

    params: dict[str, tuple[int, ...]]
    """Shapes by local name, in the order of `named_parameters`."""
    attributes: dict[str, dict[str, Any]]
    frozen: dict[str, str] = field(default_factory=dict)
    """Dtypes of the parameters without a gradient, by local name."""
    stored: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = field(default_factory=list)
    """Sharded state of the model: key, whole shape, offset, local shape, and True if this rank saves the tensor."""
    parts: list[dict[str, Updated]] = field(default_factory=list)
    """Parameters of each optimizer, by local name."""
    norm_ranks: list[list[int]] = field(default_factory=list)
    """Ranks over which each optimizer sums the squares."""


@contextmanager
def fake_rank(rank: int, parallel: ParallelDims) -> Iterator[None]:
    """Makes this process the given rank within the context; collectives return at once without effect."""
    from megatron.core import parallel_state

    from skyrl_mega.megatron import model as build

    dist.init_process_group("fake", rank=rank, world_size=parallel.ranks, store=FakeStore())
    new_group = dist.new_group

    def fake_group(*args: Any, **options: Any) -> Any:  # megatron-core also asks for a gloo group
        return new_group(*args, **{**options, "backend": "fake"})

    def everybody(answers: list[Any], mine: Any, group: Any = None) -> None:
        answers[:] = [mine] * len(answers)

    try:
        with mock.patch.object(dist, "new_group", fake_group):
            build.make_groups(parallel, 60)
        with mock.patch.object(dist, "all_gather_object", everybody):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_rank(case: Case, rank: int) -> Built:
    """Builds the rank's model, buffers and optimizer, and sets the rank's part of the whole model's gradients."""
    from skyrl_mega.megatron import model as build
    from skyrl_mega.megatron.optimizer import build_optimizer
    from skyrl_mega.models.registry import architecture
    from tests.weights.grids import cut

    policy = PolicyConfig(spec=case.spec, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1))
    dtype, device = getattr(torch, case.dtype), torch.device("cpu")
    with fake_rank(rank, case.parallel):
        chunks = build.build_model(case.hf, policy, case.parallel, dtype, device)
        named = {f"{i}.{name}": p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
        built = Built(
            {name: tuple(p.shape) for name, p in named.items()},
            {name: {a: getattr(p, a) for a in ATTRIBUTES if hasattr(p, a)} for name, p in named.items()},
        )
        wrapped = build.wrap_ddp(chunks, overlap=False)
        optimizer = build_optimizer(policy.optimizer, wrapped, dtype)
        trained = {name: p for name, p in named.items() if p.requires_grad}
        built.frozen = {name: str(p.dtype).removeprefix("torch.") for name, p in named.items() if name not in trained}
        built.stored = [entry for chunk in chunks for entry in stored(chunk)]
        shard = architecture(case.hf).megatron_shard(case.hf, case.parallel, rank, case.spec)  # type: ignore[arg-type]
        local = cut(shard, case.gradients)
        for name, p in trained.items():
            p.main_grad.copy_(local[name].nan_to_num(0.0).view(p.shape))  # type: ignore[attr-defined]
        names = {p: name for name, p in trained.items()}
        for part in optimizer.chained_optimizers:
            part._copy_model_grads_to_main_grads()
            built.parts.append(updated(part, names))
            built.norm_ranks.append(dist.get_process_group_ranks(part.get_grad_stats_parallel_group()))
    return built


def updated(part: Any, names: dict[Tensor, str]) -> dict[str, Updated]:
    """Returns an optimizer's data of each parameter."""
    pairs = [
        (model, main)
        for groups, shards in (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        )
        for models, mains in zip(groups, shards, strict=True)
        for model, main in zip(models, mains, strict=True)
    ]
    decays = {id(p): group["wd_mult"] for group in part.optimizer.param_groups for p in group["params"]}
    counts = {id(grad) for grad in part.get_main_grads_for_grad_norm()}
    updates = {}
    for model, main in pairs:
        run = part._get_model_param_range_map(model)["param"]
        squares = float(main.grad.double().square().sum()) if id(main.grad) in counts else 0.0
        updates[names[model]] = Updated(float(decays[id(main)]), (run.start, run.end), squares)
    return updates


def stored(chunk: Any) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]]:
    """Yields the model's tensors in a sharded checkpoint."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedTensor,
        ShardedTensorFactory,
        apply_factories,
        is_main_replica,
    )

    state = chunk.sharded_state_dict(metadata={})
    apply_factories(state)
    for value in nested_values(state):
        assert not isinstance(value, ShardedTensorFactory)
        if isinstance(value, ShardedTensor):
            shape = (1,) * value.prepend_axis_num + tuple(value.local_shape)
            yield value.key, value.global_shape, value.global_offset, shape, is_main_replica(value.replica_id)


def build_ranks(_rank: int, _address: str, pickled: bytes) -> list[list[Built]]:
    """Builds every rank of the pickled cases, with Transformer Engine's classes if a case requests them."""
    cases: list[Case] = pickle.loads(pickled)
    return [[build_rank(case, rank) for rank in range(case.parallel.ranks)] for case in cases]
