"""Where actors go when nothing is reserved, and what an address of this machine is called."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.cluster.host import address_of, interface_of
from skyrl_mega.cluster.placement import Node, spread

NODES = [Node(str(n), f"10.0.0.{n}") for n in range(8)]


def test_three_policy_ranks_and_an_engine_take_a_node_each() -> None:
    assert spread([1, 1, 1, 1], NODES[:4]) == NODES[:4]
    assert spread([2, 2, 1], NODES[:2]) == [NODES[0]] * 4 + [NODES[1]]
    assert spread([4], NODES[:3]) == [NODES[0]] * 4


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.integers(1, 8))
def test_units_stay_whole_in_order_and_are_dealt_evenly(units: list[int], count: int) -> None:
    nodes = NODES[:count]
    where = spread(units, nodes)
    assert len(where) == sum(units)
    firsts = [sum(units[:i]) for i in range(len(units))]
    seats = [where[first : first + size] for first, size in zip(firsts, units, strict=True)]
    assert all(len(set(seat)) == 1 for seat in seats)
    order = [nodes.index(seat[0]) for seat in seats]
    assert order == sorted(order)
    shares = Counter(order)
    if len(units) >= count:
        assert len(shares) == count and max(shares.values()) - min(shares.values()) <= 1
    else:
        assert max(shares.values()) == 1


def test_loopback_by_name_and_by_address() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # kept for documentation: nobody has it
    with pytest.raises(OSError):
        address_of("no-such-interface")
