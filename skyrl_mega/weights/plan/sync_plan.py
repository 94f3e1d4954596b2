"""The plan of a weight sync, wire types included: used by the dry run, `weights plan` and the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch

from skyrl_mega.cluster.run_placement import RunPlacement, plan_placement
from skyrl_mega.config.derived import planned_device, policy_ranks
from skyrl_mega.config.pools import engine_cluster
from skyrl_mega.config.schema import Config
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.megatron import Spec, layer_spec
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Layout
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.fp8.format import Wire, quantised, scale_shapes, with_scales
from skyrl_mega.weights.plan.plan import Plan, plan
from skyrl_mega.weights.plan.topology import Links, PoolLinks, Topology


@dataclass(frozen=True)
class Endpoints:
    """The layouts and devices of both ends of a sync."""

    policy: Layout
    """The boxes of each policy rank."""
    engines: Layout
    """The boxes of each worker of the first engine, then of the second, …"""
    topology: Topology
    """Devices of policy ranks and engine workers."""


@dataclass(frozen=True)
class SyncInputs:
    """Everything a sync's plan depends on. Plain values only, as in JSON."""

    hf: dict[str, Any]
    """The model's config.json."""
    parallel: dict[str, Any]
    """Fields of the policy's `ParallelDims`."""
    spec: Spec
    """The policy's layer spec, the source of parameter names."""
    engines: dict[str, Any]
    """Fields of an engine's `EngineCut`."""
    members: tuple[int, ...]
    """Numbers of the participating engines among all engines."""
    topology: dict[str, Any]
    """Fields of `Topology`: the devices of the policy ranks, and of the workers of all engines."""
    dtype: str
    """Wire type of all tensors not quantised."""
    fp8: bool
    """True if linear weights are sent as block-scaled FP8."""

    @classmethod
    def of(cls, config: Config, hf: Mapping[str, Any], placement: RunPlacement) -> SyncInputs:
        """Returns the inputs for the settings and the devices of all processes, with all engines of the placement as
        members. With `cluster.device: auto` the policy's layers are those of CUDA.

        Args:
            config: The settings.
            hf: The model's config.json.
            placement: Device of every process.

        Raises:
            UserError: The policy's ranks do not fit its layout.
        """
        apart = config.cluster.pools.engines is not None
        pool = PoolLinks(config.cluster.nodes, Links.from_config(engine_cluster(config))) if apart else None
        topology = Topology.from_placement(placement, Links.from_config(config.cluster), pool)
        cut = EngineCut.of(config.rollout)
        return cls(
            hf=dict(hf),
            parallel=asdict(ParallelDims.from_config(config.policy.layout, policy_ranks(config))),
            spec=layer_spec(config.policy.spec, planned_device(config)),
            engines=asdict(cut),
            members=tuple(range(len(placement.engines) // cut.workers)),  # engines join and leave
            topology=asdict(topology),
            dtype=config.model.dtype,
            fp8=config.weights.wire == "fp8",
        )

    @property
    def ranks(self) -> int:
        """Number of policy ranks."""
        return len(self.topology["sources"])

    @property
    def workers(self) -> int:
        """Number of workers per engine: tensor · data."""
        return EngineCut(**self.engines).workers

    @property
    def float32(self) -> frozenset[str]:
        """Names of the tensors in float32 whatever the model's type. Raises UserError if the model is not supported."""
        return architecture(self.hf).describe(self.hf).float32_tensors

    def endpoints(self) -> tuple[Endpoints, Wire]:
        """Returns both ends of the sync between the policy and the engines `members`, and the types on the wire. With
        `fp8` both layouts contain the scales.

        Raises:
            UserError: The model is not supported, or cannot be split into a layout.
        """
        arch, cut, topology = architecture(self.hf), EngineCut(**self.engines), Topology.of(self.topology)
        policy = arch.megatron_layout(self.hf, ParallelDims(**self.parallel), self.spec)
        engines = arch.engine_layout(self.hf, cut.tensor, len(self.members), cut.expert_parallel, cut.data)
        workers = (engine * cut.workers + worker for engine in self.members for worker in range(cut.workers))
        topology = replace(topology, targets=tuple(topology.targets[worker] for worker in workers))
        wire = wire_of(self.dtype, self.fp8, engines.tensors, self.float32)
        if wire.quantised:
            policy, engines = with_scales(policy, wire.quantised), with_scales(engines, wire.quantised)
        return Endpoints(policy, engines, topology), wire

    def plan(self) -> Plan:
        """Returns the transfer plan from the policy to the engines `members`; takes seconds for a large model, and
        caches nothing (`cache.cached_plan` does).

        Raises:
            UserError: The model is not supported, or cannot be split into a layout.
        """
        ends, wire = self.endpoints()
        return plan(ends.policy, ends.engines, ends.topology, itemsize=wire.itemsize)


def sync_plan(config: Config, hf: Mapping[str, Any], placement: RunPlacement | None = None) -> Plan:
    """Returns the plan of a sync with all engines; takes seconds for a large model. Caches nothing (`Connection.plan`
    does).

    Args:
        config: The settings.
        hf: The model's config.json.
        placement: Devices of all processes; None means `plan_placement(config)`.

    Raises:
        UserError: The model is not supported, or cannot be split into a layout.
    """
    return SyncInputs.of(config, hf, placement or plan_placement(config)).plan()


def wire_of(
    dtype: str, fp8: bool, tensors: Mapping[str, tuple[int, ...]], float32: frozenset[str] = frozenset()
) -> Wire:
    """Returns the types of these tensors on the wire.

    Args:
        dtype: `model.dtype`, the type of all tensors not quantised.
        fp8: True to quantise the linear weights (`weights.wire=fp8`).
        tensors: Name → shape of the model's tensors.
        float32: Names of the tensors in float32 whatever the model's type.
    """
    return Wire(getattr(torch, dtype), quantised(tensors) if fp8 else frozenset(), float32)


def copy_bytes(
    dtype: str, fp8: bool, tensors: Mapping[str, tuple[int, ...]], float32: frozenset[str] = frozenset()
) -> int:
    """Returns the bytes of a whole copy of the model in the types of the wire, scales included.

    Args:
        dtype: `model.dtype`, the type of all tensors not quantised.
        fp8: True to quantise the linear weights (`weights.wire=fp8`).
        tensors: Name → shape of the model's tensors.
        float32: Names of the tensors in float32 whatever the model's type.
    """
    wire = wire_of(dtype, fp8, tensors, float32)
    all_shapes = {**scale_shapes(tensors, wire.quantised), **tensors}
    return sum(prod(shape) * wire.itemsize(name) for name, shape in all_shapes.items())


def wire_text(config: Config) -> str:
    """Returns a user-facing description of the types on the wire: `model.dtype`, or a sentence about FP8."""
    if config.weights.wire != "fp8":
        return config.model.dtype
    return f"FP8 linear weights with float32 scales, the others {config.model.dtype}"
