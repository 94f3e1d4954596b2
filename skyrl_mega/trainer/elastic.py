"""Engines that join and leave a running run: by the command, with their nodes, or by Ray's autoscaler.

A thread of the driver looks for requests (`engine_requests`) and for nodes with `rollout.elastic.resource`, starts
engines there, and takes the engines of lost nodes out of the fleet. The fleet starts and ends engines in the
background; the next weight sync connects all engines again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

from skyrl_mega.cluster.errors import ClusterError
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorSpec
from skyrl_mega.cluster.placement import Slot
from skyrl_mega.cluster.supervised_group import ALIVE, State
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.engines import check_endpoints
from skyrl_mega.config.derived import engine_ranks
from skyrl_mega.config.pools import label_of
from skyrl_mega.config.refusals import raise_first
from skyrl_mega.config.schema.elastic import ElasticConfig
from skyrl_mega.config.schema.endpoints import KINDS, entries
from skyrl_mega.config.schema.endpoints import refusals as endpoint_refusals
from skyrl_mega.engines.external.actor import ExternalEngine
from skyrl_mega.engines.external.open import specs as external_specs
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import environment
from skyrl_mega.models.registry import architecture
from skyrl_mega.trainer.engine_requests import EngineRequest, Inbox
from skyrl_mega.trainer.start_actors import Setup, engine_spec

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Seconds between two looks for requests and nodes."""
FAILED_STARTS = 3
"""Failed engines on a node after which no further engine starts there by itself."""


class ListedNode(NamedTuple):
    """A live node of the Ray cluster."""

    address: str
    engines: int
    """Number of engines that the node offers: its units of `rollout.elastic.resource`."""
    allowed: bool = True
    """True if engines may run there: the node belongs to `cluster.pools.engines`, or there is no pool."""


Nodes = Mapping[str, ListedNode]
"""Ray's id of a node → the node."""


@dataclass
class NodeEngines:
    """The engines of a node with `rollout.elastic.resource`."""

    ranks: list[int] = field(default_factory=list)
    """Ranks of all engines started on the node, in order."""
    removed: set[int] = field(default_factory=set)
    """Ranks removed by the command: their units of the resource stay unused."""


class ElasticEngines:
    """Adds engines to a fleet and removes engines, in a thread, until `close`.

    Args:
        fleet: The engines of the run.
        settings: `rollout.elastic`.
        inbox: Requests of the command.
        spec_at: Returns how to start an engine of the run in a place.
        gpus: GPUs of an engine; 0 on CPUs.
        nodes: Lists the nodes of the cluster (`listed_nodes`).
        labels: Ray labels of the nodes for engines (`cluster.pools.engines`); None allows every node.
        endpoint_at: Returns how to use a server, an entry of `rollout.endpoints`, as an engine; raises UserError for an
            unusable server.
        say: Prints a line.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: ElasticConfig,
        inbox: Inbox,
        spec_at: Callable[[Slot], ActorSpec],
        gpus: int,
        *,
        nodes: Callable[[], Nodes],
        labels: Mapping[str, str] | None = None,
        endpoint_at: Callable[[Mapping[str, str]], ActorSpec],
        say: Callable[[str], None],
    ) -> None:
        self.fleet, self.settings, self.inbox, self.spec_at, self.gpus = fleet, settings, inbox, spec_at, gpus
        self.nodes, self.endpoint_at = nodes, endpoint_at
        self.labels = labels or {}
        self.first = len(fleet.states)
        """Rank of the first engine that joins."""
        self.by_node: dict[str, NodeEngines] = {}
        """Ray's id of a node with the resource → its engines."""
        self._say_once = cache(say)
        """Prints a line, unless the same line was printed before."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="elastic-engines", daemon=True)

    def start(self) -> None:
        """Handles the present requests and nodes, and starts the thread that does so every `LOOK_EVERY_S` seconds.
        Errors are printed and logged, not raised."""
        self._look()  # the command finds the state from the first step on
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and waits at most ten times `LOOK_EVERY_S` seconds for the thread's present work. The
        engines keep running, but the command no longer lists them."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10 * LOOK_EVERY_S)
        with suppress(OSError):  # a full disk must not replace the run's own end
            self.inbox.write([], self.settings.most)

    @property
    def joined(self) -> list[int]:
        """Ranks of engines that joined the running run and have not left."""
        return [rank for rank in self.fleet.ranks(*ALIVE) if rank >= self.first]

    def _watch(self) -> None:
        while not self._ending.wait(LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        """Handles requests and nodes. An error is reported once, and the next look tries again."""
        try:
            self.fleet.finish_joins()
            for request in self.inbox.take():
                self._handle(request)
            self._follow_nodes()
            self.inbox.write(self._table(), self.settings.most)
        except Exception as error:  # of Ray, of the disk, or a bug: the run does without, and the thread must not end
            self._say_once(f"engines cannot join or leave at present: {type(error).__name__}: {error}")
            log.exception("engines cannot join or leave at present")

    def _handle(self, request: EngineRequest) -> None:
        """Carries out a request and records the answer."""
        try:
            ranks = self._add(request) if request.action == "add" else self._remove(request)
        except (UserError, ClusterError) as error:
            self.inbox.answer(request, False, str(error))
            return
        except Exception as error:  # of Ray, or a bug: the request has an answer, and later requests are carried out
            self.inbox.answer(request, False, f"the run could not do it: {type(error).__name__}: {error}")
            log.exception("a request for engines failed")
            return
        names = ", ".join(f"{self.fleet.group.name}-{rank}" for rank in ranks) or "no engine"
        end = "starts, and serves after the next weight sync" if request.action == "add" else "gets no more requests"
        self.inbox.answer(request, True, f"{names} {end}")

    def _add(self, request: EngineRequest) -> list[int]:
        """Starts the engines of a request and returns the ranks.

        Raises:
            UserError: There would be more engines than allowed, or the node or the endpoint cannot be used.
        """
        room = self.settings.most - len(self.joined)
        if request.count > room:
            why = f"{len(self.joined)} engines have joined; allowed are {self.settings.most} (rollout.elastic.most)"
            raise UserError(why, key="--count", value=request.count)
        if request.endpoint:
            return [self.fleet.add(self.endpoint_at(request.entry))]
        slot = self._slot(self._node_at(request.node) if request.node else None)
        return [self.fleet.add(self.spec_at(slot)) for _ in range(request.count)]

    def _remove(self, request: EngineRequest) -> list[int]:
        """Takes the engines of a request, all or none, out of the fleet and returns the ranks.

        Raises:
            UserError: An engine is unknown, or the last one, or no engine runs on the node.
        """
        where, ranks = self.fleet.group.where, request.engines
        if request.node:
            ranks = tuple(rank for rank in self.fleet.ranks(*ALIVE) if where[rank].address == request.node)
            if not ranks:
                raise UserError("no engine runs there", key="--node", value=request.node)
        grace_s = self.settings.grace_s if request.grace_s is None else request.grace_s
        self.fleet.check_leave(ranks)
        for rank in ranks:
            # At least a moment: without any the fleet would not protect the last engine.
            self.fleet.leave(rank, "removed by the command", max(0.001, grace_s))
            for engines in self.by_node.values():
                if rank in engines.ranks:
                    engines.removed.add(rank)
        return [*ranks]

    def _node_at(self, address: str) -> str:
        """Returns Ray's id of the node with an address, for a request."""
        nodes = {name: node for name, node in self.nodes().items() if node.allowed}
        found = [name for name, node in nodes.items() if node.address == address]
        if not found:
            known = ", ".join(sorted({node.address for node in nodes.values()})) or "none at present"
            why = f"the Ray cluster has no such node{self._labelled}; allowed is one of {known}"
            raise UserError(why, key="--node", value=address)
        return found[0]

    @property
    def _labelled(self) -> str:
        """A phrase with the labels of the nodes for engines; "" if every node is allowed."""
        labels = ", ".join(f"{key}={value}" for key, value in self.labels.items())
        return f" with the label {labels} of cluster.pools.engines" if labels else ""

    def _follow_nodes(self) -> None:
        """Starts engines on nodes with the resource, and ends the engines of lost nodes."""
        nodes, states = self.nodes(), self.fleet.states
        for rank in [rank for rank in self.fleet.ranks(*ALIVE) if rank in self.fleet.joined]:
            node = self.fleet.group.where[rank].node
            if node and node not in nodes:
                self.fleet.leave(rank, "its node left the cluster", 0.0)
        for node, (address, offered, allowed) in nodes.items():
            if not allowed:
                if offered:
                    self._say_once(f"no engine starts on {address}: it is no node{self._labelled}")
                continue
            engines = self.by_node.setdefault(node, NodeEngines())
            present = [rank for rank in engines.ranks if states[rank] in (*ALIVE, State.LEAVING)]
            failed = len({*engines.ranks} - {*present} - engines.removed)
            if failed >= FAILED_STARTS:
                self._say_once(f"no further engine starts on {address}: {failed} engines failed there")
                continue
            room = self.settings.most - len(self.joined)
            for _ in range(min(room, offered - len({*present} | engines.removed))):
                engines.ranks.append(self.fleet.add(self.spec_at(self._slot(node, self.settings.resource))))

    def _slot(self, node: str | None, resource: str | None = None) -> Slot:
        """Returns a place on a node, or on any node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = "DEFAULT" if node is None else NodeAffinitySchedulingStrategy(node, soft=False)
        resources = {"CPU": 0.0, "GPU": float(self.gpus)} if self.gpus else {}
        labels = self.labels if node is None else {}
        return Slot(strategy, {**resources, **({resource: 1.0} if resource else {})}, labels=labels)

    def _table(self) -> list[Mapping[str, Any]]:
        """Returns rank, state and place of every engine, for the command."""
        serving, states = {*self.fleet.serving}, [*self.fleet.states]
        words = {State.UP: "waits for a sync", State.STARTING: "restarting"}
        return [
            {
                "rank": rank,
                "state": "serving" if rank in serving else words.get(state, state.value),
                "node": self.fleet.group.where[rank].address,
                "joined": rank >= self.first,
            }
            for rank, state in enumerate(states)
        ]


def refuse_private_cluster(settings: ElasticConfig) -> None:
    """Raises a UserError if engines should join with their nodes and the run starts a Ray cluster of its own, which no
    node can join."""
    if settings.resource is not None and not os.environ.get("RAY_ADDRESS"):
        raise UserError(
            "without RAY_ADDRESS the run starts a Ray cluster that no node can join",
            key="rollout.elastic.resource",
            value=settings.resource,
            fix="start Ray (docs/elastic.md) and set RAY_ADDRESS, or leave the setting out",
        )


@contextmanager
def elastic_engines(setup: Setup, fleet: Fleet) -> Iterator[None]:
    """Lets engines join and leave a run inside the `with` block, by `rollout.elastic`; does nothing if its `most` is 0.
    If its `autoscale` is true, also asks Ray's autoscaler for nodes, and withdraws the request after the block. Engines
    that joined keep running after the block.

    Args:
        setup: The run's settings, model and device.
        fleet: The engines of the run.

    Raises:
        UserError: The engines cannot use the model's number format.
    """
    config, settings = setup.config, setup.config.rollout.elastic
    if not settings.most:
        yield
        return
    spec = engine_spec(setup)
    variables = environment(spec)
    gpus = engine_ranks(config.rollout) if setup.device == "cuda" else 0
    labels = dict([label_of(config.cluster.pools.engines)]) if config.cluster.pools.engines else {}
    engines = ElasticEngines(
        fleet,
        settings,
        Inbox(setup.folder, setup.say),
        lambda slot: ActorSpec(VllmEngine, {"spec": spec}, slot, variables),
        gpus,
        nodes=partial(listed_nodes, settings.resource, labels),
        labels=labels,
        endpoint_at=partial(endpoint_spec, setup),
        say=setup.say,
    )
    if settings.autoscale and settings.resource is not None:
        ask_autoscaler(settings.resource, settings.most, gpus, labels)
    engines.start()
    try:
        yield
    finally:
        engines.close()
        if settings.autoscale and settings.resource is not None:
            ask_autoscaler(settings.resource, 0, gpus)


def endpoint_spec(setup: Setup, entry: Mapping[str, str]) -> ActorSpec:
    """Returns the definition of an actor that uses a server as an engine, as for an entry of `rollout.endpoints`. Asks
    the server nothing.

    Args:
        setup: The run's settings and model.
        entry: The server; a class of the user must be one of `rollout.endpoints`, because a file in the run's folder
            must not choose the code that the run executes.

    Raises:
        UserError: The entry is not allowed, or the environment variable of the API key is not set.
    """
    rollout = setup.config.rollout
    raise_first(setup.config, endpoint_refusals([entry]))
    kind = entry.get("kind", KINDS[0])
    if kind not in KINDS and kind not in [known.kind for known in entries(rollout.endpoints)]:
        why = f"allowed is {', '.join(KINDS)}, or a class that rollout.endpoints of the run names"
        raise UserError(why, key="--kind", value=kind)
    config = replace(setup.config, rollout=replace(rollout, endpoints=[{**entry}]))
    check_endpoints(config)
    decoder = architecture(setup.hf).describe(setup.hf)
    (spec,) = external_specs(config, decoder.vocab, decoder.experts is not None)
    return ActorSpec(ExternalEngine, {"spec": spec})


def listed_nodes(resource: str | None, labels: Mapping[str, str]) -> Nodes:
    """Returns Ray's node id → address, number of engines offered and permission to run engines (`ListedNode`), of the
    live nodes of the Ray cluster.

    Args:
        resource: Ray resource whose units are the engines that a node offers; None for no engine.
        labels: Ray labels of the nodes where engines may run; {} allows every node.
    """
    import ray

    return {
        node["NodeID"]: ListedNode(
            node["NodeManagerAddress"],
            int(node["Resources"].get(resource, 0)) if resource else 0,
            labels.items() <= node.get("Labels", {}).items(),
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def ask_autoscaler(resource: str, engines: int, gpus: int, labels: Mapping[str, str] | None = None) -> None:
    """Asks Ray's autoscaler for nodes with room for a number of engines. The request replaces an earlier one. A cluster
    without an autoscaler ignores the request.

    Args:
        resource: Ray resource of which each engine needs a unit.
        engines: Number of engines; 0 withdraws the earlier request.
        gpus: GPUs of an engine; 0 on CPUs.
        labels: Ray labels of these nodes; None or {} asks for any nodes.
    """
    from ray.autoscaler.sdk import request_resources

    bundle = {resource: 1.0} | ({"GPU": gpus} if gpus else {})
    request_resources(bundles=[bundle] * engines, bundle_label_selectors=[dict(labels)] * engines if labels else None)
