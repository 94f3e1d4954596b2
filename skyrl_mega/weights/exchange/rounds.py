"""Rounds: the order of all messages of a plan, shared by every process.

In a round a process sends and receives at most one message each. Every process completes messages in round order, so a
cycle of waiting is impossible: members of the earliest unfinished round wait for no other round. A bucket occupies a
buffer from the first to the last round. The schedule never needs more buffers at once than a process may hold, so a
needed buffer is always freed by an earlier round.
"""

from __future__ import annotations

from collections.abc import Sequence


def rounds(
    chains: Sequence[Sequence[int]], processes: int, live: int, phases: Sequence[int] | None = None
) -> list[list[int]]:
    """Returns the round of every hop of every bucket, each as early as the preceding buckets in the list allow.

    Args:
        chains: By bucket, the packing process, the first receiver, and the further receivers, served in turn by the
            first. A bucket with a single process stays on the device and takes up a send.
        processes: Number of processes; `chains` contains numbers below it.
        live: Maximum number of buckets held by a process at once, at least 2.
        phases: By bucket, ascending; None: all buckets are of one phase. A phase begins after all rounds of the
            previous phase.

    Returns:
        By bucket, ascending rounds, counted from 0: one for each process after the first; a single round for a bucket
        with a single process.

    Raises:
        ValueError: `live` is below 2.
    """
    if live < 2:
        raise ValueError(f"live = {live}: a process that sends and receives at once needs 2 buckets")
    # Sets of rounds are integers with one bit per round, so the first fit takes only a few machine instructions.
    sends, receives = [0] * processes, [0] * processes
    held = [[0] * live for _ in range(processes)]  # held[p][n]: rounds in which p holds more than n buckets
    schedule: list[list[int]] = []
    start = last = 0
    for number, chain in enumerate(chains):
        if phases is not None and number and phases[number] != phases[number - 1]:
            start = last
        at = _first_fit(chain, sends, receives, held, start)
        schedule.append(at)
        last = max(last, at[-1] + 1)
        packer, *others = chain
        sends[packer] |= 1 << at[0]
        _hold(held[packer], 1 << at[0])
        for receiver, round_ in zip(others, at, strict=False):
            receives[receiver] |= 1 << round_
        if others:
            for round_ in at[1:]:
                sends[others[0]] |= 1 << round_
            _hold(held[others[0]], _span(at[0], at[-1]))
            for receiver, round_ in zip(others[1:], at[1:], strict=True):
                _hold(held[receiver], 1 << round_)
    return schedule


def _first_fit(
    chain: Sequence[int], sends: list[int], receives: list[int], held: list[list[int]], start: int
) -> list[int]:
    packer, *others = chain
    if not others:
        return [_free(sends[packer] | held[packer][-1], start)]
    first, *rest = others
    while True:
        at = [_free(sends[packer] | receives[first] | held[packer][-1] | held[first][-1], start)]
        for receiver in rest:
            at.append(_free(sends[first] | receives[receiver] | held[receiver][-1], at[-1] + 1))
        conflicts = held[first][-1] & _span(at[0], at[-1])
        if not conflicts:
            return at
        start = conflicts.bit_length()


def _free(taken: int, start: int) -> int:
    """Returns the first round from `start` on outside `taken`."""
    taken >>= start
    return start + (~taken & (taken + 1)).bit_length() - 1


def _span(first: int, last: int) -> int:
    return (1 << last + 1) - (1 << first)


def _hold(counts: list[int], span: int) -> None:
    """Counts another held bucket during `span`."""
    for n in range(len(counts) - 1, 0, -1):
        counts[n] |= counts[n - 1] & span
    counts[0] |= span
