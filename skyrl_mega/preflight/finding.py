"""Findings of preflight checks, and helpers for comparing nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Status = Literal["ok", "warn", "bad"]
"""State of a check: bad makes a node unfit for the run, warn does not."""
T = TypeVar("T")


@dataclass(frozen=True)
class NodeProblem:
    """Problem found by a check on a node."""

    node: str
    """Name of the node in the report."""
    check: str
    """Column of the report."""
    status: Status
    text: str
    """A single line: actual state, expected state, and the fix if known."""


def most_common(values: Mapping[str, T]) -> T:
    """Returns the most frequent value; of equally frequent values, the first in `values`.

    Args:
        values: Node → value; not empty, else ValueError. Values are hashable.
    """
    counts = Counter(values.values())
    most = max(counts.values())
    return next(value for value in values.values() if counts[value] == most)


def outliers(values: Mapping[str, T]) -> Iterator[tuple[str, T, str]]:
    """Yields (node, most common value, its share as text such as `3 of 4 nodes`) for each node with another value.

    Args:
        values: Node → value; values are hashable.
    """
    for node, value in values.items():
        if value != (common := most_common(values)):
            yield node, common, f"{sum(other == common for other in values.values())} of {len(values)} nodes"


def main_group(nodes: Sequence[str], linked: Callable[[str, str], bool]) -> set[str]:
    """Returns the largest group of nodes that are linked, directly or through others; the first of equally large
    groups; empty without nodes.

    Args:
        nodes: Names of the nodes.
        linked: Returns True if the first node reaches the second; a link needs both directions.
    """
    largest: set[str] = set()
    remaining = list(nodes)
    while remaining:
        group, frontier = {remaining[0]}, [remaining[0]]
        while frontier:
            current = frontier.pop()
            neighbours = {
                node for node in remaining if node not in group and linked(current, node) and linked(node, current)
            }
            group |= neighbours
            frontier += neighbours
        remaining = [node for node in remaining if node not in group]
        largest = group if len(group) > len(largest) else largest
    return largest


def gib(count: float) -> str:
    """Returns a number of bytes as text in GiB, such as `1.5 GiB`."""
    return f"{count / 2**30:.1f} GiB"
