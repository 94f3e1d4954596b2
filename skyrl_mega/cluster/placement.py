"""Which node and GPU each actor gets, reserved before the first actor starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_mega.cluster.actor_process import Location
from skyrl_mega.cluster.errors import ClusterError
from skyrl_mega.cluster.nodes import Node, by_address

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """A place for one actor."""

    strategy: Any
    """Ray's scheduling strategy that leads there."""
    resources: dict[str, float]
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of this place."""

    def options(self) -> dict[str, Any]:
        """Ray's actor options for this place."""
        return {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "scheduling_strategy": self.strategy,
        }


@dataclass(frozen=True)
class Placement:
    """Slots, in order."""

    slots: tuple[Slot, ...]
    groups: tuple[PlacementGroup, ...] = ()
    """What is reserved for them."""

    def release(self) -> None:
        """Gives everything back; actors in it are killed by Ray."""
        from ray.util import remove_placement_group

        for group in self.groups:
            remove_placement_group(group)


def reserve(actors: int, *, gpus: int = 0, together: Sequence[int] | None = None, timeout_s: float = 60.0) -> Placement:
    """Reserves one place per actor.

    Args:
        actors: How many.
        gpus: GPUs of one actor; a vLLM engine takes its whole tensor parallel group, which so never leaves a node.
        together: How many consecutive actors share a node, node by node; None lets Ray pack them.
        timeout_s: Seconds until everything is reserved.

    Raises:
        ClusterError: The cluster does not have it, or not in time.
    """
    import ray
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle: dict[str, float] = {"CPU": 1.0, "GPU": float(gpus)} if gpus else {"CPU": 1.0}
    counts = [actors] if together is None else together
    groups = [placement_group([bundle] * n, strategy="PACK" if together is None else "STRICT_PACK") for n in counts]
    places = [(group, i) for group, n in zip(groups, counts, strict=True) for i in range(n)]
    slots = (Slot(PlacementGroupSchedulingStrategy(group, i), bundle) for group, i in places)
    placement = Placement(tuple(slots), tuple(groups))
    ready, waiting = ray.wait([g.ready() for g in groups], num_returns=len(groups), timeout=timeout_s)
    if waiting:
        placement.release()
        total = ray.cluster_resources()
        raise ClusterError(
            f"no room for {actors} actors of {_text(bundle)}{f', {max(together)} to a node' if together else ''}: "
            f"{len(ready)} of {len(groups)} groups reserved after {timeout_s:g} s; "
            f"the cluster has {_text(total)} in all"
        )
    return placement


def by_gpu(where: Sequence[Location]) -> list[int]:
    """In which order actors take their ranks, where Ray has dealt GPUs to all of them: node by node, the nodes with
    most of them first, then by address; within a node by GPU.

    So rank r sits on GPU r mod 8 of its node everywhere, and what ranks of different nodes exchange stays between NICs
    of one rail. Ray itself deals the GPUs of a node in any order.
    """
    if not where or not all(actor.gpus for actor in where):
        return list(range(len(where)))
    counts = Counter(actor.node for actor in where)

    def key(index: int) -> tuple[Any, ...]:
        actor = where[index]
        gpus = [(0, int(gpu), "") if gpu.isdigit() else (1, 0, gpu) for gpu in actor.gpus]
        return -counts[actor.node], *by_address(actor.address, actor.node), gpus

    return sorted(range(len(where)), key=key)


def beside(where: Sequence[Location], actors: int, *, gpus: int) -> Placement:
    """Places for actors on the GPUs of others: actor a has those of ranks `[a · gpus, (a + 1) · gpus)`.

    Args:
        where: The other actors by rank, each with one GPU.
        actors: How many.
        gpus: GPUs of one actor; all of them lie in one node.

    Raises:
        ClusterError: The ranks of one actor lie in two nodes, or have no GPU each.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    slots = []
    for first in range(0, actors * gpus, gpus):
        ranks = where[first : first + gpus]
        nodes = {rank.node for rank in ranks}
        if len(nodes) != 1 or [len(rank.gpus) for rank in ranks] != [1] * gpus:
            raise ClusterError(
                f"ranks {first} to {first + gpus - 1} were given {sum(len(rank.gpus) for rank in ranks)} GPUs in "
                f"{len(nodes)} nodes; what shares their GPUs needs {gpus} in one node"
            )
        # Ray would else hide every GPU from an actor that reserves none.
        env = {
            "CUDA_VISIBLE_DEVICES": ",".join(rank.gpus[0] for rank in ranks),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        slots.append(Slot(NodeAffinitySchedulingStrategy(nodes.pop(), soft=False), {}, env))
    return Placement(tuple(slots))


def spread(units: Sequence[int], nodes: Sequence[T]) -> list[T]:
    """The node of every actor, where nothing is reserved (on CPUs): an equal share of the units for each node, in
    order.

    Args:
        units: Actors of each unit; those of one unit (a tensor parallel group) stay on one node.
        nodes: From `nodes.worker_nodes`, or their numbers.
    """
    return [nodes[i * len(nodes) // max(len(units), len(nodes))] for i, n in enumerate(units) for _ in range(n)]


def on_nodes(nodes: Sequence[Node], elsewhere: bool = False) -> Placement:
    """One place on each of these; it claims nothing. `elsewhere`: on any other where one is gone."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return Placement(tuple(Slot(NodeAffinitySchedulingStrategy(node.id, soft=elsewhere), {}) for node in nodes))


def _text(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources[k]:g} {k}" for k in ("CPU", "GPU") if k in resources) or "nothing"
