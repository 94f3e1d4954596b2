"""Tests of packing and unpacking boxes, against bytes written in sequence."""

from __future__ import annotations

import itertools

import pytest
import torch

from skyrl_mega.kernels.boxes import Boxes, Region, regions
from tests.kernels import brute
from tests.kernels.cases import box_views

CPU = torch.device("cpu")
pytest.importorskip("triton", reason="the shared cases import the kernels")


def test_packed_one_after_the_other() -> None:
    views = box_views("cpu")
    offsets = [0, *itertools.accumulate(view.nbytes for view in views[:-1])]
    boxes = Boxes(regions(views, offsets), CPU)
    flat = torch.full((boxes.nbytes + 3,), 7, dtype=torch.uint8)
    boxes.pack(views, flat)
    assert bytes(flat[:-3].tolist()) == brute.packed(views)
    assert flat[-3:].tolist() == [7, 7, 7]


def test_there_and_back_leaves_the_rest_alone() -> None:
    whole = torch.arange(600, dtype=torch.int16).view(20, 30)
    views = [whole[2:5, 3:9], whole[:, 20], whole[10]]
    boxes = Boxes(regions(views[:2], [11, 101]), CPU)
    flat = torch.zeros(boxes.nbytes, dtype=torch.uint8)
    boxes.pack(views, flat)
    before = whole.clone()
    wanted = whole.clone()
    wanted[2:5, 3:9], wanted[:, 20] = -1, -1
    views[0].fill_(0)
    views[1].fill_(0)
    boxes.unpack(views, flat)
    assert torch.equal(whole, before)
    boxes.unpack(views, torch.full_like(flat, 0xFF))
    assert torch.equal(whole, wanted)


def test_boxes_are_of_whatever_tensors_are_given() -> None:
    """Packs from new tensors with the same regions: regions hold positions within a tensor, no memory and no
    content."""
    boxes = Boxes([Region(0, 4, (2, 4), (4, 1), torch.float32, 0)], CPU)
    flat = torch.zeros(32, dtype=torch.uint8)
    for value in (5.0, 6.0):
        weight = torch.zeros(4, 4)
        weight[1:3] = value
        boxes.pack([weight], flat)
        assert flat.view(torch.float32).tolist() == [value] * 8
    boxes.unpack([weight[1:]], flat)
    assert weight.tolist() == [[0.0] * 4, [6.0] * 4, [6.0] * 4, [6.0] * 4]


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="need regions"):
        Boxes([], CPU)
    with pytest.raises(ValueError, match="at least 0"):
        Boxes(regions([torch.zeros(2)], [-1]), CPU)
    views = [torch.zeros(4)]
    boxes = Boxes(regions(views, [0]), CPU)
    with pytest.raises(ValueError, match="15 bytes, the boxes need 16"):
        boxes.pack(views, torch.zeros(15, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        boxes.unpack(views, torch.zeros(4))
