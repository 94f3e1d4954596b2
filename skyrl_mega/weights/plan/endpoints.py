"""Both ends of a run's weight sync: layouts and devices of policy and engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl_mega.config.derived import engine_data, expert_parallel
from skyrl_mega.config.schema import Config
from skyrl_mega.models.megatron import Spec
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Layout
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.plan.topology import Topology


@dataclass(frozen=True)
class EnginesLayout:
    """The engines' parallel layout."""

    count: int
    """Number of engines."""
    tensor: int = 1
    """Tensor parallel size of an engine."""
    data: int = 1
    """Attention replicas within an engine; experts are distributed over all workers of the engine."""
    expert_parallel: bool = False
    """True if each worker holds whole experts, False if each holds a slice of every expert."""

    @property
    def workers(self) -> int:
        """Number of workers per engine: tensor · data."""
        return self.tensor * self.data


@dataclass(frozen=True)
class Endpoints:
    """The layouts and devices of both ends of a sync."""

    parallel: ParallelDims
    """Parallel sizes of the policy."""
    policy: Layout
    """The boxes of each policy rank."""
    engines: Layout
    """Workers of engine 0, then of engine 1, …"""
    topology: Topology
    """Devices of policy ranks and engine workers."""

    def only(self, engines: Sequence[int], workers: int) -> Endpoints:
        """Returns new endpoints with only the engines of these numbers, of `workers` workers each, in the given order;
        each worker keeps its device and its shard."""
        targets = [engine * workers + worker for engine in engines for worker in range(workers)]
        return replace(
            self,
            engines=Layout(self.engines.tensors, tuple(self.engines.shards[t] for t in targets)),
            topology=replace(self.topology, targets=tuple(self.topology.targets[t] for t in targets)),
        )


def lay_out(
    hf: Mapping[str, Any], parallel: ParallelDims, spec: Spec, engines: EnginesLayout, topology: Topology
) -> Endpoints:
    """Returns both ends of a sync: the layouts of policy and engines, and the devices.

    Args:
        hf: The model's config.json.
        parallel: Parallel sizes of the policy.
        spec: Kind of the policy's layers ("te" or "local"), which decides the names of parameters.
        engines: Parallel layout of the engines.
        topology: Devices of policy ranks and engine workers.

    Raises:
        UserError: The model is not supported, or cannot be split into a layout.
    """
    arch = architecture(hf)
    policy = arch.megatron_layout(hf, parallel, spec)
    engine_layout = arch.engine_layout(
        hf, engines.tensor, engines.count, expert_parallel=engines.expert_parallel, data=engines.data
    )
    return Endpoints(parallel, policy, engine_layout, topology)


def engines_of(config: Config) -> EnginesLayout:
    """Returns the engines' parallel layout in the settings."""
    rollout = config.rollout
    return EnginesLayout(rollout.engines, rollout.tensor, engine_data(rollout), expert_parallel(rollout))
