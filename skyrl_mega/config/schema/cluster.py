"""Settings of nodes and GPUs: number and speed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.schema.fields import MOST, Refusals, at_least, between, one_of
from skyrl_mega.config.schema.pools import PoolsConfig


@dataclass
class TopologyConfig:
    """Bandwidths of a node's links, for the transfer plan. The defaults describe an H100 node; GB is 10⁹ bytes."""

    nics_per_node: Optional[int] = at_least(1, None)
    """Network cards per node, at most `gpus_per_node`; null assumes a card per GPU."""
    nic_gb_s: float = at_least(0.001, 50.0)
    """GB/s per network card and direction."""
    fabric_gb_s: float = at_least(0.001, 450.0)
    """GB/s between a GPU and the rest of the node, per direction."""
    device_gb_s: float = at_least(0.001, 1500.0)
    """GB/s of a copy within one GPU's memory."""


@dataclass
class RatesConfig:
    """Speed of a GPU and mean text length, for the time estimates of a dry run. Defaults: an H100 SXM."""

    tflops: float = at_least(0.001, 989.0)
    """Dense bfloat16 TFLOP/s per GPU (NVIDIA's data sheet)."""
    tflops_share: float = between(0.01, 1, 0.2)
    """Share of `tflops` reached by a layer's matrix products, without communication."""
    memory_gb_s: float = at_least(0.001, 3350.0)
    """Memory bandwidth per GPU in GB/s (NVIDIA's data sheet)."""
    memory_share: float = between(0.01, 1, 0.4)
    """Share of `memory_gb_s` reached by decoding."""
    host_gb_s: float = at_least(0.001, 50.0)
    """GB/s between host memory and a single GPU, per direction."""
    host_node_gb_s: float = at_least(0.001, 400.0)
    """GB/s between a node's host memory and all GPUs of the node together; the default is about the stream rate of two
    sockets with DDR5."""
    layer_us: float = at_least(0, 100.0)
    """Microseconds of kernel launches and small collectives per layer of the policy, for the forward pass of a
    micro-batch, with experts; a layer of a model without experts counts about three quarters of it."""
    engine_layer_us: float = at_least(0, 100.0)
    """Microseconds of kernel launches and small collectives per layer and step of an engine with CUDA graphs; an eager
    engine takes at least 400."""
    engine_step_us: float = at_least(0, 0.0)
    """Microseconds of an engine's step outside the layers: scheduler, sampling, messages to the workers."""
    trajectory_us: float = at_least(0, 0.0)
    """Microseconds of the driver per trajectory, in which engines wait."""
    sync_s: float = at_least(0, 0.0)
    """Seconds of a weight sync besides its messages: engines pause, and load what has arrived."""
    step_s: float = at_least(0, 0.0)
    """Seconds of a step besides its phases: the driver packs the batch and writes records and metrics."""
    disk_gb_s: float = at_least(0.001, 2.0)
    """GB/s at which all ranks of a node together write a checkpoint."""
    length_share: float = between(0.01, 1, 0.5)
    """Mean length of prompts and responses, as a share of the limits."""


@dataclass
class ClusterConfig:
    """Nodes and GPUs of the run: numbers, memory, speed, and time limits of actors."""

    device: str = one_of("auto", "cpu", "cuda")
    """Device of policy and engines; auto selects CUDA if a GPU is visible."""
    nodes: int = between(1, MOST, 1)
    """Number of nodes of the allocation."""
    gpus_per_node: int = between(1, 1024, 8)
    """GPUs per node (ignored on CPU)."""
    shared: bool = False
    """Colocates policy and engines on the same GPUs. In each phase, both must fit together, given the parts kept on the
    device by `residency.keep`. With `residency.keep=null` both stay on the device all the time, and the policy gets the
    memory outside `rollout.memory_fraction`."""
    gpu_memory_gib: Optional[float] = at_least(1, None)
    """Memory per GPU in GiB; null asks the GPU in a run, and assumes 79.1 in a dry run (an 80 GB H100)."""
    gpu_reserve_gib: float = at_least(0, 3.0)
    """GiB of this memory used by CUDA, NCCL and libraries in a policy process. Allocator fragmentation, and an engine
    worker's memory outside `rollout.memory_fraction`, are counted separately (docs/dry-run.md)."""
    host_memory_gib: Optional[float] = at_least(1, None)
    """Host memory per node in GiB; null skips the check."""
    cores_per_node: Optional[int] = between(1, 4096, None)
    """CPU cores per node. The dry run then reports containers of environments with more cores than a node has. null
    skips the check."""
    numa_nodes: Optional[int] = between(1, 64, None)
    """NUMA nodes per node, assumed to share memory and GPUs (in order) evenly. The dry run then reports sockets with
    more pinned memory than available. null skips the check."""
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    """Links between GPUs and nodes."""
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    """Nodes of another kind, for the engines; the other settings of `cluster` are then those of the policy's nodes."""
    rates: RatesConfig = field(default_factory=RatesConfig)
    """Speeds for the time estimates of a dry run."""
    rates_file: Optional[str] = None
    """File of measured rates, from `python -m benchmarks.gpu` or `python -m benchmarks.bet`; replaces the rates above
    that are at their default. null takes the results for an H100 in `benchmarks/results/gpu`, or those of an H200 that
    hold for both, if present. Times of a CPU are estimated only with such a file."""
    start_timeout_s: float = at_least(1, 600.0)
    """Seconds for all actors to start; also, before that, for Ray to start on this machine or for the nodes of a Ray
    cluster to join. After this time the run ends and the error names the missing actors or nodes."""
    call_timeout_s: float = at_least(1, 3600.0)
    """Time limit per actor call in seconds."""
    preflight: str = one_of("auto", "always", "never")
    """Checks every node before the run and ends the run if a node is unfit; auto does so on CUDA."""
    preflight_timeout_s: float = at_least(1, 60.0)
    """Time limit of each preflight request to a node in seconds."""

    def refusals(self) -> Refusals:
        """Yields refusals of more `topology.nics_per_node` than `gpus_per_node`, of an invalid pool
        (`PoolConfig.refusals`), and of a pool for shared GPUs."""
        nics = self.topology.nics_per_node
        if nics is not None and nics > self.gpus_per_node:
            yield (
                "cluster.topology.nics_per_node",
                f"allowed is at most cluster.gpus_per_node = {self.gpus_per_node}; count NICs of one GPU as one, with "
                "the sum of their nic_gb_s",
            )
        if self.pools.engines is not None:
            yield from self.pools.engines.refusals("cluster.pools.engines")
            if self.shared:
                why = "colocated engines are on the policy's GPUs, and cluster.pools.engines has nodes of its own"
                yield "cluster.shared", why, "give cluster.shared=false, or cluster.pools.engines=null"
