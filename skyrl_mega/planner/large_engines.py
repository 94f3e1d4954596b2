"""Models without an engine inside a node: what does not fit, and the engines and GPUs that would hold the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import engine_data, engine_ranks, expert_parallel
from skyrl_mega.config.pools import engine_view
from skyrl_mega.config.schema import Config
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.engine import check
from skyrl_mega.planner.engine_search import SEVERAL_NODES, several_nodes
from skyrl_mega.planner.engine_weights import engine_bytes
from skyrl_mega.planner.memory import GIB, gpu_bytes, on_cpu

H200_GIB = 139.8
"""GiB reported by CUDA for an H200 of 141 GB."""


def no_engine_error(config: Config, decoder: Decoder) -> UserError | None:
    """Returns an error if no engine within a node can hold the model's weights, whatever `rollout.tensor` is; else
    None. Does not raise the error. None also on CPUs, and for engines of several nodes, which `fit.check` examines."""
    config = engine_view(config)
    node, size = config.cluster.gpus_per_node, gpu_bytes(config)
    if on_cpu(config) or engine_ranks(config.rollout) > node:
        return None
    needed = min(_weights_inside_a_node(config, decoder), default=0)
    if needed <= size:
        return None
    here, gpus = config.cluster.gpu_memory_gib, {f"GPUs of {size / GIB:.1f} GiB": size / GIB}
    if here is None or here < H200_GIB:
        gpus[f"H200s (cluster.gpu_memory_gib={H200_GIB})"] = H200_GIB
    engines = [text for name, gib in gpus.items() if (text := _smallest(config, decoder, name, gib))]
    would = f"that would: {', or '.join(engines)}" if engines else f"of up to {SEVERAL_NODES[-1]} nodes do not either"
    return UserError(
        f"no engine inside a node holds the model, whatever rollout.tensor is: the weights take at least "
        f"{needed / GIB:.1f} GiB of each of {node} GPUs (cluster.gpus_per_node), which have {size / GIB:.1f}",
        key="rollout.tensor",
        value=config.rollout.tensor,
        fix=f"engines {would}; a run refuses engines of several nodes, only --dry-run and --suggest plan them",
    )


def _weights_inside_a_node(config: Config, decoder: Decoder) -> Iterator[int]:
    """Yields the weights of a worker in bytes, for every size of an engine inside a node."""
    cut = EngineCut.of(config.rollout)
    for tensor in range(1, config.cluster.gpus_per_node // cut.data + 1):
        try:
            check(decoder, replace(cut, tensor=tensor))
        except UserError:
            continue
        yield engine_bytes(replace(config, rollout=replace(config.rollout, tensor=tensor)), decoder)


def _smallest(config: Config, decoder: Decoder, gpus: str, gib: float) -> str | None:
    """Returns a description of the smallest engine of whole nodes that fits these GPUs; None if none fits.

    Args:
        config: The settings.
        decoder: The model.
        gpus: Name of the GPUs.
        gib: Memory of a GPU.
    """
    cluster = replace(config.cluster, gpu_memory_gib=gib)
    for nodes in (1, *SEVERAL_NODES):
        for choice in several_nodes(replace(config, cluster=cluster), decoder, nodes):
            rollout = choice.config.rollout
            data = engine_data(rollout)
            options = f" rollout.options.data_parallel_size={data}" if data > 1 else ""
            whole = " rollout.options.enable_expert_parallel=true" if expert_parallel(rollout) else ""
            where = f"on {nodes} nodes" if nodes > 1 else "of a node"
            return f"{engine_ranks(rollout)} {gpus} {where}, rollout.tensor={rollout.tensor}{options}{whole}"
    return None
