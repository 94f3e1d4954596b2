"""Micro-batches under a token budget, balanced over data-parallel ranks. Pure integer arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def balance_groups(
    lengths: Sequence[int], group_of: Sequence[int], ranks: int, budget: int, multiple: int = 1
) -> list[list[list[int]]]:
    """Assigns sequences to ranks and micro-batches as `balance`, without splitting groups of sequences.

    All sequences of a group share a micro-batch, even if the group exceeds the budget.

    Args:
        lengths: Tokens of each sequence.
        group_of: The number of each sequence's group.
        ranks, budget, multiple: See `balance`.

    Returns:
        `[rank][micro-batch][index of a sequence]`.

    Raises:
        ValueError: `ranks`, `budget` or `multiple` is below 1.
    """
    members: dict[int, list[int]] = {}
    for sequence, number in enumerate(group_of):
        members.setdefault(number, []).append(sequence)
    units = list(members.values())
    assigned = balance([sum(lengths[i] for i in unit) for unit in units], ranks, budget, multiple)
    return [[sorted(i for unit in micro for i in units[unit]) for micro in micros] for micros in assigned]


def balance(lengths: Sequence[int], ranks: int, budget: int, multiple: int = 1) -> list[list[list[int]]]:
    """Assigns sequences to ranks and micro-batches: `[rank][micro-batch][index of a sequence]`.

    Every rank gets the same number of micro-batches, a multiple of `multiple`, because pipeline schedules and expert
    exchanges are collective. The number is small, but not always the smallest possible. The k-th micro-batches of all
    ranks are similar in size. No micro-batch exceeds `budget` tokens, except that a sequence longer than the budget
    gets a separate micro-batch. No sequence is split, lost or repeated. Tokens per rank are near the mean whenever the
    lengths allow.

    A micro-batch is empty only if there are fewer sequences than micro-batches over all ranks. Without sequences every
    rank gets `multiple` empty micro-batches.

    Args:
        lengths: Tokens of each sequence.
        ranks: Data-parallel size.
        budget: Maximum tokens of a micro-batch.
        multiple: The pipeline size under virtual pipelining, else 1.

    Raises:
        ValueError: `ranks`, `budget` or `multiple` is below 1.
    """
    if ranks < 1 or budget < 1 or multiple < 1:
        raise ValueError(f"ranks {ranks}, budget {budget} and multiple {multiple} must be at least 1")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    oversize = sum(length > budget for length in lengths)
    fitting = sum(length for length in lengths if length <= budget)
    lower_bound = oversize + -(-fitting // budget)
    micros = max(1, -(-lower_bound // (ranks * multiple))) * multiple
    packed: list[list[int]] = []
    while True:
        count = ranks * micros
        bins = _even(order, lengths, count, budget)
        if bins is None:
            packed = packed or _first_fit(order, lengths, budget)
            bins = _split_fullest(packed, lengths, count) if len(packed) <= count else None
        if bins is not None:
            return _deal(bins, lengths, ranks, micros)
        micros += multiple


def _even(order: list[int], lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """Puts sequences, longest first, each into the emptiest of `count` bins; None if a sequence does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in order:
        load, b = heap[0]
        if load and load + lengths[i] > budget:
            return None
        bins[b].append(i)
        # At least 1, so that an empty bin always comes before a used bin.
        heapq.heapreplace(heap, (load + max(1, lengths[i]), b))
    return bins


def _first_fit(order: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Puts each sequence into the first bin with enough space, in as many bins as needed (first-fit decreasing)."""
    bins: list[list[int]] = []
    free = np.zeros(len(order), np.int64)  # vectorized: thousands of bins and sequences
    for i in order:
        fits = free[: len(bins)] >= lengths[i]
        b = int(fits.argmax()) if fits.any() else len(bins)
        if b == len(bins):
            bins.append([])
            free[b] = budget
        bins[b].append(i)
        free[b] -= lengths[i]
    return bins


def _split_fullest(bins: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Splits the fullest bins in halves until there are `count` bins; adds empty bins if no bin can be split."""
    bins = list(bins)
    heap = [(-sum(lengths[i] for i in whole), b) for b, whole in enumerate(bins) if len(whole) > 1]
    heapq.heapify(heap)
    while len(bins) < count:
        if not heap:
            bins.append([])
            continue
        b = heapq.heappop(heap)[1]
        whole = bins[b]
        bins[b] = whole[::2]
        bins.append(whole[1::2])
        for half in (b, len(bins) - 1):
            if len(bins[half]) > 1:
                heapq.heappush(heap, (-sum(lengths[i] for i in bins[half]), half))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], ranks: int, micros: int) -> list[list[list[int]]]:
    """Gives every rank `micros` bins, the heaviest bin to the lightest rank with a free slot."""
    weight = {id(b): sum(lengths[i] for i in b) for b in bins}
    assigned: list[list[list[int]]] = [[] for _ in range(ranks)]
    heap = [(0, 0, rank) for rank in range(ranks)]
    for b in sorted(bins, key=lambda b: (-weight[id(b)], b)):
        load, used, rank = heapq.heappop(heap)
        assigned[rank].append(sorted(b))
        if used + 1 < micros:
            heapq.heappush(heap, (load + weight[id(b)], used + 1, rank))
    return assigned
