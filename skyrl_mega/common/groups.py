"""Division of items into groups of a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def groups(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yields the items in order, in lists with sizes of at most `most` in sum; a larger item is a list alone. Yields
    nothing without items.

    Args:
        items: The items.
        size: Returns the size of an item.
        most: Maximum sum of the sizes of a list.
    """
    group: list[Item] = []
    total = 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group
