"""The one function that makes a sync's plan: the dry run, `weights plan` and the run call it, wire included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from skyrl_mega.cluster.place import RunPlacement, place
from skyrl_mega.config.derived import planned_device, policy_ranks
from skyrl_mega.config.schema import Config
from skyrl_mega.models.megatron import Spec, layer_spec
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.fp8.format import Wire, quantised, scale_shapes, with_scales
from skyrl_mega.weights.plan.endpoints import Endpoints, Engines, engines_of, lay_out
from skyrl_mega.weights.plan.plan import Plan, plan
from skyrl_mega.weights.plan.topology import Links, Topology


@dataclass(frozen=True)
class SyncInputs:
    """All that a sync's plan follows from. Plain values only: it travels as JSON would."""

    hf: dict[str, Any]
    """config.json."""
    parallel: dict[str, Any]
    """Fields of the policy's `ParallelDims`."""
    spec: Spec
    """Layer spec of the policy, which names its parameters."""
    engines: dict[str, Any]
    """Fields of `Engines`: all of the run's."""
    members: tuple[int, ...]
    """The engines that take part, by their numbers in the run."""
    sources: tuple[int, ...]
    """The device of each policy rank."""
    targets: tuple[int, ...]
    """The device of each worker of all engines."""
    links: dict[str, Any]
    """Fields of `Links`."""
    dtype: str
    """Type on the wire of what is not quantised."""
    fp8: bool
    """Linear weights travel as block-scaled FP8."""

    @classmethod
    def of(cls, config: Config, hf: Mapping[str, Any], placement: RunPlacement) -> SyncInputs:
        """What the settings ask for, on these devices. A device that is not decided yet counts as CUDA."""
        topology = Topology.from_placement(placement, Links.from_config(config.cluster))
        return cls(
            hf=dict(hf),
            parallel=asdict(ParallelDims.from_config(config.policy.layout, policy_ranks(config))),
            spec=layer_spec(config.policy.spec, planned_device(config)),
            engines=asdict(engines_of(config)),
            members=tuple(range(config.rollout.engines)),
            sources=topology.sources,
            targets=topology.targets,
            links=asdict(topology.links),
            dtype=config.model.dtype,
            fp8=config.weights.wire == "fp8",
        )

    @property
    def workers(self) -> int:
        """Workers of one engine."""
        return Engines(**self.engines).workers

    def endpoints(self) -> tuple[Endpoints, Wire]:
        """What both ends hold, scales included, and the types on the wire.

        Raises:
            UserError: A layout that the model cannot be cut into.
        """
        topology = Topology(tuple(self.sources), tuple(self.targets), Links(**self.links))
        ends = lay_out(self.hf, ParallelDims(**self.parallel), self.spec, Engines(**self.engines), topology)
        ends = ends.only(self.members, self.workers)
        wire = wire_of(self.dtype, self.fp8, ends.engines.tensors)
        if not wire.quantised:
            return ends, wire
        policy, engines = with_scales(ends.policy, wire.quantised), with_scales(ends.engines, wire.quantised)
        return Endpoints(ends.parallel, policy, engines, ends.topology), wire

    def plan(self) -> Plan:
        """From one end to the other."""
        ends, wire = self.endpoints()
        return plan(ends.policy, ends.engines, ends.topology, itemsize=wire.itemsize)


def sync_plan(config: Config, hf: Mapping[str, Any], placement: RunPlacement | None = None) -> Plan:
    """The plan of a sync with all engines.

    Args:
        hf: config.json.
        placement: Where processes are; None takes `place(config)`.

    Raises:
        UserError: A layout that the model cannot be cut into.
    """
    return SyncInputs.of(config, hf, placement or place(config)).plan()


def wire_of(dtype: str, fp8: bool, tensors: Mapping[str, tuple[int, ...]]) -> Wire:
    """The types of these tensors on the wire."""
    return Wire(getattr(torch, dtype), quantised(tensors) if fp8 else frozenset())


def copy_bytes(dtype: str, fp8: bool, tensors: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of one copy of the model on the wire, scales included."""
    wire = wire_of(dtype, fp8, tensors)
    every = {**scale_shapes(tensors, wire.quantised), **tensors}
    return sum(prod(shape) * wire.itemsize(name) for name, shape in every.items())


def wire_text(config: Config) -> str:
    """For people: the wire's types."""
    if config.weights.wire != "fp8":
        return config.model.dtype
    return f"FP8 linear weights with float32 scales, the others {config.model.dtype}"
