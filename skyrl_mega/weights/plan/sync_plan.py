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
from skyrl_mega.models.megatron import Spec, layer_spec
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.fp8.format import Wire, quantised, scale_shapes, with_scales
from skyrl_mega.weights.plan.endpoints import Endpoints, EnginesLayout, engines_of, lay_out
from skyrl_mega.weights.plan.plan import Plan, plan
from skyrl_mega.weights.plan.topology import Links, PoolLinks, Topology


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
    """Fields of `EnginesLayout`, for all engines with a device in `targets`."""
    members: tuple[int, ...]
    """Numbers of the participating engines among all engines."""
    sources: tuple[int, ...]
    """Device of each policy rank."""
    targets: tuple[int, ...]
    """Device of each worker of all engines."""
    links: dict[str, Any]
    """Fields of `Links`."""
    dtype: str
    """Wire type of all tensors not quantised."""
    fp8: bool
    """True if linear weights are sent as block-scaled FP8."""
    pool: dict[str, Any] | None = None
    """Fields of `PoolLinks`, the engines' nodes if they are of another kind."""

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
        layout = engines_of(config)
        layout = replace(layout, count=len(placement.engines) // layout.workers)  # engines join and leave
        return cls(
            hf=dict(hf),
            parallel=asdict(ParallelDims.from_config(config.policy.layout, policy_ranks(config))),
            spec=layer_spec(config.policy.spec, planned_device(config)),
            engines=asdict(layout),
            members=tuple(range(layout.count)),
            sources=topology.sources,
            targets=topology.targets,
            links=asdict(topology.links),
            dtype=config.model.dtype,
            fp8=config.weights.wire == "fp8",
            pool=asdict(topology.pool) if topology.pool else None,
        )

    @property
    def workers(self) -> int:
        """Number of workers per engine: tensor · data."""
        return EnginesLayout(**self.engines).workers

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
        topology = Topology(tuple(self.sources), tuple(self.targets), Links(**self.links), PoolLinks.of(self.pool))
        ends = lay_out(self.hf, ParallelDims(**self.parallel), self.spec, EnginesLayout(**self.engines), topology)
        ends = ends.only(self.members, self.workers)
        wire = wire_of(self.dtype, self.fp8, ends.engines.tensors, self.float32)
        if not wire.quantised:
            return ends, wire
        policy, engines = with_scales(ends.policy, wire.quantised), with_scales(ends.engines, wire.quantised)
        return Endpoints(ends.parallel, policy, engines, ends.topology), wire

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
