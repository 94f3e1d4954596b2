"""Both ends of a run's weight sync: what policy and engines hold, and where they sit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl_mega.config.derived import engine_data, expert_parallel, policy_ranks
from skyrl_mega.config.schema import Config
from skyrl_mega.layout.box import Layout
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.megatron import Spec, layer_spec
from skyrl_mega.models.registry import architecture
from skyrl_mega.weights.topology import Links, Topology


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
class Ends:
    """Both ends of a sync."""

    parallel: Parallel
    policy: Layout
    engines: Layout
    """Workers of engine 0, of engine 1, …"""
    topology: Topology

    def only(self, engines: Sequence[int], workers: int) -> Ends:
        """With these engines alone, of `workers` workers each; they stay where they are."""
        taking = [engine * workers + worker for engine in engines for worker in range(workers)]
        return replace(
            self,
            engines=Layout(self.engines.tensors, tuple(self.engines.shards[t] for t in taking)),
            topology=replace(self.topology, targets=tuple(self.topology.targets[t] for t in taking)),
        )


def lay_out(
    hf: Mapping[str, Any], parallel: Parallel, spec: Spec, engines: Engines, links: Links, *, shared: bool
) -> Ends:
    """Both ends for the model whose config.json is `hf`.

    Args:
        spec: The policy's layer spec, which names its parameters.
        shared: Policy rank r and engine worker r sit on the same device; else the engines come after the policy.

    Raises:
        UserError: A layout that the model cannot be cut into.
    """
    arch = architecture(hf)
    policy = arch.megatron_layout(hf, parallel, spec)
    takers = arch.engine_layout(
        hf, engines.tensor, engines.count, expert_parallel=engines.expert_parallel, data=engines.data
    )
    sizes = (len(policy.shards), len(takers.shards))
    where = Topology.shared(*sizes, links) if shared else Topology.apart(*sizes, links, engine=engines.workers)
    return Ends(parallel, policy, takers, where)


def engines_of(config: Config) -> Engines:
    """How the settings cut the engines."""
    rollout = config.rollout
    return Engines(rollout.engines, rollout.tensor, engine_data(rollout), expert_parallel(rollout))


def ends(config: Config, hf: Mapping[str, Any]) -> Ends:
    """What the settings ask for; see `lay_out`. A device that is not decided yet counts as CUDA."""
    spec = layer_spec(config.policy.spec, "cpu" if config.cluster.device == "cpu" else "cuda")
    parallel = Parallel.from_config(config.policy.layout, policy_ranks(config))
    links = Links.from_config(config.cluster)
    return lay_out(hf, parallel, spec, engines_of(config), links, shared=config.cluster.shared)
