"""Containers of a run's environments: the number at once, and the memory and cores of the nodes with the containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_mega.config.containers import container_options
from skyrl_mega.config.derived import max_open_trajectories, on_driver_node, share_of
from skyrl_mega.config.sandboxes import evaluation_trajectories
from skyrl_mega.config.schema import Config
from skyrl_mega.envs.containers import registry

ON_HOSTS = ("podman", "docker", "apptainer")
"""Runtimes with containers on the nodes of the run."""
GIB = 2**30


@dataclass(frozen=True)
class PlannedContainers:
    """Containers of an environment; each open trajectory has at most one."""

    key: str
    """Setting with the options of the containers."""
    runtime: str
    """Name of the runtime."""
    most: int
    """Maximum number of containers at once in the run."""
    nodes: int
    """Number of nodes with containers; 0 if the containers are on other machines."""
    on_node: int
    """Maximum number of containers at once on a node."""
    node_memory_mib: float | None
    """Memory limits of the containers of a node together, in MiB; None without a limit."""
    node_cores: float | None
    """CPU limits of the containers of a node together, in cores; None without a limit."""


def planned_containers(config: Config) -> PlannedContainers | None:
    """Returns the containers of the first environment that runs in containers; None without any. Starts nothing.

    Raises:
        UserError: A runtime is unknown.
    """
    for key, runtime, options in container_options(config.environment.options):
        return _planned(config, key, runtime, options)
    return None


def _planned(config: Config, key: str, runtime: str, options: Mapping[str, Any]) -> PlannedContainers:
    processes, nodes = max(1, config.environment.processes), config.cluster.nodes
    spread = min(nodes, processes) if config.environment.processes and not on_driver_node(config.environment) else 1
    most = max_open_trajectories(config, evaluation_trajectories(config))
    if key.startswith("environment.options.harness"):
        most = min(most, config.environment.workers)
    on_node = min(most, share_of(most, processes, 0) * -(-processes // spread))
    memory, cores = (_option(runtime, options, name) for name in ("memory_mib", "cpus"))
    return PlannedContainers(
        key=key,
        runtime=runtime,
        most=most,
        nodes=spread if runtime in ON_HOSTS else 0,
        on_node=on_node,
        node_memory_mib=None if memory is None else memory * on_node,
        node_cores=None if cores is None else cores * on_node,
    )


def _option(runtime: str, options: Mapping[str, Any], name: str) -> float | None:
    """Returns the value of an option, or the default of the runtime; None for no limit."""
    declared = registry.runtime_class(runtime, "environment.options").OPTIONS.get(name)
    value = options.get(name, declared.default if declared else None)
    return float(value) if value else None


def container_notes(config: Config, used: Sequence[int]) -> Iterator[str]:
    """Yields notes if the limits of the containers exceed the memory or the cores of a node.

    Args:
        config: The settings.
        used: Host memory of the run on each node in bytes, without containers.

    Raises:
        UserError: A runtime is unknown.
    """
    planned = planned_containers(config)
    if planned is None or not planned.nodes:
        return
    fix = "give fewer environment.slots, or spread them over the nodes by environment.processes"
    if config.cluster.host_memory_gib is not None and planned.node_memory_mib is not None:
        left = config.cluster.host_memory_gib - max(used[: planned.nodes]) / GIB
        together = planned.node_memory_mib / 1024
        if together > left:
            yield (
                f"{planned.key}: {planned.on_node} containers at once on a node may take {together:,.0f} GiB together, "
                f"and the run leaves {left:,.0f} GiB of cluster.host_memory_gib; {fix}, or lower memory_mib"
            )
    cores = config.cluster.cores_per_node
    if cores is not None and planned.node_cores is not None and planned.node_cores > cores:
        yield (
            f"{planned.key}: {planned.on_node} containers at once on a node may use {planned.node_cores:g} cores, and "
            f"cluster.cores_per_node = {cores}: commands and tests then take longer; {fix}, or lower cpus"
        )
