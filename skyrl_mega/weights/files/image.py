"""The image of a shard: the bytes of an engine worker's boxes in the types of the store, in host memory or in a file.

Weights go from the store into the image, while the engine computes with its present weights, and from the whole image
into the engine's parameters. A file in a folder on the engine's node survives the worker: a later worker of the same
shard finds the name of the publication beside the image, or else compares chunks by checksum.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.kernels.block_fp8 import dequantise
from skyrl_mega.parallel.box import Box, Piece, Shard
from skyrl_mega.weights.exchange.pack import local_view
from skyrl_mega.weights.files.coding import RELATIVE, SAME, Bytes, decode
from skyrl_mega.weights.files.manifest import NAME, Chunk
from skyrl_mega.weights.fp8.format import FP8, SUFFIX, scale_box

_ALIGNMENT = 16


class Incomplete(RuntimeError):
    """A publication without a box of the shard, or with other types; names the tensor."""


@dataclass(frozen=True)
class Overlap:
    """The common part of a chunk of the store and a box (a block of a tensor) of this worker's shard."""

    region: NDArray[Any]
    """Words of the image for the whole box of the shard, in the box's shape."""
    here: tuple[slice, ...]
    """The common part in `region`."""
    there: tuple[slice, ...]
    """The common part in the chunk."""
    whole: bool
    """True if the box of the shard contains the whole chunk."""

    def crc(self) -> int:
        """Returns the CRC-32 of the common part's bytes in this worker's image."""
        return zlib.crc32(np.ascontiguousarray(self.region[self.here]).data)


class Image:
    """The bytes of a shard's boxes.

    Args:
        shard: The shard, with scales if the store's weights are FP8.
        types: Type of each tensor in the store.
        file: File of the image, locked until `close`; None for host memory.

    Raises:
        Incomplete: The store lacks a tensor of the shard.
        UserError: The file is in use by another process, or cannot be opened.
    """

    def __init__(self, shard: Shard, types: Mapping[str, torch.dtype], file: Path | None = None) -> None:
        self.shard, self.types = shard, dict(types)
        absent = next((piece.tensor for piece in shard.pieces if piece.tensor not in types), None)
        if absent is not None:
            raise Incomplete(f"{absent}: the publication lacks the tensor")
        boxes = dict.fromkeys((piece.tensor, piece.box) for piece in shard.pieces)
        places, size = {}, 0
        for tensor, box in boxes:
            places[tensor, box] = size
            nbytes = box.numel * types[tensor].itemsize
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = size
        self._lock: int | None = None
        self._file = file
        self._bytes: Bytes = np.zeros(size, np.uint8) if file is None else self._mapped(file, size)
        self._regions: dict[str, list[tuple[Box, NDArray[Any]]]] = defaultdict(list)
        for (tensor, box), place in places.items():
            words = np.dtype(f"u{types[tensor].itemsize}")
            data = self._bytes[place : place + box.numel * words.itemsize]
            self._regions[tensor].append((box, data.view(words).reshape(box.shape)))
        self.fresh = file is None or not self._existed
        """True if the image has never been filled."""
        self.unverified = not self.fresh
        """True for a file of an earlier worker before the first publication that was read into it."""

    def _mapped(self, file: Path, size: int) -> Bytes:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._existed = os.fstat(self._lock).st_size == size
            if not self._existed:
                self._label("")
                os.ftruncate(self._lock, size)
            if size:  # a full disk must be an error here: writing to mapped memory without a block ends the process
                os.posix_fallocate(self._lock, 0, size)
        except OSError as error:
            self.close()
            raise UserError(
                f"{error.strerror or error}; give a folder with space on each engine's node that no other run uses",
                key="weights.files.cache",
                value=file,
            ) from None
        data: Bytes = np.memmap(file, np.uint8, "r+", shape=(size,)) if size else np.zeros(0, np.uint8)
        return data

    @property
    def name(self) -> str:
        """Name of the publication in the image; "" while the image is being written."""
        return self._name if self._file is None else self._read_label()

    @name.setter
    def name(self, name: str) -> None:
        if self._file is None:
            self._name = name
        else:
            self._label(name)

    _name = ""
    _existed = False

    def _label(self, name: str) -> None:
        assert self._file is not None
        partial = self._file.with_suffix(".new")
        partial.write_text(f"{name}\n{_boot()}")
        partial.replace(self._file.with_suffix(".name"))

    def _read_label(self) -> str:
        assert self._file is not None
        try:
            name, _, boot = self._file.with_suffix(".name").read_text().partition("\n")
        except OSError:
            return ""
        # The end of a process loses nothing of the file, the end of the machine may.
        return name if boot == _boot() and NAME.fullmatch(name) else ""

    def close(self) -> None:
        """Releases the lock of the image's file; the bytes stay in the file. Closing twice is harmless."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def overlaps(self, chunk: Chunk) -> list[Overlap]:
        """Returns the parts of a chunk that belong to the shard; [] without any.

        Raises:
            Incomplete: The chunk has another type than the image.
        """
        found = []
        for box, region in self._regions.get(chunk.tensor, ()):
            common = chunk.box.intersect(box)
            if common is None:
                continue
            if chunk.dtype != self.types[chunk.tensor]:
                raise Incomplete(f"{chunk.tensor}: stored as {chunk.dtype}, the image has {self.types[chunk.tensor]}")
            found.append(Overlap(region, common.inside(box), common.inside(chunk.box), common == chunk.box))
        return found

    def check_covered(self, overlaps: Iterable[tuple[Chunk, list[Overlap]]]) -> None:
        """Raises Incomplete unless the parts of distinct chunks, given as results of `overlaps`, fill every box of the
        shard."""
        filled: dict[int, int] = defaultdict(int)
        for _, parts in overlaps:
            for part in parts:
                filled[id(part.region)] += prod(s.stop - s.start for s in part.here)
        for tensor, regions in self._regions.items():
            for box, region in regions:
                if filled[id(region)] != box.numel:
                    raise Incomplete(f"{tensor}: the publication has {filled[id(region)]} of the elements of {box}")

    # ---- into the engine -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def install(self, params: Mapping[str, Tensor], written: Callable[[str], None]) -> int:
        """Copies the image into an engine worker's parameters, a parameter at a time, converted to the parameter's
        type, and returns the number of bytes read from the image.

        Args:
            params: The parameters by the shard's local names. Scales may be absent; they then dequantise.
            written: Called with the name of each parameter once the parameter is filled.

        Raises:
            KeyError: `params` lacks a parameter of the shard.
            ValueError: A parameter is not of the shard's shape.
        """
        by_param: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.shard.pieces:
            by_param[piece.param].append(piece)
        copied = 0
        for name, pieces in by_param.items():
            if name not in params and all(piece.tensor.endswith(SUFFIX) for piece in pieces):
                continue
            local = self.shard.shaped(name, params[name])
            for piece in pieces:
                place = local_view(local, piece.offset, piece.box)
                values = self.tensor(piece.tensor, piece.box)
                copied += values.nbytes
                if values.dtype == FP8 != local.dtype:
                    scales = self.tensor(piece.tensor + SUFFIX, scale_box(piece.box)).to(local.device)
                    row, column = piece.box.start
                    values = dequantise(values.to(local.device), scales, row, column, local.dtype)
                place.copy_(values)
            del local, place  # `written` may free the memory
            written(name)
        return copied

    def tensor(self, name: str, box: Box) -> Tensor:
        """Returns a box as a tensor in the store's type, without a copy; the shard must have a piece of exactly this
        box."""
        region = next(region for other, region in self._regions[name] if other == box)
        return torch.from_numpy(region.reshape(-1).view(np.uint8)).view(self.types[name]).view(box.shape)


def _boot() -> str:
    """Returns the number of this machine's start."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def put(chunk: Chunk, parts: Iterable[Overlap], form: int, payload: memoryview) -> None:
    """Writes a chunk's payload into the image: changes are added to the earlier words, others replace them.

    Args:
        chunk: The chunk.
        parts: Its parts in the image, from `Image.overlaps`.
        form: Form of the payload.
        payload: The stored bytes.

    Raises:
        WrongPayload: The payload is no encoding of the chunk.
    """
    if form == SAME:
        return
    words = decode(form, payload, chunk.nbytes, chunk.dtype.itemsize).reshape(chunk.box.shape)
    for part in parts:
        if form in RELATIVE:
            part.region[part.here] += words[part.there]
        else:
            part.region[part.here] = words[part.there]
