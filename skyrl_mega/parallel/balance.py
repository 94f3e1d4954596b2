"""Micro-batches under a token budget, balanced over data-parallel ranks. Pure integers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], ranks: int, budget: int, multiple: int = 1) -> list[list[list[int]]]:
    """Deals sequences to ranks and micro-batches: `[rank][micro-batch][index of a sequence]`.

    Every rank gets the same number of micro-batches, a multiple of `multiple`, because pipeline schedules and expert
    exchanges are collective; the k-th micro-batches of all ranks are alike in size. No micro-batch exceeds `budget`
    tokens, except that a sequence longer than the budget has one of its own. No sequence is split, lost or repeated.
    The number of micro-batches is the smallest that the two heuristics below reach; tokens per rank are near their mean
    wherever the lengths allow it.

    A micro-batch is empty only when there are fewer sequences than micro-batches over all ranks.

    Args:
        lengths: tokens of each sequence.
        ranks: data-parallel size.
        budget: tokens of one micro-batch at most.
        multiple: the pipeline size under virtual pipelining, else 1.
    """
    if ranks < 1 or budget < 1 or multiple < 1:
        raise ValueError(f"ranks {ranks}, budget {budget} and multiple {multiple} must be at least 1")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    oversize = sum(length > budget for length in lengths)
    fitting = sum(length for length in lengths if length <= budget)
    least = oversize + -(-fitting // budget)
    micros = max(1, -(-least // (ranks * multiple))) * multiple
    while True:
        bins = _even(order, lengths, ranks * micros, budget) or _tight(order, lengths, ranks * micros, budget)
        if bins is not None:
            return _deal(bins, lengths, ranks, micros)
        micros += multiple


def _even(order: list[int], lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """Longest first, each into the emptiest of `count` bins; None when that does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in order:
        load, b = heap[0]
        if load and load + lengths[i] > budget:
            return None
        bins[b].append(i)
        # At least 1, so that an empty bin always comes before a used one.
        heapq.heapreplace(heap, (load + max(1, lengths[i]), b))
    return bins


def _tight(order: list[int], lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """First-fit decreasing, then the fullest bins are halved until there are `count`; None when that does not fit."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        b = next((b for b, left in enumerate(room) if left >= lengths[i]), len(bins))
        if b == len(bins):
            if b == count:
                return None
            bins.append([])
            room.append(budget)
        bins[b].append(i)
        room[b] -= lengths[i]
    while len(bins) < count:
        widest = max(
            (b for b in range(len(bins)) if len(bins[b]) > 1),
            key=lambda b: sum(lengths[i] for i in bins[b]),
            default=None,
        )
        if widest is None:
            bins.append([])
        else:
            whole = bins[widest]
            bins[widest], other = whole[::2], whole[1::2]
            bins.append(other)
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], ranks: int, micros: int) -> list[list[list[int]]]:
    """Gives every rank `micros` bins, the heaviest bin to the lightest rank that has a place left."""
    weight = {id(b): sum(lengths[i] for i in b) for b in bins}
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    heap = [(0, 0, rank) for rank in range(ranks)]
    for b in sorted(bins, key=lambda b: (-weight[id(b)], b)):
        load, used, rank = heapq.heappop(heap)
        dealt[rank].append(sorted(b))
        if used + 1 < micros:
            heapq.heappush(heap, (load + weight[id(b)], used + 1, rank))
    return dealt
