"""Reservation of nodes and GPUs for actors, before the first actor starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
    """A place for an actor: scheduling strategy, resources and environment variables."""

    strategy: Any
    """Ray scheduling strategy for this place."""
    resources: dict[str, float]
    """Reserved resources, `CPU`, `GPU` or the name of another Ray resource → number; {} reserves nothing."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of this place."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray labels of the node, if the strategy leaves the node to Ray."""

    def options(self) -> dict[str, Any]:
        """Returns the arguments of Ray's `.options()` that start an actor in this place: `num_cpus`, `num_gpus`,
        `resources` (all others), `scheduling_strategy`, and `label_selector` if the place has labels."""
        return {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "resources": {name: count for name, count in self.resources.items() if name not in ("CPU", "GPU")},
            "scheduling_strategy": self.strategy,
            **({"label_selector": dict(self.labels)} if self.labels else {}),
        }


@dataclass(frozen=True)
class Placement:
    """The places of a group of actors, in order."""

    slots: tuple[Slot, ...]
    """A place per actor."""
    groups: tuple[PlacementGroup, ...] = ()
    """Ray placement groups with the reservations."""

    def release(self) -> None:
        """Removes the reservations; Ray kills any actors still there."""
        from ray.util import remove_placement_group

        for group in self.groups:
            remove_placement_group(group)


def reserve(
    actors: int,
    *,
    gpus: int = 0,
    together: Sequence[int] | None = None,
    label: tuple[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Placement:
    """Reserves a place per actor in Ray, waits for the reservation and returns the places. The caller releases the
    places (`Placement.release`).

    Args:
        actors: Number of actors.
        gpus: GPUs per actor. A vLLM engine takes a whole tensor parallel group, so the group stays on a node.
        together: Numbers of consecutive actors on the same node, node by node, `actors` in total; None lets Ray pack
            the actors.
        label: Key and value of a Ray label of the nodes; a value `!x` stands for all nodes without the value x. None
            allows every node.
        timeout_s: Seconds until everything is reserved.

    Raises:
        ClusterError: The cluster lacks the resources, or the reservation took longer than `timeout_s`; nothing stays
            reserved.
    """
    import ray
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle: dict[str, float] = {"CPU": 1.0, "GPU": float(gpus)} if gpus else {"CPU": 1.0}
    counts = [actors] if together is None else together
    selector = {} if label is None else {label[0]: label[1]}
    strategy = "PACK" if together is None else "STRICT_PACK"
    groups = [
        placement_group([bundle] * n, strategy=strategy, bundle_label_selector=[selector] * n if selector else None)
        for n in counts
    ]
    places = [(group, i) for group, n in zip(groups, counts, strict=True) for i in range(n)]
    slots = (Slot(PlacementGroupSchedulingStrategy(group, i), bundle) for group, i in places)
    placement = Placement(tuple(slots), tuple(groups))
    ready, waiting = ray.wait([g.ready() for g in groups], num_returns=len(groups), timeout=timeout_s)
    if waiting:
        placement.release()
        total = ray.cluster_resources()
        raise ClusterError(
            f"Ray has no free place for {actors} processes of {_text(bundle)} each"
            f"{f', {max(together)} to a node' if together else ''}"
            f"{f', on nodes with the label {label[0]}={label[1]}' if label else ''}: "
            f"{len(ready)} of {len(groups)} groups reserved after {timeout_s:g} s; "
            f"the cluster has {_text(total)}, in use or free; "
            "end other Ray jobs, give fewer ranks or engines, or add nodes"
        )
    return placement


def by_gpu(locations: Sequence[Location]) -> list[int]:
    """Returns the rank order of actors with GPUs, for each rank the index of its actor in `locations`: node by node,
    nodes with the most actors first, then by address and GPU.

    Rank r is then on GPU r mod 8 of a node, and traffic between equal GPU indices stays on NICs of the same rail. Ray
    itself assigns the GPUs of a node in any order. Without GPUs for all actors the order is unchanged.
    """
    if not locations or not all(actor.gpus for actor in locations):
        return list(range(len(locations)))
    counts = Counter(actor.node for actor in locations)

    def key(index: int) -> tuple[Any, ...]:
        actor = locations[index]
        gpus = [(0, int(gpu), "") if gpu.isdigit() else (1, 0, gpu) for gpu in actor.gpus]
        return -counts[actor.node], *by_address(actor.address, actor.node), gpus

    return sorted(range(len(locations)), key=key)


def on_gpus_of(where: Sequence[Location], actors: int, *, gpus: int) -> Placement:
    """Returns places for actors on the GPUs of other actors: actor a shares the GPUs of ranks `[a · gpus, (a + 1) ·
    gpus)`.

    Args:
        where: The other actors by rank, each with a single GPU; at least `actors * gpus`.
        actors: Number of new actors.
        gpus: GPUs per new actor, all in the same node.

    Raises:
        ClusterError: There are too few ranks, the ranks for an actor are on different nodes, or a rank owns no GPU or
            several.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    slots = []
    for first in range(0, actors * gpus, gpus):
        ranks = where[first : first + gpus]
        nodes = {rank.node for rank in ranks}
        if len(nodes) != 1 or [len(rank.gpus) for rank in ranks] != [1] * gpus:
            raise ClusterError(
                f"ranks {first} to {first + gpus - 1} have {sum(len(rank.gpus) for rank in ranks)} GPUs in "
                f"{len(nodes)} nodes, but the engine on their GPUs needs one GPU from each rank, all in one node; "
                "set cluster.gpus_per_node to the GPUs that Ray sees on each node"
            )
        # Otherwise Ray hides every GPU from an actor that reserves none.
        env = {
            "CUDA_VISIBLE_DEVICES": ",".join(rank.gpus[0] for rank in ranks),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        slots.append(Slot(NodeAffinitySchedulingStrategy(nodes.pop(), soft=False), {}, env))
    return Placement(tuple(slots))


def spread(units: Sequence[int], nodes: Sequence[T]) -> list[T]:
    """Returns the node of every actor if nothing is reserved (on CPUs). Units go to the nodes in order, and every node
    gets the same number of units up to rounding; with fewer units than nodes, the first nodes get one each.

    Args:
        units: Number of actors of each unit; the actors of a unit (a tensor parallel group) stay together on a node.
        nodes: Result of `nodes.worker_nodes`, or node numbers.
    """
    return [nodes[i * len(nodes) // max(len(units), len(nodes))] for i, n in enumerate(units) for _ in range(n)]


def on_nodes(nodes: Sequence[Node], elsewhere: bool = False) -> Placement:
    """Returns a place on each node without reserving resources. With `elsewhere`, Ray may replace a lost node by
    another."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return Placement(tuple(Slot(NodeAffinitySchedulingStrategy(node.id, soft=elsewhere), {}) for node in nodes))


def _text(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources[k]:g} {k}" for k in ("CPU", "GPU") if k in resources) or "nothing"
