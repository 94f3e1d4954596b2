"""What a check says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Status = Literal["ok", "warn", "bad"]
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """A check has something against a node."""

    node: str
    """Its name in the report."""
    check: str
    """The column of the report."""
    status: Status
    text: str
    """One line: what there is, what is wanted, the fix where one is known."""


def usual(values: Mapping[str, T]) -> T:
    """The value that most nodes have; where two are as frequent, that of the first node."""
    counts = Counter(values.values())
    most = max(counts.values())
    return next(value for value in values.values() if counts[value] == most)


def main_group(nodes: Sequence[str], linked: Callable[[str, str], bool]) -> set[str]:
    """The largest group of nodes that are linked with each other, directly or over others; the first of equal ones."""
    best: set[str] = set()
    left = list(nodes)
    while left:
        group, edge = {left[0]}, [left[0]]
        while edge:
            here = edge.pop()
            near = {node for node in left if node not in group and linked(here, node) and linked(node, here)}
            group |= near
            edge += near
        left = [node for node in left if node not in group]
        best = group if len(group) > len(best) else best
    return best


def gib(count: float) -> str:
    """Bytes for a person."""
    return f"{count / 2**30:.1f} GiB"
