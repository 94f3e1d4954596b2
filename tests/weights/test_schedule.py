"""The order of messages: freedom from deadlock, simulated with rendezvous and limited buffers."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.weights.exchange.rounds import rounds

PROCESSES = 7


@st.composite
def chains(draw: st.DrawFn) -> list[list[int]]:
    one = st.lists(st.integers(0, PROCESSES - 1), min_size=1, max_size=5, unique=True)
    return draw(st.lists(one, max_size=60))


def hops(chain: list[int], at: list[int]) -> list[tuple[int, int, int]]:
    """Returns (round, sender, receiver) of each hop; a bucket that stays has the same process at both ends."""
    if len(chain) == 1:
        return [(at[0], chain[0], chain[0])]
    return [(at[0], chain[0], chain[1])] + [(t, chain[1], p) for t, p in zip(at[1:], chain[2:], strict=True)]


@given(chains(), st.integers(2, 4), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_a_round_has_one_message_each_way_and_buffers_suffice(found: list[list[int]], live: int, second: int) -> None:
    phases = [int(i >= second) for i in range(len(found))]
    when = rounds(found, PROCESSES, live, phases)
    sends, receives = set(), set()
    held: dict[tuple[int, int], int] = defaultdict(int)
    for chain, at in zip(found, when, strict=True):
        assert at == sorted(set(at)) and len(at) == max(1, len(chain) - 1)
        mine: dict[int, list[int]] = defaultdict(list)
        for t, sender, receiver in hops(chain, at):
            assert (t, sender) not in sends
            sends.add((t, sender))
            if sender != receiver:
                assert (t, receiver) not in receives
                receives.add((t, receiver))
            mine[sender].append(t)
            mine[receiver].append(t)
        for process, used in mine.items():
            for t in range(min(used), max(used) + 1):
                held[t, process] += 1
    assert max(held.values(), default=0) <= live
    ends = [max((at[-1] for at, p in zip(when, phases, strict=True) if p == phase), default=-1) for phase in (0, 1)]
    begins = [min((at[0] for at, p in zip(when, phases, strict=True) if p == phase), default=9**9) for phase in (0, 1)]
    assert begins[1] > ends[0]


@given(chains(), st.integers(2, 3), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_nobody_waits_for_ever(found: list[list[int]], buffers: int, random) -> None:  # type: ignore[no-untyped-def]
    """Steps blocking processes in random order until all finish, and fails on a deadlock.

    A send completes only after the receiver began to receive (rendezvous). In the order of rounds, a process first
    gets buffers by finishing the oldest rounds, begins to receive, waits for the bucket to forward, and begins to send.
    """
    when = rounds(found, PROCESSES, max(2, buffers - 1))
    plans: list[dict[int, dict[str, tuple[int, int, int]]]] = [defaultdict(dict) for _ in range(PROCESSES)]
    last: dict[tuple[int, int], int] = {}
    first: dict[tuple[int, int], int] = {}
    for number, (chain, at) in enumerate(zip(found, when, strict=True)):
        for t, sender, receiver in hops(chain, at):
            plans[sender][t]["send"] = (number, sender, receiver)
            if receiver != sender:
                plans[receiver][t]["receive"] = (number, sender, receiver)
            for process in (sender, receiver):
                first.setdefault((process, number), t)
                last[process, number] = t
    begun: set[tuple[int, str, tuple[int, int, int]]] = set()

    def through(t: int, hop: tuple[int, int, int]) -> bool:
        return hop[1] == hop[2] or {(t, "send", hop), (t, "receive", hop)} <= begun

    def process(me: int):  # type: ignore[no-untyped-def]
        free, open_rounds = buffers, []
        for t in sorted(plans[me]):
            step = plans[me][t]
            new = {hop[0] for hop in step.values() if first[me, hop[0]] == t}
            while free < len(new):
                assert open_rounds, "no earlier round gives a buffer back"
                oldest = open_rounds.pop(0)
                for hop in plans[me][oldest].values():
                    while not through(oldest, hop):
                        yield
                free += len({hop[0] for hop in plans[me][oldest].values() if last[me, hop[0]] == oldest})
            free -= len(new)
            if "receive" in step:
                begun.add((t, "receive", step["receive"]))
            if "send" in step:
                number = step["send"][0]
                if found[number][0] != me:
                    while not through(first[me, number], (number, found[number][0], me)):
                        yield
                begun.add((t, "send", step["send"]))
            open_rounds.append(t)
            yield
        for t in open_rounds:
            for hop in plans[me][t].values():
                while not through(t, hop):
                    yield

    running = [process(p) for p in range(PROCESSES)]
    idle = 0
    while running:
        before = len(begun), len(running)
        random.shuffle(running)
        running = [p for p in running if next(p, "over") is None]
        idle = 0 if before != (len(begun), len(running)) else idle + 1
        assert idle < 3, "everybody waits"


def test_equal_traffic_needs_no_more_rounds_than_messages_per_process() -> None:
    """Schedules 8 messages from each of 4 senders to each of 4 receivers: at least 32 rounds; first fit stays close."""
    chains_of_two = [[s, 4 + r] for k in range(8) for s in range(4) for r in range(4)]
    assert max(at[-1] for at in rounds(chains_of_two, 8, 2)) + 1 <= 36
