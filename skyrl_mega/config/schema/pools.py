"""Settings of nodes of another kind: engines on other GPUs than the policy's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.gpus import GPUS
from skyrl_mega.config.schema.fields import MOST, Refusals, at_least, between, one_of

_NAME = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL = re.compile(rf"\s*([a-zA-Z0-9.-]{{1,253}}/)?{_NAME}\s*=\s*{_NAME}\s*")
"""Labels `key=value` that Ray accepts for a node; a value such as `!x` or `in(x,y)` would select other nodes."""


@dataclass
class PoolConfig:
    """Nodes of another kind than `cluster.nodes`. null takes the value of `gpu`, or where a GPU decides nothing the
    value of `cluster`."""

    nodes: int = between(1, MOST, 1)
    """Number of nodes of the pool, in addition to `cluster.nodes`."""
    gpus_per_node: int = between(1, 1024, 8)
    """GPUs per node of the pool (ignored on CPU)."""
    gpu: str = one_of(*GPUS)
    """GPU of the pool: decides memory, rates and links by NVIDIA's data sheets (docs/pools.md)."""
    gpu_memory_gib: Optional[float] = at_least(1, None)
    """Memory per GPU in GiB, as CUDA reports it."""
    tflops: Optional[float] = at_least(0.001, None)
    """Dense bfloat16 TFLOP/s per GPU."""
    memory_gb_s: Optional[float] = at_least(0.001, None)
    """Memory bandwidth per GPU in GB/s."""
    nics_per_node: Optional[int] = at_least(1, None)
    """Network cards per node, at most `gpus_per_node`; null assumes a card per GPU."""
    nic_gb_s: Optional[float] = at_least(0.001, None)
    """GB/s per network card and direction; null is `cluster.topology.nic_gb_s`."""
    fabric_gb_s: Optional[float] = at_least(0.001, None)
    """GB/s between a GPU and the rest of the node, per direction."""
    label: Optional[str] = None
    """Label `key=value` of the pool's nodes in Ray (`ray start --labels`); null is Ray's own label of the GPU's type,
    `ray.io/accelerator-type`. Nodes with the label hold engines only, and engines run only there."""

    def refusals(self, key: str) -> Refusals:
        """Yields refusals of more network cards than GPUs, and of a label that no node can have.

        Args:
            key: Name of the pool, such as `cluster.pools.engines`.
        """
        if self.nics_per_node is not None and self.nics_per_node > self.gpus_per_node:
            why = f"allowed is at most {key}.gpus_per_node = {self.gpus_per_node}; count NICs of one GPU as one"
            yield f"{key}.nics_per_node", why
        if self.label is not None and not _LABEL.fullmatch(self.label):
            why = "allowed is key=value of letters, digits and inner -, _ and ., such as pool=engines; or null"
            yield f"{key}.label", why


@dataclass
class PoolsConfig:
    """Kinds of nodes beside the policy's."""

    engines: Optional[PoolConfig] = None
    """Nodes of the engines; null places the engines on the nodes of `cluster.nodes`."""
