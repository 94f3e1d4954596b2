"""Files of boxes: any cut written, any other cut read, compared with the tensors and with the safetensors reader."""

from __future__ import annotations

import os
import zlib
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.hf_checkpoint import box_files
from skyrl_mega.hf_checkpoint.box_files import (
    MASTER,
    WEIGHT,
    LocalBox,
    check_entries,
    read_boxes,
    read_entries,
    write_boxes,
)
from skyrl_mega.hf_checkpoint.box_header import Damaged, Header, SavedFile, read_header, write_header
from skyrl_mega.hf_checkpoint.crc import joined
from skyrl_mega.parallel.box import Box

TENSORS = {"matrix": torch.randn(9, 7), "vector": torch.randn(11), "cube": torch.randn(3, 4, 5)}
FROZEN = {"frozen": torch.randn(6, 5).to(torch.bfloat16)}


def grid(tensor: Tensor, draw: Any) -> list[Box]:
    """Returns boxes of the tensor, cut at random places of every dimension."""
    edges = [sorted({0, n, *draw(st.lists(st.integers(1, n), max_size=2))}) for n in tensor.shape]
    boxes = []
    for spans in product(*(list(pairwise(edge)) for edge in edges)):
        boxes.append(Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)))
    return boxes


def save(folder: Path, parts: dict[str, list[LocalBox]]) -> Header:
    """Writes a checkpoint of box files and returns the header."""
    sizes = {name: write_boxes(folder / name, some) for name, some in parts.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in (TENSORS | FROZEN).items()}
    header = Header("bfloat16", 1, {"lr": 0.1}, {}, shapes, sizes)
    write_header(folder, header)
    assert read_header(folder) == header
    return header


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_is_read_back_in_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("boxes")
    everything = {name: (tensor, MASTER) for name, tensor in TENSORS.items()}
    everything |= {name: (tensor, WEIGHT) for name, tensor in FROZEN.items()}
    parts: dict[str, list[LocalBox]] = {"a": [], "b": [], "c": []}
    for name, (tensor, kind) in everything.items():
        for box in grid(tensor, data.draw):
            parts[data.draw(st.sampled_from("abc"))].append(LocalBox(name, box, kind, tensor[box.slices()]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_files, "CHUNK_BYTES", data.draw(st.integers(1, 200)))
        header = save(folder, parts)
        for name, some in parts.items():
            seen = load_file(folder / name)
            assert set(seen) == {part.name for part in some}
            assert all(torch.equal(seen[part.name], part.values) for part in some)
        wanted, actual = [], {name: torch.zeros(tensor.shape) for name, (tensor, _) in everything.items()}
        for name, (tensor, kind) in everything.items():
            wanted += [LocalBox(name, box, kind, actual[name][box.slices()]) for box in grid(tensor, data.draw)]
        read_boxes(read_entries(folder, header, actual), wanted)
    for name, (tensor, _) in everything.items():
        assert torch.equal(actual[name], tensor.float())


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the bytes of each preadv call: only those of the box, in as few calls as the box has runs."""
    whole = [LocalBox(name, Box((0,) * t.dim(), tuple(t.shape)), MASTER, t) for name, t in TENSORS.items()]
    header = save(tmp_path, {"a": whole})
    entries = read_entries(tmp_path, header, {"matrix"})
    reads: list[int] = []
    preadv = os.preadv

    def counted(*arguments: Any) -> int:
        reads.append(preadv(*arguments))
        return reads[-1]

    monkeypatch.setattr(os, "preadv", counted)
    for box, runs in ((Box((2, 0), (3, 7)), [84]), (Box((2, 1), (3, 2)), [8, 8, 8]), (Box((4, 3), (1, 4)), [16])):
        into = torch.zeros(box.shape)
        reads.clear()
        read_boxes(entries, [LocalBox("matrix", box, MASTER, into)])
        assert reads == runs and torch.equal(into, TENSORS["matrix"][box.slices()])


def test_an_entry_that_was_read_in_part_is_not_compared_until_it_is_read(tmp_path: Path) -> None:
    matrix = TENSORS["matrix"]
    header = save(tmp_path, {"a": [LocalBox("matrix", Box((0, 0), (9, 7)), MASTER, matrix)]})
    entries = read_entries(tmp_path, header, {"matrix"})
    assert read_boxes(entries, [LocalBox("matrix", Box((0, 0), (9, 7)), MASTER, torch.zeros(9, 7))])
    check_entries(entries)
    data = bytearray((tmp_path / "a").read_bytes())
    data[-400:] = bytes(400)
    (tmp_path / "a").write_bytes(data)
    assert not read_boxes(entries, [LocalBox("matrix", Box((0, 0), (5, 7)), MASTER, torch.zeros(5, 7))])
    with pytest.raises(Damaged, match=r"a: matrix\[0:9,0:7\]\.master: its CRC-32"):
        check_entries(entries)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=3))
def test_check_sums_of_pieces_make_that_of_the_whole(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert joined((len(piece), zlib.crc32(piece)) for piece in pieces) == zlib.crc32(data)


def test_an_element_that_nobody_wrote_or_two_did_is_named(tmp_path: Path) -> None:
    matrix = TENSORS["matrix"]
    half = [LocalBox("matrix", Box((0, 0), (5, 7)), MASTER, matrix[:5])]
    header = save(tmp_path, {"a": half})
    wanted = [LocalBox("matrix", Box((0, 0), (9, 7)), MASTER, torch.zeros(9, 7))]
    with pytest.raises(UserError, match=r"matrix\[0:9,0:7\].master: the checkpoint has 35 of its 63 elements"):
        read_boxes(read_entries(tmp_path, header, {"matrix"}), wanted)
    (tmp_path / "twice").mkdir()
    more = [LocalBox("matrix", Box((3, 0), (6, 7)), MASTER, matrix[3:])]
    header = save(tmp_path / "twice", {"a": half, "b": more})
    with pytest.raises(UserError, match="has 77 of its 63 elements"):
        read_boxes(read_entries(tmp_path / "twice", header, {"matrix"}), wanted)


def test_a_file_whose_writing_was_broken_off_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts a write before the header, the last part: a failing disk raises OSError, the file is unreadable."""
    write, calls = box_files._pwrite, iter(range(10))

    def full(*arguments: Any) -> None:
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(box_files, "_pwrite", full)
    parts = [LocalBox(name, Box((0,) * t.dim(), tuple(t.shape)), MASTER, t) for name, t in TENSORS.items()]
    with pytest.raises(OSError, match="No space left"):
        write_boxes(tmp_path / "a", parts)
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "a")
    size = (tmp_path / "a").stat().st_size
    shapes = {name: tuple(t.shape) for name, t in TENSORS.items()}
    with pytest.raises(UserError, match="a: its header has CRC-32"):
        read_entries(tmp_path, Header("float32", 1, {}, {}, shapes, {"a": SavedFile(size, 0)}), TENSORS)


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"format": 2}', '{"format": 2, "tensors": {"a": 3}}'])
def test_a_header_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "checkpoint.json").write_text(content)
    with pytest.raises(UserError, match=r"checkpoint\.json: cannot be read .*take another checkpoint"):
        read_header(tmp_path)
