"""Both ends of a run's weight sync: what policy and engines hold, and where they sit."""

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
class Engines:
    """How the engines are cut."""

    count: int
    tensor: int = 1
    data: int = 1
    """Replicas of the attention within one engine; experts are dealt over all of its workers."""
    expert_parallel: bool = False

    @property
    def workers(self) -> int:
        """Workers of one engine."""
        return self.tensor * self.data


@dataclass(frozen=True)
class Endpoints:
    """Both ends of a sync."""

    parallel: ParallelDims
    policy: Layout
    engines: Layout
    """Workers of engine 0, of engine 1, …"""
    topology: Topology

    def only(self, engines: Sequence[int], workers: int) -> Endpoints:
        """With these engines alone, of `workers` workers each; they stay where they are."""
        taking = [engine * workers + worker for engine in engines for worker in range(workers)]
        return replace(
            self,
            engines=Layout(self.engines.tensors, tuple(self.engines.shards[t] for t in taking)),
            topology=replace(self.topology, targets=tuple(self.topology.targets[t] for t in taking)),
        )


def lay_out(
    hf: Mapping[str, Any], parallel: ParallelDims, spec: Spec, engines: Engines, topology: Topology
) -> Endpoints:
    """Both ends for the model whose config.json is `hf`.

    Args:
        spec: The policy's layer spec, which names its parameters.
        topology: Where policy ranks and engine workers are.

    Raises:
        UserError: A layout that the model cannot be cut into.
    """
    arch = architecture(hf)
    policy = arch.megatron_layout(hf, parallel, spec)
    takers = arch.engine_layout(
        hf, engines.tensor, engines.count, expert_parallel=engines.expert_parallel, data=engines.data
    )
    return Endpoints(parallel, policy, takers, topology)


def engines_of(config: Config) -> Engines:
    """How the settings cut the engines."""
    rollout = config.rollout
    return Engines(rollout.engines, rollout.tensor, engine_data(rollout), expert_parallel(rollout))
