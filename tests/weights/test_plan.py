"""Plans against brute force: every target element is written once, from the right global element."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Box, Layout, Piece, Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.plan.assign import fill
from skyrl_mega.weights.plan.cost import cost, imbalance
from skyrl_mega.weights.plan.plan import Plan, plan
from skyrl_mega.weights.plan.topology import Links, Topology
from tests.weights.grids import LAYOUTS, MODELS


def number(layout: Layout) -> list[dict[str, np.ndarray]]:
    """Returns each rank's local tensors with global element numbers as values and -1 for padding."""
    first, numbers = 0, {}
    for tensor, shape in layout.tensors.items():
        numbers[tensor] = np.arange(first, first + prod(shape)).reshape(shape)
        first += prod(shape)
    ranks = []
    for shard in layout.shards:
        local = {name: np.full(shape, -1) for name, shape in shard.params.items()}
        for piece in shard.pieces:
            local[piece.param][place(piece.offset, piece.box)] = numbers[piece.tensor][piece.box.slices()]
        ranks.append(local)
    return ranks


def place(offset: tuple[int, ...], box: Box) -> tuple[int | slice, ...]:
    stack = len(offset) - len(box.shape)
    inner = [slice(o, o + n) for o, n in zip(offset[stack:], box.shape, strict=True)]
    return (*offset[:stack], *inner)


def prove(transfer_plan: Plan, source: Layout, target: Layout) -> None:
    """Executes the plan on numbered elements and compares each element."""
    have, want = number(source), number(target)
    got = [{name: np.full_like(values, -1) for name, values in rank.items()} for rank in want]
    writes = [{name: np.zeros_like(values) for name, values in rank.items()} for rank in want]
    for route in transfer_plan.routes:
        boxes = transfer_plan.parts.boxes(route.parts)
        taken = transfer_plan.parts.locate(source.shards[route.source], route.parts)
        assert len(set(route.receivers)) == len(route.receivers)
        for receiver in route.receivers:
            put = transfer_plan.parts.locate(target.shards[receiver], route.parts)
            for (_, box), (here, *_), places in zip(boxes, taken, put, strict=True):
                for target_place in places:
                    into = place(target_place.offset, box)
                    got[receiver][target_place.param][into] = have[route.source][here.param][place(here.offset, box)]
                    writes[receiver][target_place.param][into] += 1
    for g, w, n in zip(got, want, writes, strict=True):
        for name in w:
            np.testing.assert_array_equal(g[name], w[name])
            np.testing.assert_array_equal(n[name], w[name] >= 0)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], whole: bool) -> Layout:
    """Draws a layout: a tensor cut along each axis at random places, boxes on random ranks at random offsets.

    With `whole`, every box has at least one holder; otherwise a box may be without any.
    """
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = [Box((), ())]
    for places in cuts:
        boxes = [Box((*b.start, a), (*b.shape, z - a)) for b in boxes for a, z in pairwise(places)]
    ranks = draw(st.integers(1, 4))
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    params: list[dict[str, tuple[int, ...]]] = [{} for _ in range(ranks)]
    for i, box in enumerate(boxes):
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=int(whole))):
            offset = tuple(draw(st.integers(0, 2)) for _ in shape)
            size = tuple(o + n for o, n in zip(offset, box.shape, strict=True))
            if draw(st.booleans()):  # an entry of a stack
                params[rank][f"p{i}"], offset = (3, *size), (1, *offset)
            else:
                params[rank][f"p{i}"] = size
            pieces[rank].append(Piece("t", box, f"p{i}", offset))
    return Layout({"t": shape}, tuple(Shard(p, tuple(q)) for p, q in zip(params, pieces, strict=True)))


@st.composite
def topologies(draw: st.DrawFn, sources: int, targets: int) -> Topology:
    """Draws nodes of any size with any number of NICs, and ranks on any device, several per device included."""
    gpus = draw(st.integers(1, 4))
    device = st.integers(0, draw(st.integers(1, 8)) - 1)
    return Topology(
        tuple(draw(st.lists(device, min_size=sources, max_size=sources))),
        tuple(draw(st.lists(device, min_size=targets, max_size=targets))),
        Links(gpus_per_node=gpus, nics_per_node=draw(st.integers(1, gpus))),
    )


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
@settings(max_examples=400, deadline=None)
def test_random_grids(data: st.DataObject, shape: tuple[int, ...]) -> None:
    source, target = data.draw(grids(shape, whole=True)), data.draw(grids(shape, whole=False))
    topology = data.draw(topologies(len(source.shards), len(target.shards)))
    transfer_plan = plan(source, target, topology)
    prove(transfer_plan, source, target)
    prove_near(transfer_plan, source)
    count = cost(transfer_plan)
    stored = [2 * sum(piece.box.numel for piece in shard.pieces) for shard in target.shards]
    assert count.rank_in.tolist() == stored
    assert count.nic_in.sum() + count.fabric_in.sum() + count.local.sum() == sum(stored)
    assert count.nic_out.sum() == count.nic_in.sum() and count.fabric_out.sum() == count.fabric_in.sum()
    assert count.bound <= count.predicted * (1 + 1e-9)
    again = plan(source, target, topology)
    assert [(r.source, r.receivers, r.parts.tolist()) for r in transfer_plan.routes] == [
        (r.source, r.receivers, r.parts.tolist()) for r in again.routes
    ]


def prove_near(transfer_plan: Plan, source: Layout) -> None:
    """Checks locality: a part never crosses into a node with a copy, and at most once into another node.

    A receiver's own device is the preferred source, and forwarding stays within a node.
    """
    t = transfer_plan.topology
    node = t.links.gpus_per_node
    holders = [
        {rank for rank, shard in enumerate(source.shards) if any(inside(box, tensor, p) for p in shard.pieces)}
        for tensor, box in transfer_plan.parts.boxes(np.arange(len(transfer_plan.parts)))
    ]
    crossed: Counter[tuple[int, int]] = Counter()
    for route in transfer_plan.routes:
        at, first = t.sources[route.source], t.targets[route.receivers[0]]
        assert {t.targets[rank] // node for rank in route.receivers} == {first // node}
        assert (np.diff(route.parts) > 0).all()
        for part in route.parts.tolist():
            devices = {t.sources[rank] for rank in holders[part]}
            if at // node != first // node:
                crossed[part, first // node] += 1
                assert first // node not in {device // node for device in devices}
            else:
                assert len(route.receivers) == 1
                assert at == first or first not in devices
    assert max(crossed.values(), default=1) == 1


def inside(box: Box, tensor: str, piece: Piece) -> bool:
    return piece.tensor == tensor and piece.box.intersect(box) == box


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_overlapping_and_missing_source_boxes(data: st.DataObject) -> None:
    """Plans random source boxes: the union is planned once, a missing element raises an error naming the tensor."""
    interval = st.tuples(st.integers(0, 7), st.integers(1, 8)).filter(lambda i: i[0] + i[1] <= 8)
    held = data.draw(st.lists(st.tuples(interval, interval), min_size=1, max_size=6))
    source = Layout(
        {"t": (8, 8)},
        tuple(Shard({"p": (h, w)}, (Piece("t", Box((y, x), (h, w)), "p", (0, 0)),)) for (y, h), (x, w) in held),
    )
    (y, h), (x, w) = data.draw(st.tuples(interval, interval))
    target = Layout({"t": (8, 8)}, (Shard({"q": (h, w)}, (Piece("t", Box((y, x), (h, w)), "q", (0, 0)),)),))
    known = np.zeros((8, 8), bool)
    for (a, m), (b, n) in held:
        known[a : a + m, b : b + n] = True
    if known[y : y + h, x : x + w].all():
        prove(plan(source, target), source, target)
    else:
        with pytest.raises(ValueError, match="t: the source holds no copy"):
            plan(source, target)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", ["tp2 pp2 vpp2 ep4 dp2", "tp2 ep2 etp2", "cp2 ep2", "pp4"])
def test_policy_to_engines(model: str, policy: str) -> None:
    hf, parallel = MODELS[model], LAYOUTS[policy]
    if "num_experts" not in hf:
        parallel = ParallelDims(parallel.ranks, parallel.tensor, parallel.pipeline, parallel.virtual_pipeline)
    arch = architecture(hf)
    source = arch.megatron_layout(hf, parallel, "local")
    for tensor, engines in ((1, 2), (2, 1), (4, 1)):
        target = arch.engine_layout(hf, tensor, engines)
        prove(plan(source, target), source, target)
    if "num_experts" in hf:
        target = arch.engine_layout(hf, 2, expert_parallel=True)
        prove(plan(source, target), source, target)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_relayout(spec: str) -> None:
    hf = MODELS["qwen3_moe_mixed"]
    arch = architecture(hf)
    layouts = [arch.megatron_layout(hf, p, spec) for p in LAYOUTS.values()]  # type: ignore[arg-type]
    for source in layouts[::3]:
        for target in layouts[1::3]:
            prove(plan(source, target), source, target)


def test_replicas_share_the_load_and_bytes_add_up() -> None:
    hf = MODELS["qwen3"]
    arch = architecture(hf)
    source, target = arch.megatron_layout(hf, ParallelDims(8), "local"), arch.engine_layout(hf, 1, engines=2)
    transfer_plan = plan(source, target)
    size = sum(prod(shape) for shape in arch.tensors(hf).values())
    assert transfer_plan.bytes_in == [2 * size] * 2
    assert sum(transfer_plan.bytes_out) == 4 * size
    assert max(transfer_plan.bytes_out) < 1.05 * 4 * size / 8


def test_bytes_are_counted_by_tensor() -> None:
    hf = MODELS["qwen3_moe"]
    arch = architecture(hf)
    source, target = arch.megatron_layout(hf, ParallelDims(2), "local"), arch.engine_layout(hf, 1)
    transfer_plan = plan(source, target, itemsize=lambda name: 1 if ".experts." in name else 2)
    sizes = {name: prod(shape) * (1 if ".experts." in name else 2) for name, shape in arch.tensors(hf).items()}
    assert transfer_plan.bytes_in == [sum(sizes.values())]


def test_the_nearest_replica_sends() -> None:
    hf = MODELS["qwen3"]
    arch = architecture(hf)
    source = target = arch.megatron_layout(hf, ParallelDims(3), "local")
    transfer_plan = plan(source, target, Topology.shared(3, 3))
    assert all(route.receivers == (route.source,) for route in transfer_plan.routes)
    count = cost(transfer_plan)
    assert count.local.sum() == sum(transfer_plan.bytes_in) and not (count.nic_in.any() or count.fabric_in.any())


def test_bytes_and_seconds_by_hand() -> None:
    """Counts by hand: a node of two holders, a node of four receivers, two NICs each. A NIC carries half; receivers
    forward the rest.
    """
    box = Box((0, 0), (512, 1000))
    one = Shard({"p": box.shape}, (Piece("t", box, "p", (0, 0)),))
    layout = {"t": box.shape}
    links = Links(gpus_per_node=4, nics_per_node=2, nic_gb_s=10, fabric_gb_s=100)
    topology = Topology((0, 3), (4, 5, 6, 7), links)
    count = cost(plan(Layout(layout, (one,) * 2), Layout(layout, (one,) * 4), topology))
    half = 512 * 1000  # bytes, of 2 · 512 · 1000
    assert count.nic_out.tolist() == [half, half, 0, 0] and count.nic_in.tolist() == [0, 0, half, half]
    assert count.node_out.tolist() == [2 * half, 0] and count.node_in.tolist() == [0, 2 * half]
    assert count.rank_out.tolist() == [half] * 2 and count.rank_in.tolist() == [2 * half] * 4
    assert count.fabric_out.sum() == count.fabric_in.sum() == 3 * 2 * half
    assert count.fabric_out.tolist() == pytest.approx([0, 0, 0, 0, *[1.5 * half] * 4], rel=0.05)
    assert count.predicted == count.bound == half / 10e9
    assert imbalance(count.nic_in) == 1


def test_a_narrow_stage_bounds_the_time() -> None:
    """Bounds the time by a single NIC: a part held by one of four senders leaves through this sender's NIC alone."""
    big, small = Box((0, 0), (900, 8)), Box((900, 0), (100, 8))
    shards = [Shard({"p": b.shape}, (Piece("t", b, "p", (0, 0)),)) for b in (big, small, small, small)]
    whole = Box((0, 0), (1000, 8))
    wanted = Shard({"p": whole.shape}, (Piece("t", whole, "p", (0, 0)),))
    links = Links(gpus_per_node=4, nics_per_node=4, nic_gb_s=1)
    topology = Topology.separate(4, 4, links)
    count = cost(plan(Layout({"t": whole.shape}, tuple(shards)), Layout({"t": whole.shape}, (wanted,) * 4), topology))
    assert count.bound == count.predicted == 900 * 8 * 2 / 1e9


def test_shapes_must_agree() -> None:
    one = Layout({"t": (2,)}, (Shard({"t": (2,)}, (Piece("t", Box((0,), (2,)), "t", (0,)),)),))
    two = Layout({"t": (3,)}, (Shard({"t": (3,)}, (Piece("t", Box((0,), (3,)), "t", (0,)),)),))
    with pytest.raises(ValueError, match="t: shape"):
        plan(one, two)


def test_the_topology_has_the_layouts_ranks() -> None:
    hf = MODELS["qwen3"]
    layout = architecture(hf).engine_layout(hf, 1, 2)
    with pytest.raises(ValueError, match=r"the topology has 2 \+ 3 ranks, the layouts 2 \+ 2"):
        plan(layout, layout, Topology.shared(2, 3))


@given(
    load=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    amount=st.integers(0, 100),
)
@settings(max_examples=300, deadline=None)
def test_filling_keeps_the_highest_lowest(load: list[int], amount: int) -> None:
    added = fill(np.array(load), amount)
    poured = list(load)
    for _ in range(amount):  # unit by unit, always to the lowest
        poured[poured.index(min(poured))] += 1
    assert added.sum() == amount and (added >= 0).all()
    assert sorted(np.array(load) + added) == sorted(poured)
