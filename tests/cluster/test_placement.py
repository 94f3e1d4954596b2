"""Placement of actors without reservations, and the interface names of this machine's addresses."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.cluster.actor_process import Location, address_of, interface_of
from skyrl_mega.cluster.nodes import Node
from skyrl_mega.cluster.placement import by_gpu, spread

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


@given(st.permutations(range(8)), st.permutations(range(8)), st.permutations(range(16)))
def test_ranks_take_gpus_in_order_whatever_ray_has_dealt(a: list[int], b: list[int], mixed: list[int]) -> None:
    """Checks for rank r on GPU r mod 8 of node r // 8, with the nodes ordered by address."""
    far = [Location("m", gpu, "10.0.0.10", "far", (str(gpu),)) for gpu in a]
    near_ = [Location("m", gpu, "10.0.0.9", "near", (str(gpu),)) for gpu in b]
    where = [(far + near_)[i] for i in mixed]
    order = by_gpu(where)
    assert sorted(order) == list(range(16))
    assert [(where[i].node, where[i].gpus) for i in order] == [
        (n, (str(g),)) for n in ("near", "far") for g in range(8)
    ]


def test_the_order_of_unlike_nodes_and_of_actors_without_gpus() -> None:
    def at(node: str, *gpus: str) -> Location:
        return Location("m", 1, f"10.0.0.{node}", node, gpus)

    # The node with fewer GPUs comes last, so consecutive ranks share nodes; GPU 10 comes after GPU 9.
    where = [at("1", "0"), at("2", "10"), at("2", "9"), at("3", "1"), at("3", "0")]
    assert by_gpu(where) == [2, 1, 4, 3, 0]
    assert by_gpu([at("1", "4", "5"), at("1", "0", "1")]) == [1, 0]  # engines of two GPUs
    assert by_gpu([at("1", "GPU-b"), at("1", "GPU-a")]) == [1, 0]
    assert by_gpu([at("2"), at("1")]) == [0, 1] and by_gpu([]) == []


def test_loopback_by_name_and_by_address() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # reserved for documentation: absent everywhere
    with pytest.raises(OSError):
        address_of("no-such-interface")
