"""Buckets: every element of every route exactly once, within the bucket size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.models.registry import architecture
from skyrl_mega.weights.exchange.buckets import ALIGNMENT, cut, fill
from skyrl_mega.weights.plan.intersect import TransferTable
from skyrl_mega.weights.plan.plan import plan
from tests.weights.grids import LAYOUTS, MODELS


@given(
    shapes=st.lists(st.lists(st.integers(1, 7), min_size=3, max_size=3).map(tuple), min_size=1, max_size=6),
    room=st.integers(4, 200),
)
@settings(max_examples=200, deadline=None)
def test_large_parts_are_cut_into_all_their_elements(shapes: list[tuple[int, ...]], room: int) -> None:
    tensors = {f"t{i}": shape for i, shape in enumerate(shapes)}
    full = np.array(shapes)
    parts = TransferTable(tensors, np.arange(len(shapes)), np.zeros_like(full), full, full.prod(1) * 4)
    finer, begin = cut(parts, room)
    assert begin[-1] == len(finer)
    for i, shape in enumerate(shapes):
        count = np.zeros(shape, int)
        for tensor, box in finer.boxes(np.arange(begin[i], begin[i + 1])):
            assert tensor == f"t{i}" and box.numel * 4 <= room
            count[box.slices()] += 1
        assert (count == 1).all()
    assert (finer.nbytes == finer.shape.prod(1) * 4).all()


@pytest.mark.parametrize("room", [64, 1000, 100_000])
def test_buckets_are_the_routes(room: int) -> None:
    hf = MODELS["qwen3_moe"]
    arch = architecture(hf)
    transfer_plan = plan(arch.megatron_layout(hf, LAYOUTS["tp2 ep2 etp2"], "local"), arch.engine_layout(hf, 2, 1))
    first = frozenset(name for name in transfer_plan.parts.tensors if "norm" in name)
    buckets = fill(transfer_plan, room, first)
    _, begin = cut(transfer_plan.parts, room // ALIGNMENT * ALIGNMENT)
    names = list(transfer_plan.parts.tensors)
    for number, route in enumerate(transfer_plan.routes):
        mine = [b for b, of in enumerate(buckets.route) if of == number]
        wanted = np.concatenate([np.arange(begin[p], begin[p + 1]) for p in route.parts])
        assert sorted(np.concatenate([buckets.members[b] for b in mine])) == wanted.tolist()
        assert sum(buckets.parts.nbytes[buckets.members[b]].sum() for b in mine) == transfer_plan.route_bytes[number]
    assert buckets.phase == sorted(buckets.phase) and set(buckets.phase) == {0, 1}
    for b, members in enumerate(buckets.members):
        assert {names[t] in first for t in buckets.parts.tensor[members]} == {buckets.phase[b] == 0}
        assert buckets.nbytes(b) <= room
        ends = buckets.offsets(b) + buckets.parts.nbytes[members]
        assert (buckets.offsets(b) % ALIGNMENT == 0).all() and (buckets.offsets(b)[1:] >= ends[:-1]).all()
    # No two neighbours of a route and phase would fit into a single bucket.
    for number in range(len(transfer_plan.routes)):
        for phase in (0, 1):
            sizes = [
                buckets.nbytes(b) for b, of in enumerate(buckets.route) if (of, buckets.phase[b]) == (number, phase)
            ]
            assert all(a + b > room for a, b in pairwise(sizes))
