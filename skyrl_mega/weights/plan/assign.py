"""The choice of senders and receivers: nearest holders first, otherwise with evenly loaded links.

Three questions, each answered for whole classes of parts at once (`TransferClasses`):

- A node with a holder of a part never receives the part from another node. A receiver there takes the part from its
  own device, else from another device of the node; devices of a node send equal loads.
- Any other node receives the part once, from some holder; senders are chosen for equal loads on the sending NICs.
- The first receiver in such a node forwards the part; first receivers are chosen for equal loads on the receiving
  NICs.

Each question divides bytes among links, solved in whole bytes by filling the lowest link first, class by class, until
nothing moves. All arithmetic is in integers and in a fixed order, so every process computes the same answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_mega.weights.plan.intersect import Ints, TransferClasses, unique_rows
from skyrl_mega.weights.plan.topology import Topology

SWEEPS = 50
"""Maximum number of filling rounds; layouts in use settle in three to ten."""
SETTLED = 1e-4
"""Filling ends when a round moves less than this share of all bytes."""


@dataclass(frozen=True)
class Route:
    """A transfer of `parts` from rank `source` of the source layout to target rank `receivers[0]`.

    The first receiver forwards the same bytes to `receivers[1:]`, on the same node.
    """

    source: int
    receivers: tuple[int, ...]
    parts: Ints
    """Ascending indices into the plan's parts."""


def choose(demand: TransferClasses, topology: Topology) -> tuple[Route, ...]:
    """Returns routes (a source, its receivers and their parts) that deliver every part once to every rank that wants
    the part, sorted by source and receivers.

    Args:
        demand: The parts, their holders and their receivers.
        topology: Devices, nodes and NICs of the ranks.
    """
    classes = _Classes(demand, topology)
    routes = _RouteBuilder(len(demand.parts))
    for k, receiver, source in classes.own_device():
        routes.add(source, (receiver,), classes.parts[k])
    _within_nodes(classes, routes)
    _between_nodes(classes, routes)
    return routes.sorted()


class _Classes:
    """The classes of a demand: rank lists by node, and parts."""

    def __init__(self, demand: TransferClasses, topology: Topology) -> None:
        self.topology = topology
        self.source_device, self.target_device = np.array(topology.sources), np.array(topology.targets)
        self.source_node, self.target_node = (topology.node(d) for d in (self.source_device, self.target_device))
        order = np.argsort(demand.kind, kind="stable")
        ends = np.cumsum(np.bincount(demand.kind, minlength=len(demand.holders)))
        self.parts = np.split(order, ends[:-1]) if len(ends) else []
        self.nbytes = [demand.parts.nbytes[parts] for parts in self.parts]
        # Holder sets are few; classes with the same holders share a division of bytes among senders.
        sets, self.holder_set = unique_rows(demand.holders)
        self.holders = [np.flatnonzero(row) for row in sets]
        self.holder_nodes = [frozenset(self.source_node[ranks].tolist()) for ranks in self.holders]
        takers, self.taker_set = unique_rows(demand.takers)
        self.takers = [self._by_node(np.flatnonzero(row)) for row in takers]

    def _by_node(self, ranks: Ints) -> dict[int, Ints]:
        nodes = self.target_node[ranks]
        return {int(node): ranks[nodes == node] for node in np.unique(nodes)}

    def wants(self) -> Iterator[tuple[int, int, Ints, bool]]:
        """Yields (class, node, wanting ranks of the node, True if a rank of the node holds the class)."""
        for k, (h, t) in enumerate(zip(self.holder_set.tolist(), self.taker_set.tolist(), strict=True)):
            for node, ranks in self.takers[t].items():
                yield k, node, ranks, node in self.holder_nodes[h]

    def own_device(self) -> Iterator[tuple[int, int, int]]:
        """Yields (class, receiver, holder on the receiver's device) for every such receiver."""
        for k, _, ranks, near in self.wants():
            if near:
                holders = self.holders[self.holder_set[k]]
                at = {int(device): int(rank) for rank, device in zip(holders, self.source_device[holders], strict=True)}
                for rank in ranks.tolist():
                    if (source := at.get(int(self.target_device[rank]))) is not None:
                        yield k, rank, source


class _RouteBuilder:
    """Deliveries chosen so far. Deliveries with the same source and receivers form a route."""

    def __init__(self, parts: int) -> None:
        self.numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self.route: list[Ints] = []
        self.part: list[Ints] = []
        self.total = parts

    def number(self, source: int, receivers: tuple[int, ...]) -> int:
        return self.numbers.setdefault((source, receivers), len(self.numbers))

    def add(self, source: int, receivers: tuple[int, ...], parts: Ints) -> None:
        self.route.append(np.full(len(parts), self.number(source, receivers)))
        self.part.append(parts)

    def sorted(self) -> tuple[Route, ...]:
        if not self.part:
            return ()
        key = np.sort(np.concatenate(self.route) * self.total + np.concatenate(self.part))
        route, part = np.divmod(key, self.total)
        pieces = np.split(part, np.flatnonzero(np.diff(route)) + 1)
        return tuple(Route(*ends, pieces[i]) for ends, i in sorted(self.numbers.items()))


def _within_nodes(classes: _Classes, routes: _RouteBuilder) -> None:
    """Chooses senders for receivers with a holder on another device of the node."""
    lines: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for k, node, ranks, near in classes.wants():
        if near:
            h = int(classes.holder_set[k])
            on = set(classes.source_device[classes.holders[h]].tolist())
            lines[h, node] += [(rank, k) for rank in ranks.tolist() if int(classes.target_device[rank]) not in on]
    keys = [key for key, line in sorted(lines.items()) if line]
    options = [classes.holders[h][classes.source_node[classes.holders[h]] == node] for h, node in keys]
    weights = [np.concatenate([classes.nbytes[k] for _, k in sorted(lines[key])]) for key in keys]
    for key, senders in zip(keys, distribute(options, weights, classes.source_device), strict=True):
        at = 0
        for receiver, k in sorted(lines[key]):
            parts = classes.parts[k]
            chosen, at = senders[at : at + len(parts)], at + len(parts)
            for source in np.unique(chosen).tolist():
                routes.add(source, (receiver,), parts[chosen == source])


def _between_nodes(classes: _Classes, routes: _RouteBuilder) -> None:
    """Chooses, independently, a sender and a first receiver for nodes without a holder."""
    deliveries = [(k, node, ranks) for k, node, ranks, near in classes.wants() if not near]
    # A holder's bytes are ordered node by node: few senders serve a node, and all nodes are served at once.
    send: dict[int, list[int]] = defaultdict(list)
    take: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for i, (k, node, ranks) in enumerate(deliveries):
        send[int(classes.holder_set[k])].append(i)
        take[node, ranks.tobytes()].append(i)
    for line in send.values():
        line.sort(key=lambda i: (deliveries[i][1], deliveries[i][0]))

    def chosen_ranks(lines: Sequence[list[int]], options: Sequence[Ints], link: Ints) -> list[Ints]:
        """Returns, for every delivery, the rank chosen for each part."""
        weights = [np.concatenate([classes.nbytes[deliveries[i][0]] for i in line]) for line in lines]
        ranks_by_delivery: list[Ints] = [np.zeros(0, np.int64)] * len(deliveries)
        for line, ranks_of_line in zip(lines, distribute(options, weights, link), strict=True):
            ends = np.cumsum([len(classes.parts[deliveries[i][0]]) for i in line])
            for i, ranks in zip(line, np.split(ranks_of_line, ends[:-1]), strict=True):
                ranks_by_delivery[i] = ranks
        return ranks_by_delivery

    topology = classes.topology
    senders = chosen_ranks(list(send.values()), [classes.holders[h] for h in send], topology.nic(classes.source_device))
    firsts = chosen_ranks(
        list(take.values()), [deliveries[line[0]][2] for line in take.values()], topology.nic(classes.target_device)
    )
    targets = len(classes.target_device)
    for (k, _, ranks), sender, first in zip(deliveries, senders, firsts, strict=True):
        pairs, which = np.unique(sender * targets + first, return_inverse=True)
        numbers = []
        for source, head in zip(*(column.tolist() for column in np.divmod(pairs, targets)), strict=True):
            numbers.append(routes.number(source, (head, *(rank for rank in ranks.tolist() if rank != head))))
        routes.route.append(np.array(numbers)[which])
        routes.part.append(classes.parts[k])


def distribute(options: Sequence[Ints], weights: Sequence[Ints], link: Ints) -> list[Ints]:
    """Assigns every item of every line (a list of items with the same eligible ranks) to a rank of the line, minimising
    the busiest link's load by a heuristic. Returns, by line, the rank of each item.

    Args:
        options: By line, the eligible ranks, at least one.
        weights: By line, the bytes of the items, in order; a rank gets runs of items.
        link: By rank number, the link carrying the bytes; ranks of the same link are loaded evenly too.
    """
    load = np.zeros(int(link.max(initial=0)) + 1, np.int64)
    by_rank = np.zeros(len(link), np.int64)
    links = [np.unique(link[ranks]) for ranks in options]
    amounts = [int(items.sum()) for items in weights]
    planned = [np.zeros(len(at), np.int64) for at in links]
    for _ in range(SWEEPS):
        moved = 0
        for i, at in enumerate(links):
            load[at] -= planned[i]
            new = fill(load[at], amounts[i])
            load[at] += new
            moved += int(np.abs(new - planned[i]).sum())
            planned[i] = new
        if moved <= SETTLED * sum(amounts):
            break
    # Items are indivisible. Lines with few options go first; later lines even out deviations from the plan.
    assigned: list[Ints] = [np.zeros(0, np.int64)] * len(options)
    for i in sorted(range(len(options)), key=lambda i: (len(links[i]), amounts[i])):
        at, ranks = links[i], options[i]
        load[at] -= planned[i]
        share = np.zeros(len(ranks), np.int64)
        for nic, amount in zip(at.tolist(), fill(load[at], amounts[i]).tolist(), strict=True):
            on_link = link[ranks] == nic
            share[on_link] = fill(by_rank[ranks[on_link]], amount)
        chosen = _runs(weights[i], share)
        received = np.bincount(chosen, weights[i], len(ranks)).astype(np.int64)  # exact below 2⁵³
        by_rank[ranks] += received
        np.add.at(load, link[ranks], received)
        assigned[i] = ranks[chosen]
    return assigned


def fill(load: Ints, amount: int) -> Ints:
    """Returns what to add to each entry of `load`, `amount` in sum: the lowest entries are raised to a common level.
    Exact, in whole numbers; `load`, of at least one entry, is unchanged."""
    order = np.argsort(load, kind="stable")
    ordered = load[order]
    count = np.arange(1, len(load) + 1)
    level = (amount + np.cumsum(ordered)) // count
    n = int(np.flatnonzero(level >= ordered)[-1]) + 1
    added = np.zeros_like(load)
    added[order[:n]] = level[n - 1] - ordered[:n]
    added[order[: amount - int(added.sum())]] += 1
    return added


def _runs(weights: Ints, share: Ints) -> NDArray[np.int64]:
    """Cuts a line of items into runs of about `share` bytes; returns the run of each item's middle."""
    middle = 2 * np.cumsum(weights) - weights
    return np.minimum(np.searchsorted(2 * np.cumsum(share), middle, "right"), len(share) - 1)
