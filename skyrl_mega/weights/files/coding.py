"""The stored form of a chunk of weights: the bytes themselves, or the exact difference from an earlier version.

All arithmetic is on bit patterns, as unsigned words of the element's size, so every form restores every bit: the
difference of two patterns wraps around, and NaN is a pattern like any other. Words are stored in planes (all first
bytes, then all second bytes, …), because bytes of the same significance compress best. A plane is stored as it is if a
sample does not compress, such as the lower half of a mantissa, else by zstd at its fastest level.

| form | payload | used |
|---|---|---|
| `SAME` | nothing | no element changed |
| `PLAIN` | planes of the words | full images |
| `SPARSE` | planes of the gaps between changed elements, planes of their differences | few elements changed |
| `DENSE` | planes of all differences | many elements changed |
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""Bytes of a chunk, [n], contiguous."""
Words = NDArray[np.unsignedinteger]
"""Elements of a chunk as unsigned words."""

SAME, PLAIN, SPARSE, DENSE = range(4)
RELATIVE = frozenset({SAME, SPARSE, DENSE})
"""Forms that need the chunk's earlier bytes."""

SPARSE_SHARE = 0.3
"""Largest share of changed elements stored by position. Above, the planes of all differences take less time."""
LEVEL = 1
"""Level of zstd: higher levels do not shorten differences, and are slower."""
SAMPLE_BYTES = 1 << 15
"""Bytes of a plane that are compressed to decide if the plane is."""
WORTHWHILE = 0.9
"""Largest ratio of compressed to plain bytes of a sample that is worth the time to compress."""
_LENGTH_BYTES = 4
"""Bytes of a length in a payload."""


class WrongPayload(ValueError):
    """A payload that is no encoding of a chunk of the expected size."""


@dataclass(frozen=True)
class Encoded:
    """A chunk in its stored form."""

    form: int
    """`SAME`, `PLAIN`, `SPARSE` or `DENSE`."""
    payload: bytes
    """The stored bytes."""
    changed: int
    """Number of changed elements; all without an earlier version."""


def encode(new: Bytes, old: Bytes | None, itemsize: int) -> Encoded:
    """Returns the stored form of a chunk: `PLAIN`, the bytes compressed, without `old`; `SAME`, no bytes, if nothing
    changed; else the exact differences, `SPARSE`, or `DENSE` if more than `SPARSE_SHARE` of the elements changed.

    Args:
        new: Bytes of the chunk.
        old: As many bytes of the chunk in the version that readers have; None for `PLAIN`.
        itemsize: Bytes of an element: 1, 2 or 4.
    """
    words = as_words(new, itemsize)
    if old is None:
        return Encoded(PLAIN, _packed(_planes(words)), len(words))
    differences = words - as_words(old, itemsize)
    changed = np.flatnonzero(differences)
    if not len(changed):
        return Encoded(SAME, b"", 0)
    if len(changed) > SPARSE_SHARE * len(words):
        return Encoded(DENSE, _packed(_planes(_folded(differences))), len(changed))
    gaps = np.diff(changed, prepend=-1).astype(np.uint32) - np.uint32(1)
    payload = _packed([*_planes(gaps), *_planes(_folded(differences[changed]))])
    return Encoded(SPARSE, _length(len(changed)) + payload, len(changed))


def decode(form: int, payload: memoryview, size: int, itemsize: int) -> Words:
    """Returns the words of a chunk of `size` bytes: for a form of `RELATIVE` the differences to be added to the earlier
    words, else the words themselves.

    Args:
        form: Form of the payload.
        payload: The stored bytes.
        size: Bytes of the chunk.
        itemsize: Bytes of an element.

    Raises:
        WrongPayload: The payload has another size, or positions outside the chunk.
    """
    count, dtype = size // itemsize, np.dtype(f"u{itemsize}")
    if form == SAME and not payload:
        return np.zeros(count, dtype)
    if form == PLAIN:
        return _joined(_unpacked(payload, itemsize, count), dtype)
    if form == DENSE:
        return _unfolded(_joined(_unpacked(payload, itemsize, count), dtype))
    changed = int.from_bytes(payload[:_LENGTH_BYTES], "little")
    if form != SPARSE or changed > count:
        raise WrongPayload(f"form {form}, {changed} changes of {count} elements")
    planes = _unpacked(payload[_LENGTH_BYTES:], 4 + itemsize, changed)
    gaps = _joined(planes[:4], np.dtype(np.uint32))
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if changed and places[-1] >= count:
        raise WrongPayload(f"a change at element {places[-1]} of {count}")
    words = np.zeros(count, dtype)
    words[places] = _unfolded(_joined(planes[4:], dtype))
    return words


def as_words(data: Bytes, itemsize: int) -> Words:
    """Returns bytes as unsigned words of `itemsize` bytes, without a copy."""
    return data.view(np.dtype(f"u{itemsize}"))


def _folded(differences: Words) -> Words:
    """Returns small words for small differences of either sign: 0, -1, 1, -2 … become 0, 1, 2, 3 …"""
    bits = np.dtype(differences.dtype).itemsize * 8
    signed = differences.view(f"i{bits // 8}")
    folded: Words = ((signed << 1) ^ (signed >> (bits - 1))).view(differences.dtype)
    return folded


def _unfolded(folded: Words) -> Words:
    one = folded.dtype.type(1)
    words: Words = (folded >> one) ^ (~(folded & one) + one)
    return words


def _planes(words: Words) -> list[Bytes]:
    data = words.view(np.uint8)
    return [np.ascontiguousarray(data[place :: words.itemsize]) for place in range(words.itemsize)]


def _joined(planes: Sequence[Bytes], dtype: np.dtype[np.unsignedinteger]) -> Words:
    words = np.empty(len(planes[0]), dtype)
    data = words.view(np.uint8)
    for place, plane in enumerate(planes):
        data[place :: dtype.itemsize] = plane
    return words


def _packed(planes: Sequence[Bytes]) -> bytes:
    """Returns the planes one after another, each after its length; a plane of its plain length is not compressed."""
    parts = []
    for plane in planes:
        sample = plane[:SAMPLE_BYTES]
        data: Any = plane
        if len(_zstd().compress(sample, asbytes=True)) <= WORTHWHILE * len(sample):
            compressed = _zstd().compress(plane, asbytes=True)
            data = compressed if len(compressed) < len(plane) else plane
        parts += [_length(len(data)), data]
    return b"".join(parts)


def _unpacked(payload: memoryview, planes: int, size: int) -> list[Bytes]:
    """Returns `planes` planes of `size` bytes.

    Raises:
        WrongPayload: The payload has another size.
    """
    result, at = [], 0
    for _ in range(planes):
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(payload[at:begin], "little")
        data = payload[begin:at]
        if at > len(payload) or len(data) > size:
            raise WrongPayload(f"a plane of {len(data)} bytes, {size} expected")
        try:
            plain = data if len(data) == size else _zstd().decompress(data, size)
        except (OSError, ValueError) as error:  # pyarrow's errors
            raise WrongPayload(str(error)) from error
        result.append(np.frombuffer(plain, np.uint8))
    if at != len(payload):
        raise WrongPayload(f"{len(payload) - at} bytes after the last plane")
    return result


def _length(number: int) -> bytes:
    return number.to_bytes(_LENGTH_BYTES, "little")


def _zstd() -> pa.Codec:
    """Returns this thread's codec: Arrow does not promise that threads may share a codec."""
    if not hasattr(_codecs, "zstd"):
        _codecs.zstd = pa.Codec("zstd", compression_level=LEVEL)
    return _codecs.zstd


_codecs = threading.local()
