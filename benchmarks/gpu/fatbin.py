"""Device code in CUDA's shared objects: removes the code for all GPUs except Hopper from a wheel.

A fat binary has a header and entries, each for one architecture. The kept entries move to the front, the header gets
the total length, and zeros fill the rest and compress well. Offsets in the program's tables stay the same.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

ARCHITECTURES = frozenset({90})
MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<4sHHQ")
"""Magic, version, bytes of the header, bytes of all entries."""
ENTRY = struct.Struct("<HHIQ12xI")
"""Kind, version, bytes of the entry's header, bytes of the code, and the architecture."""


def shrink_wheel(source: Path, target: Path, keep: frozenset[int] = ARCHITECTURES) -> None:
    """Writes a copy of a wheel with device code for the given architectures only."""
    new = target.with_name(f".{target.name}")
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as after:
        for item in before.infolist():
            data = before.read(item)
            after.writestr(item, shrink(data, keep) if ".so" in item.filename else data, zipfile.ZIP_DEFLATED)
    new.replace(target)


def shrink(data: bytes, keep: frozenset[int]) -> bytes:
    """Returns a shared object of the same length. A fat binary without any of these architectures stays unchanged."""
    image, start = bytearray(data), 0
    while (start := image.find(MAGIC, start)) >= 0:
        _, _, header, size = HEADER.unpack_from(image, start) if start + HEADER.size <= len(image) else (0, 0, 0, 0)
        first, end = start + header, start + header + size
        if header != HEADER.size or end > len(image):  # these four bytes are no fat binary
            start += len(MAGIC)
            continue
        entries = _entries(image, first, end)
        if kept := b"".join(bytes(image[a:b]) for a, b, architecture in entries if architecture in keep):
            image[first:end] = kept + bytes(size - len(kept))
            struct.pack_into("<Q", image, start + 8, len(kept))
        start = end
    return bytes(image)


def _entries(image: bytearray, at: int, end: int) -> list[tuple[int, int, int]]:
    """Returns begin, end and architecture of each entry; an empty list if the entries do not fill the space."""
    entries = []
    while at < end:
        if at + ENTRY.size > end:
            return []
        _, _, header, size, architecture = ENTRY.unpack_from(image, at)
        if not 0 < header <= 4096 or at + header + size > end:
            return []
        entries.append((at, at + header + size, architecture))
        at += header + size
    return entries
