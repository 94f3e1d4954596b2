"""Tests of ranges of flattened tensors as boxes, against numpy's indexing."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.parallel.box import Box, Piece, Shard
from skyrl_mega.parallel.flat import flat_pieces, run_boxes, strides

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_run_is_a_few_boxes_one_after_the_other(shape: tuple[int, ...], data: st.DataObject) -> None:
    every = np.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, every.size))
    stop = data.draw(st.integers(start, every.size))
    boxes = list(run_boxes(shape, (start, stop)))
    values = np.concatenate([np.zeros(0, int), *(every[box.slices()].reshape(-1) for box in boxes)])
    assert values.tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * (len(shape) - 1) + 1
    assert strides(shape) == tuple(step // every.itemsize for step in every.strides)


@given(st.data())
def test_what_a_run_of_a_fused_parameter_holds_of_its_tensors(data: st.DataObject) -> None:
    """Checks gate|up followed by padding, a stack of two matrices, and columns of a matrix."""
    gate, up, stacked, wide = (np.arange(1000 * i, 1000 * i + 12).reshape(3, 4) for i in range(1, 5))
    tensors = {"gate": gate, "up": up, "stacked": stacked, "wide": wide}
    fused = np.full((8, 4), -1)
    fused[1:4], fused[4:7] = gate, up
    stack = np.full((2, 3, 4), -1)
    stack[1] = stacked
    columns = wide[:, 1:3].copy()
    local = {"fused": fused, "stack": stack, "columns": columns}
    full = Box((0, 0), (3, 4))
    shard = Shard(
        {name: array.shape for name, array in local.items()},
        (
            Piece("gate", full, "fused", (1, 0)),
            Piece("up", full, "fused", (4, 0)),
            Piece("stacked", full, "stack", (1, 0, 0)),
            Piece("wide", Box((0, 1), (3, 2)), "columns", (0, 0)),
        ),
    )
    runs = {}
    for name, array in local.items():
        start = data.draw(st.integers(0, array.size))
        runs[name] = (start, data.draw(st.integers(start, array.size)))
    values_of: dict[str, list[int]] = {name: [] for name in local}
    for piece in flat_pieces(shard, runs):
        steps = strides(local[piece.param].shape)[-2:]
        for at in np.ndindex(piece.box.shape):
            value = local[piece.param].reshape(-1)[piece.at + sum(a * b for a, b in zip(at, steps, strict=True))]
            assert value == tensors[piece.tensor][tuple(a + b for a, b in zip(piece.box.start, at, strict=True))]
            values_of[piece.param].append(int(value))
    for name, array in local.items():
        start, stop = runs[name]
        assert sorted(values_of[name]) == sorted(v for v in array.reshape(-1)[start:stop].tolist() if v >= 0)
