"""The Triton kernels of `boxes`: a table of rows of bytes, cut into tiles of equal work, with a program per tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from skyrl_mega.kernels.boxes import Region, upload
from skyrl_mega.kernels.checksum import PHI, WORD

TILE = 2048
"""Words copied or summed by one program."""
WARPS = 4
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Bytes of a word → Triton type. A box uses the widest word allowed by position, stride and row length."""
ADDRESSES = 4
"""Number of address sets cached on the device: a flat buffer for checksums lies in one of a few slots."""
_OWNER, _AT, _STEP, _ROWS, _ROW, _PLACE, _BOX, _INSIDE, _WIDTH = range(9)
_COLUMNS: tl.constexpr = tl.constexpr(9)
_PHI: tl.constexpr = tl.constexpr(PHI - (1 << 64))

Ints = NDArray[np.int64]


class _Tiles(NamedTuple):
    """The work on all boxes, widest words first."""

    rows: Tensor
    """int64 [runs, 9]: owner, bytes from the owner's first element, bytes from row to row, rows, bytes of a row,
    position in the flat buffer, box index, bytes from the box's first byte, bytes of a word. Byte counts are in words
    of the run's width, except the last two."""
    of_tile: Tensor
    """int32 [tiles, 2]: the tile's run, and the first word within the run."""
    widths: tuple[tuple[int, slice], ...]
    """Bytes of a word, and the tiles with that width."""


class Table:
    """The boxes on the device by word width, with tiles, for all copies and checksums.

    Built on the first use, because the table depends on the alignment of the tensors; rebuilt only for another
    alignment. The first use raises ValueError for a box of 2³¹ words or more.

    Args:
        regions: The boxes.
        device: Device of the tensors and the flat buffer.
    """

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        self._device, self._count = device, len(regions)
        self._runs = _runs(regions)
        self._aligned: tuple[int, ...] | None = None
        self._tiles: _Tiles | None = None
        self._addresses: dict[tuple[int, ...], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the table on the device; 0 before the first use."""
        return 0 if self._tiles is None else self._tiles.rows.nbytes + self._tiles.of_tile.nbytes

    def copy(self, owners: Sequence[Tensor], flat: Tensor, *, pack: bool) -> None:
        """Copies all boxes from the tensors `owners` into `flat`, or with `pack` False from `flat` into the tensors,
        with a launch per word width.

        Raises:
            ValueError: The buffer's address is not a multiple of 8 bytes, or a box is of 2³¹ words or more. The
                buffer's size is not checked.
        """
        if flat.data_ptr() % WORD:
            raise ValueError("the flat buffer must begin at a multiple of 8 bytes; do not slice it at an odd place")
        addresses, tiles = self._bind(owners)
        for width, some in tiles.widths:
            of_tile = tiles.of_tile[some]
            constants = dict(PACK=pack, WORD=WORDS[width], TILE=TILE, num_warps=WARPS)
            _copy[(len(of_tile),)](addresses, tiles.rows, of_tile, flat, **constants)

    def checksums(self, owners: Sequence[Tensor]) -> Tensor:
        """Returns the 64-bit checksum of every box in the tensors `owners`, int64 [boxes] on the device, computed in a
        single launch; see `boxes.Boxes.checksums`. Raises ValueError for a box of 2³¹ words or more."""
        addresses, tiles = self._bind(owners)
        sums = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        _sum[(len(tiles.of_tile),)](addresses, tiles.rows, tiles.of_tile, sums, TILE=TILE, num_warps=WARPS)
        return sums

    def _bind(self, owners: Sequence[Tensor]) -> tuple[Tensor, _Tiles]:
        """Returns the owners' addresses on the device, int64 [owners], and the tiles for the owners' alignment."""
        pointers = tuple([owner.data_ptr() for owner in owners])
        cached = self._addresses.get(pointers)
        if cached is not None and self._tiles is not None:
            return cached, self._tiles
        aligned = tuple([address % WORD for address in pointers])
        if self._tiles is None or aligned != self._aligned:
            self._tiles = self._lay_out(np.array(aligned, np.int64))
            self._aligned = aligned
            self._addresses.clear()
        while len(self._addresses) >= ADDRESSES:
            del self._addresses[next(iter(self._addresses))]
        self._addresses[pointers] = cached = upload(np.array(pointers, np.int64), self._device)
        return cached, self._tiles

    def _lay_out(self, remainders: Ints) -> _Tiles:
        """Returns the tiles for owners with these addresses modulo 8."""
        runs = self._runs
        places = runs[:, [_AT, _STEP, _ROW, _PLACE, _INSIDE]]
        common = np.bitwise_or.reduce(places, axis=1) | remainders[runs[:, _OWNER]]
        widest = np.minimum(common & -common, WORD)
        order = np.argsort(-widest, kind="stable")
        rows, widest = runs[order], widest[order]
        rows[:, _WIDTH] = widest
        rows[:, [_AT, _STEP, _ROW, _PLACE]] //= widest[:, None]
        words = rows[:, _ROWS] * rows[:, _ROW]
        if len(words) and words.max() > 2**31 - TILE:
            raise ValueError(f"a box has more than {2**31 - TILE} words of {widest[words.argmax()]} bytes; cut it")
        tiles = -(-words // TILE)
        run = np.repeat(np.arange(len(rows)), tiles)
        first = (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * TILE
        of_tile = np.stack([run, first], axis=1).astype(np.int32)
        ends = {width: int(tiles[widest >= width].sum()) for width in WORDS}
        begins = [0, *ends.values()]
        widths = [(width, slice(begin, end)) for (width, end), begin in zip(ends.items(), begins, strict=False)]
        used = tuple((width, part) for width, part in widths if part.start < part.stop)
        return _Tiles(upload(rows, self._device), upload(of_tile, self._device), used)


def _runs(regions: Sequence[Region]) -> Ints:
    """Returns the regions as rows of contiguous bytes, [runs, 9], without the last column; see `_Tiles.rows`."""
    rows_of_region = [_rows(region.shape, region.stride, region.dtype.itemsize) for region in regions]
    count = [len(rows) for rows in rows_of_region]
    table = np.zeros((sum(count), 9), np.int64)
    table[:, [_AT, _STEP, _ROWS, _ROW, _INSIDE]] = np.concatenate(rows_of_region)
    box = np.repeat(np.arange(len(regions)), count)
    each = np.array([(r.owner, r.at * r.dtype.itemsize, r.offset) for r in regions], np.int64)[box]
    table[:, _OWNER], table[:, _BOX] = each[:, 0], box
    table[:, _AT] += each[:, 1]
    table[:, _PLACE] = each[:, 2] + table[:, _INSIDE]
    return table


@cache
def _rows(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> Ints:
    """Returns a box as rows: [runs, (bytes from the box's start, from row to row, rows, bytes of a row, bytes packed
    before)].

    Cached, because thousands of boxes are alike.
    """
    return np.array(list(_walked(shape, stride, itemsize)), np.int64).reshape(-1, 5)


def _walked(shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> Iterator[tuple[int, int, int, int, int]]:
    dims = [(n, step * size) for n, step in zip(shape, stride, strict=True) if n != 1]
    if any(n == 0 for n, _ in dims):
        return
    row = size  # contiguous trailing dimensions form one row
    while dims and dims[-1][1] == row:
        row *= dims.pop()[0]
    merged: list[tuple[int, int]] = []  # evenly strided leading dimensions are merged
    for n, step in dims:
        if merged and merged[-1][1] == n * step:
            merged[-1] = (merged[-1][0] * n, step)
        else:
            merged.append((n, step))
    rows, step = merged.pop() if merged else (1, row)
    for place, index in enumerate(product(*(range(n) for n, _ in merged))):
        at = sum(i * stride for i, (_, stride) in zip(index, merged, strict=True))
        yield at, step, rows, row, place * rows * row


@triton.jit
def _run(table, of_tile):
    """Returns a pointer to this program's run in the table."""
    return table + tl.load(of_tile + tl.program_id(0) * 2).to(tl.int64) * _COLUMNS


@triton.jit
def _tile(addresses, run, of_tile, WORD: tl.constexpr, TILE: tl.constexpr):
    """Returns the word indices in this program's run, a mask of existing words, and the words' addresses."""
    step, rows, row = tl.load(run + 2), tl.load(run + 3), tl.load(run + 4)
    # 32 bits are enough within a run (`Table` refuses larger runs), and 64-bit division is slow.
    word = tl.load(of_tile + tl.program_id(0) * 2 + 1) + tl.arange(0, TILE)
    exists = word < (rows * row).to(tl.int32)
    length = row.to(tl.int32)
    at_row = word // length
    owner = tl.load(addresses + tl.load(run)).to(tl.pointer_type(WORD))
    return word, exists, owner + tl.load(run + 1) + at_row * step + (word - at_row * length)


@triton.jit
def _copy(addresses, table, of_tile, flat, PACK: tl.constexpr, WORD: tl.constexpr, TILE: tl.constexpr):
    run = _run(table, of_tile)
    word, exists, local = _tile(addresses, run, of_tile, WORD, TILE)
    packed = flat.to(tl.pointer_type(WORD)) + tl.load(run + 5) + word
    if PACK:
        tl.store(packed, tl.load(local, mask=exists), mask=exists)
    else:
        tl.store(local, tl.load(packed, mask=exists), mask=exists)


@triton.jit
def _summed(addresses, run, of_tile, WORD: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Returns Σ value · (2i + 1) over this program's words, i being the index of the 64-bit word around each."""
    word, exists, local = _tile(addresses, run, of_tile, WORD, TILE)
    byte = tl.load(run + 7) + word.to(tl.int64) * SIZE  # from the box's first byte
    value = tl.load(local, mask=exists, other=0).to(tl.int64)
    if SIZE < 8:
        value = (value & ((1 << SIZE * 8) - 1)) << (byte % 8 * 8)
    return tl.sum(value * (byte // 8 * 2 + 1), axis=0)


@triton.jit
def _sum(addresses, table, of_tile, sums, TILE: tl.constexpr):
    run = _run(table, of_tile)
    width = tl.load(run + 8)
    if width == 8:
        total = _summed(addresses, run, of_tile, tl.int64, 8, TILE)
    elif width == 4:
        total = _summed(addresses, run, of_tile, tl.int32, 4, TILE)
    elif width == 2:
        total = _summed(addresses, run, of_tile, tl.int16, 2, TILE)
    else:
        total = _summed(addresses, run, of_tile, tl.int8, 1, TILE)
    tl.atomic_add(sums + tl.load(run + 6), total * _PHI)
