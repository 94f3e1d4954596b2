"""Plans against brute force: every element of the target is written once, with the right global element."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.layout.box import Box, Layout, Piece, Shard
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.registry import architecture
from skyrl_mega.weights.plan import Plan, plan
from tests.weights.grids import LAYOUTS, MODELS


def number(layout: Layout) -> list[dict[str, np.ndarray]]:
    """Each rank's local tensors; an element is its global number, -1 is padding."""
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


def prove(made: Plan, source: Layout, target: Layout) -> None:
    """Carries the plan out on numbered elements and compares each one."""
    have, want = number(source), number(target)
    got = [{name: np.full_like(values, -1) for name, values in rank.items()} for rank in want]
    writes = [{name: np.zeros_like(values) for name, values in rank.items()} for rank in want]
    for t in made.transfers:
        into = place(t.target_offset, t.box)
        got[t.target][t.target_param][into] = have[t.source][t.source_param][place(t.source_offset, t.box)]
        writes[t.target][t.target_param][into] += 1
    for g, w, n in zip(got, want, writes, strict=True):
        for name in w:
            np.testing.assert_array_equal(g[name], w[name])
            np.testing.assert_array_equal(n[name], w[name] >= 0)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], whole: bool) -> Layout:
    """A tensor cut along each axis at random places, its boxes held by random ranks at random offsets.

    With `whole`, every box has at least one holder; otherwise some may have none.
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
            if draw(st.booleans()):  # one entry of a stack
                params[rank][f"p{i}"], offset = (3, *size), (1, *offset)
            else:
                params[rank][f"p{i}"] = size
            pieces[rank].append(Piece("t", box, f"p{i}", offset))
    return Layout({"t": shape}, tuple(Shard(p, tuple(q)) for p, q in zip(params, pieces, strict=True)))


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
@settings(max_examples=300, deadline=None)
def test_random_grids(data: st.DataObject, shape: tuple[int, ...]) -> None:
    source, target = data.draw(grids(shape, whole=True)), data.draw(grids(shape, whole=False))
    prove(plan(source, target), source, target)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_overlapping_and_missing_source_boxes(data: st.DataObject) -> None:
    """Source boxes of any kind: what they cover together is planned once, what they lack is refused by name."""
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
        parallel = Parallel(parallel.ranks, parallel.tensor, parallel.pipeline, parallel.virtual_pipeline)
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
    source, target = arch.megatron_layout(hf, Parallel(8), "local"), arch.engine_layout(hf, 1, engines=2)
    made = plan(source, target)
    size = sum(prod(shape) for shape in arch.tensors(hf).values())
    assert made.bytes_in(2) == [2 * size] * 2
    assert sum(made.bytes_out(2)) == 4 * size
    assert max(made.bytes_out(2)) < 1.05 * 4 * size / 8
    assert Counter(t.source for t in made.for_target(0)).keys() == {t.source for t in made.transfers if t.target == 0}
    assert sum(len(made.for_source(r)) for r in range(8)) == len(made.transfers)


def test_the_nearest_replica_sends() -> None:
    hf = MODELS["qwen3"]
    arch = architecture(hf)
    source = target = arch.megatron_layout(hf, Parallel(3), "local")
    made = plan(source, target, distance=lambda s, t: abs(s - t))
    assert all(t.source == t.target for t in made.transfers)


def test_shapes_must_agree() -> None:
    one = Layout({"t": (2,)}, (Shard({"t": (2,)}, (Piece("t", Box((0,), (2,)), "t", (0,)),)),))
    two = Layout({"t": (3,)}, (Shard({"t": (3,)}, (Piece("t", Box((0,), (3,)), "t", (0,)),)),))
    with pytest.raises(ValueError, match="t: shape"):
        plan(one, two)


def test_thirty_billion_on_32_ranks(shared: Path) -> None:
    """Qwen3-30B-A3B, the SearchR1 layout: every engine worker gets an eighth, and every policy rank sends alike."""
    hf = json.loads((shared / "data/qwen3_30b_a3b/config.json").read_text())
    arch = architecture(hf)
    source = arch.megatron_layout(hf, Parallel(32, tensor=2, expert=8), "te")
    target = arch.engine_layout(hf, 8, engines=4)
    made = plan(source, target)
    wanted = sum(p.box.numel for shard in target.shards for p in shard.pieces)
    assert sum(made.bytes_in(1)) == wanted
    # Replicated on every worker: norms and routers; shared by two workers: k and v of 4 heads over 8 workers.
    assert wanted / 4 < 1.02 * sum(prod(s) for s in arch.tensors(hf).values())
    out = made.bytes_out(2)
    assert max(out) < 1.001 * sum(out) / 32
