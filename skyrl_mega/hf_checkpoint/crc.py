"""CRC-32 of bytes read in pieces, in any order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32, with the lowest power in the highest bit."""
_ONE = 1 << 31
"""The polynomial 1."""


def joined(pieces: Iterable[tuple[int, int]]) -> int:
    """Returns the CRC-32 of the concatenation of pieces, from (number of bytes, CRC-32) of each piece in order; 0
    without pieces."""
    crc = 0
    for length, piece_crc in pieces:
        crc = _times(_shift(length), crc) ^ piece_crc
    return crc


@cache
def _shift(length: int) -> int:
    """Returns the factor of a CRC-32 when `length` more bytes follow: x to the power of the number of bits."""
    power, factor, remaining = 1 << 23, _ONE, length  # x^8: one byte
    while remaining:
        if remaining & 1:
            factor = _times(power, factor)
        power, remaining = _times(power, power), remaining >> 1
    return factor


def _times(a: int, b: int) -> int:
    """Returns the product of two polynomials over GF(2), modulo the polynomial of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
