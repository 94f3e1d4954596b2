"""Nodes and GPUs: how many there are, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.schema.fields import MOST, at_least, between, one_of


@dataclass
class TopologyConfig:
    """How fast a node's links are, for the transfer plan. The defaults are an H100 node's; GB is 10⁹ bytes."""

    nics_per_node: Optional[int] = at_least(1, None)
    """Network cards of one node, at most its GPUs; None counts one for each GPU."""
    nic_gb_s: float = at_least(0.001, 50.0)
    """GB/s of one network card, each way."""
    fabric_gb_s: float = at_least(0.001, 450.0)
    """GB/s between one GPU and the others of its node, each way."""
    device_gb_s: float = at_least(0.001, 1500.0)
    """GB/s of a copy within one GPU's memory."""


@dataclass
class RatesConfig:
    """How fast a GPU is, and how long texts become: what a dry run estimates times from. Defaults: an H100 SXM."""

    tflops: float = at_least(0.001, 989.0)
    """Dense bfloat16 TFLOP/s of one GPU (NVIDIA's data sheet)."""
    tflops_share: float = between(0.01, 1, 0.2)
    """Share of `tflops` that a layer's matrix products reach, communication not counted."""
    memory_gb_s: float = at_least(0.001, 3350.0)
    """GB/s of one GPU's memory (NVIDIA's data sheet)."""
    memory_share: float = between(0.01, 1, 0.4)
    """Share of `memory_gb_s` that decoding reaches."""
    host_gb_s: float = at_least(0.001, 50.0)
    """GB/s between host memory and one GPU, each way."""
    host_node_gb_s: float = at_least(0.001, 400.0)
    """GB/s between a node's host memory and all of its GPUs together: two sockets of DDR5 stream about so much."""
    layer_us: float = at_least(0, 100.0)
    """Microseconds of launches and small collectives in one layer of one forward pass, of the policy and of engines
    with CUDA graphs; an eager engine takes at least 400."""
    length_share: float = between(0.01, 1, 0.5)
    """Mean length of prompts and responses over their limits."""


@dataclass
class ClusterConfig:
    """What the run may use."""

    device: str = one_of("auto", "cpu", "cuda")
    """Where policy and engines compute; auto takes CUDA when a device is visible."""
    nodes: int = between(1, MOST, 1)
    """Nodes of the allocation."""
    gpus_per_node: int = between(1, 1024, 8)
    """GPUs of one node (ignored on CPU)."""
    shared: bool = False
    """Policy and engines share the GPUs instead of having some each. In each phase, both must fit with what
    `residency.keep` leaves there; where it is null, both stay all the time, and what `rollout.memory_fraction` leaves
    is the policy's."""
    gpu_memory_gib: Optional[float] = at_least(1, None)
    """Memory of one GPU; None asks the GPU in a run, and is 79.1 in a dry run, what an H100 of 80 GB has."""
    gpu_reserve_gib: float = at_least(0, 3.0)
    """What CUDA, NCCL and libraries take of it in a policy process. What its allocator cannot use, and what an engine
    worker takes beside its share, are counted apart (docs/dry-run.md)."""
    host_memory_gib: Optional[float] = at_least(1, None)
    """Memory of one node; None does not check it."""
    numa_nodes: Optional[int] = between(1, 64, None)
    """NUMA nodes of one node, among which its memory and, in their order, its GPUs are dealt out evenly; a dry run then
    also says where more is pinned beside a socket than it has. None does not check it."""
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    """Links between GPUs and nodes."""
    rates: RatesConfig = field(default_factory=RatesConfig)
    """What a dry run's times are estimated from."""
    start_timeout_s: float = at_least(1, 600.0)
    """Seconds for all actors to be up, and before that for Ray to start on this machine, or for the nodes of a Ray
    cluster to be there; past it the run ends and names who did not answer, or did not come."""
    call_timeout_s: float = at_least(1, 3600.0)
    """Seconds that one call of an actor may take."""
    preflight: str = one_of("auto", "always", "never")
    """Looks at every node before the run, and ends it where one is not fit; auto does so on CUDA."""
    preflight_timeout_s: float = at_least(1, 60.0)
    """Seconds that one question of the preflight to a node may take."""
