"""Device code in CUDA's shared objects: removes the code for all GPUs except Hopper.

A fat binary has a header and entries, each for one architecture. The kept entries move to the front, the header gets
the total length, and zeros fill the rest and compress well. Offsets in the program's tables stay the same.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HOPPER = 90
PTX, MACHINE_CODE = 1, 2
"""Kinds of an entry."""
MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<4sHHQ")
"""Magic, version, bytes of the header, bytes of all entries."""
ENTRY = struct.Struct("<HHIQ12xI")
"""Kind, version, bytes of the entry's header, bytes of the code, and the architecture."""


class Entry(NamedTuple):
    """An entry of a fat binary; `data` includes the entry's header."""

    kind: int
    architecture: int
    data: bytes


def hopper(entries: list[Entry]) -> bytes:
    """Returns the entries with Hopper's machine code, or with Hopper's PTX if there is none; empty without either."""
    own = [entry for entry in entries if entry.architecture == HOPPER]
    return b"".join(entry.data for entry in [e for e in own if e.kind == MACHINE_CODE] or own)


def shrink_wheel(source: Path, target: Path) -> None:
    """Writes a copy of a wheel with Hopper's device code only."""
    new = target.with_name(f".{target.name}")
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as after:
        for item in before.infolist():
            data = before.read(item)
            after.writestr(item, shrink(data) if ".so" in item.filename else data, zipfile.ZIP_DEFLATED)
    new.replace(target)


def shrink(data: bytes, choose: Callable[[list[Entry]], bytes] = hopper) -> bytes:
    """Returns a shared object of the same length, with the chosen entries of each fat binary.

    A fat binary stays unchanged if `choose` returns nothing.
    """
    image = bytearray(data)
    for start, end, entries in _fat_binaries(data):
        if kept := choose(entries):
            first = start + HEADER.size
            image[first:end] = kept + bytes(end - first - len(kept))
            struct.pack_into("<Q", image, start + 8, len(kept))
    return bytes(image)


def smallest_foreign(data: bytes) -> bytes:
    """Returns a shared object's smallest entry of machine code for another GPU than Hopper; empty if there is none."""
    entries = [entry for _, _, some in _fat_binaries(data) for entry in some]
    foreign = [e.data for e in entries if e.kind == MACHINE_CODE and e.architecture != HOPPER]
    return min(foreign, key=len, default=b"")


def _fat_binaries(data: bytes) -> Iterator[tuple[int, int, list[Entry]]]:
    """Returns begin, end and entries of each fat binary with entries."""
    start = 0
    while (start := data.find(MAGIC, start)) >= 0:
        _, _, header, size = HEADER.unpack_from(data, start) if start + HEADER.size <= len(data) else (0, 0, 0, 0)
        end = start + header + size
        if header != HEADER.size or end > len(data):  # these four bytes are no fat binary
            start += len(MAGIC)
            continue
        if entries := _entries(data, start + header, end):
            yield start, end, entries
        start = end


def _entries(data: bytes, at: int, end: int) -> list[Entry]:
    """Returns the entries of a fat binary; an empty list if the entries do not fill the space."""
    entries = []
    while at < end:
        if at + ENTRY.size > end:
            return []
        kind, _, header, size, architecture = ENTRY.unpack_from(data, at)
        if not 0 < header <= 4096 or at + header + size > end:
            return []
        entries.append(Entry(kind, architecture, data[at : at + header + size]))
        at += header + size
    return entries
