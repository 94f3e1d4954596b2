"""Every rank of a layout in one process, one after the other, over torch's fake process group.

Run as a program in a process of its own it answers for Transformer Engine's classes (`te.install`): it reads a pickled
list of cases from standard input and writes what each rank has built to the file that its argument names.
"""

from __future__ import annotations

import pickle
import sys
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
"""What megatron-core reads off a parameter."""


@dataclass(frozen=True)
class Case:
    """A model in a layout."""

    hf: dict[str, Any]
    parallel: ParallelDims
    spec: str
    dtype: str
    gradients: dict[str, Tensor]
    """The whole model's, by Hugging Face name."""


@dataclass(frozen=True)
class Updated:
    """What an optimizer has of a parameter on one rank."""

    decay: float
    """Factor of the weight decay."""
    run: tuple[int, int]
    """Elements of the flattened parameter that this rank updates."""
    squares: float
    """Of its gradient, as far as the norm counts it."""


@dataclass
class Built:
    """What one rank has built."""

    params: dict[str, tuple[int, ...]]
    """Shapes by local name, in the order of `named_parameters`."""
    attributes: dict[str, dict[str, Any]]
    stored: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = field(default_factory=list)
    """Of the model's sharded state: key, whole shape, offset, local shape, whether this rank is the one that saves."""
    parts: list[dict[str, Updated]] = field(default_factory=list)
    """For each optimizer, by local name."""
    norm_ranks: list[list[int]] = field(default_factory=list)
    """For each optimizer, the ranks over which the squares are summed."""


@contextmanager
def fake_rank(rank: int, parallel: ParallelDims) -> Iterator[None]:
    """This process is that rank inside; collectives return at once and move nothing."""
    from megatron.core import parallel_state

    from skyrl_mega.megatron import model as build

    dist.init_process_group("fake", rank=rank, world_size=parallel.ranks, store=FakeStore())
    new_group = dist.new_group

    def fake_group(*args: Any, **options: Any) -> Any:  # megatron-core asks for Gloo's beside
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
    """Builds the rank's model, buffers and optimizer, and gives it its part of the whole model's gradients."""
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
        built.stored = [entry for chunk in chunks for entry in stored(chunk)]
        shard = architecture(case.hf).megatron_shard(case.hf, case.parallel, rank, case.spec)  # type: ignore[arg-type]
        local = cut(shard, case.gradients)
        for name, p in named.items():
            p.main_grad.copy_(local[name].nan_to_num(0.0))  # type: ignore[attr-defined]
        names = {p: name for name, p in named.items()}
        for part in optimizer.chained_optimizers:
            part._copy_model_grads_to_main_grads()
            built.parts.append(updated(part, names))
            built.norm_ranks.append(dist.get_process_group_ranks(part.get_grad_stats_parallel_group()))
    return built


def updated(part: Any, names: dict[Tensor, str]) -> dict[str, Updated]:
    """What one of the optimizers has of each parameter."""
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
    found = {}
    for model, main in pairs:
        run = part._get_model_param_range_map(model)["param"]
        squares = float(main.grad.double().square().sum()) if id(main.grad) in counts else 0.0
        found[names[model]] = Updated(float(decays[id(main)]), (run.start, run.end), squares)
    return found


def stored(chunk: Any) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]]:
    """The model's tensors in a sharded checkpoint."""
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


def main() -> None:
    """Answers for the cases on standard input, with Transformer Engine's classes where they ask for them."""
    from tests.cuda import te

    te.install()
    from skyrl_mega.megatron import cpu

    torch.set_num_threads(1)
    cpu.stand_in()
    cases: list[Case] = pickle.load(sys.stdin.buffer)
    answers = [[build_rank(case, rank) for rank in range(case.parallel.ranks)] for case in cases]
    with open(sys.argv[1], "wb") as file:
        pickle.dump(answers, file)


if __name__ == "__main__":
    # Under the name by which whoever reads the answers imports it.
    from tests.cuda import ranks

    ranks.main()
