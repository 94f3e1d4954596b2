"""One order of all messages of a plan that every process shares: rounds.

In a round a process sends at most one message and receives at most one. It finishes a round's messages in the order of
rounds, so nothing can wait in a circle: whoever takes part in the earliest unfinished round waits for nobody. A buffer
is in use from the first to the last round of its bucket, and the schedule never has more in use at once than a process
may hold, so nobody waits for a buffer that an earlier round does not free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def rounds(
    chains: Sequence[Sequence[int]], processes: int, live: int, phases: Sequence[int] | None = None
) -> list[list[int]]:
    """The round of every hop of every bucket, each as early as those before it in the list allow.

    Args:
        chains: by bucket, the process that packs it, the one that it sends it to, and those whom that one hands it on
            to, one after the other. A bucket of one process only stays on its device; it takes a turn to send.
        processes: how many there are.
        live: buckets that a process holds at once, at least 2.
        phases: by bucket, ascending; a phase begins when all rounds of the one before it are over.

    Returns:
        By bucket, ascending rounds: one for each process after the first, or one for a bucket of one process.
    """
    if live < 2:
        raise ValueError(f"a process that sends and receives at once holds 2 buckets, more than {live}")
    # Sets of rounds are integers, a bit for a round: the first fit is then found in a few machine instructions.
    sends, receives = [0] * processes, [0] * processes
    held = [[0] * live for _ in range(processes)]  # held[p][n]: rounds in which p holds more than n buckets
    found: list[list[int]] = []
    start = last = 0
    for number, chain in enumerate(chains):
        if phases is not None and number and phases[number] != phases[number - 1]:
            start = last
        at = _first_fit(chain, sends, receives, held, start)
        found.append(at)
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
    return found


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
    """The first round from `start` on that is not taken."""
    taken >>= start
    return start + (~taken & (taken + 1)).bit_length() - 1


def _span(first: int, last: int) -> int:
    return (1 << last + 1) - (1 << first)


def _hold(counts: list[int], span: int) -> None:
    """One bucket more is held during `span`."""
    for n in range(len(counts) - 1, 0, -1):
        counts[n] |= counts[n - 1] & span
    counts[0] |= span


def distinct(processes: Iterable[int], but: int) -> list[int]:
    """The processes in order, each once, without one of them."""
    return [p for p in dict.fromkeys(processes) if p != but]
