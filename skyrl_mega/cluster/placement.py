"""Which node and GPU each actor gets, reserved before the first actor starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_mega.cluster.errors import ClusterError
from skyrl_mega.cluster.host import Whereabouts

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True)
class Slot:
    """A reserved place for one actor: bundle `index` of `group`, with these resources."""

    group: PlacementGroup
    index: int
    resources: dict[str, float]

    def options(self) -> dict[str, Any]:
        """Ray's actor options for this place."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.index),
        }

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of this place."""
        return {}


@dataclass(frozen=True)
class Beside:
    """A place for one actor on GPUs that other actors of a node have: nothing is reserved for it."""

    node: str
    """Ray's id of the node."""
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them."""

    def options(self) -> dict[str, Any]:
        """Ray's actor options for this place."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=False),
        }

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of this place. Ray would else hide every GPU from an actor that reserves none."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True)
class Placement:
    """Slots by rank."""

    slots: tuple[Slot | Beside, ...]

    def release(self) -> None:
        """Gives everything back; actors in it are killed by Ray."""
        from ray.util import remove_placement_group

        for group in {slot.group.id: slot.group for slot in self.slots if isinstance(slot, Slot)}.values():
            remove_placement_group(group)


def reserve(actors: int, *, gpus: int = 0, per_node: int | None = None, timeout_s: float = 60.0) -> Placement:
    """Reserves one place per actor.

    Args:
        actors: How many.
        gpus: GPUs of one actor; a vLLM engine takes its whole tensor parallel group, which so never leaves a node.
        per_node: So many consecutive ranks share one node (a policy's GPUs per node); None lets Ray pack them.
        timeout_s: Seconds until everything is reserved.

    Raises:
        ClusterError: The cluster does not have it, or not in time.
    """
    import ray
    from ray.util import placement_group

    bundle: dict[str, float] = {"CPU": 1.0, "GPU": float(gpus)} if gpus else {"CPU": 1.0}
    size = per_node or actors
    counts = [min(size, actors - first) for first in range(0, actors, size)]
    groups = [placement_group([bundle] * n, strategy="STRICT_PACK" if per_node else "PACK") for n in counts]
    placement = Placement(
        tuple(Slot(group, i, bundle) for group, n in zip(groups, counts, strict=True) for i in range(n))
    )
    ready, waiting = ray.wait([g.ready() for g in groups], num_returns=len(groups), timeout=timeout_s)
    if waiting:
        placement.release()
        total = ray.cluster_resources()
        raise ClusterError(
            f"no room for {actors} actors of {_text(bundle)}{f', {per_node} to a node' if per_node else ''}: "
            f"{len(ready)} of {len(groups)} groups reserved after {timeout_s:g} s; "
            f"the cluster has {_text(total)} in all"
        )
    return placement


def beside(where: Sequence[Whereabouts], actors: int, *, gpus: int) -> Placement:
    """Places for actors on the GPUs of others: actor a has those of ranks `[a · gpus, (a + 1) · gpus)`.

    Args:
        where: The other actors by rank, each with one GPU.
        actors: How many.
        gpus: GPUs of one actor; all of them lie in one node.

    Raises:
        ClusterError: The ranks of one actor lie in two nodes, or have no GPU each.
    """
    slots = []
    for first in range(0, actors * gpus, gpus):
        ranks = where[first : first + gpus]
        nodes = {rank.node for rank in ranks}
        if len(nodes) != 1 or [len(rank.gpus) for rank in ranks] != [1] * gpus:
            raise ClusterError(
                f"ranks {first} to {first + gpus - 1} were given {sum(len(rank.gpus) for rank in ranks)} GPUs in "
                f"{len(nodes)} nodes; what shares their GPUs needs {gpus} in one node"
            )
        slots.append(Beside(nodes.pop(), tuple(rank.gpus[0] for rank in ranks)))
    return Placement(tuple(slots))


def _text(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources[k]:g} {k}" for k in ("CPU", "GPU") if k in resources) or "nothing"
