"""E4M3 numbers, blocks and boxes computed element by element, in float64 or bytes, without the kernels' formulas."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def e4m3(byte: int) -> float:
    """Returns the value of a byte in the OCP table: sign, 4 bits of exponent with bias 7, 3 of mantissa, no
    infinity."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


FINITE = np.array([e4m3(byte) for byte in range(0x7F)])
"""Every magnitude, indexed by byte."""


def nearest(values: np.ndarray) -> np.ndarray:
    """Returns the bytes of the nearest E4M3 numbers for float64 magnitudes up to 448; ties go to the even byte, signs
    stay."""
    above = np.clip(np.searchsorted(FINITE, np.abs(values)), 1, len(FINITE) - 1)
    low, high = above - 1, above
    to_low, to_high = np.abs(values) - FINITE[low], FINITE[high] - np.abs(values)
    take_low = (to_low < to_high) | ((to_low == to_high) & (low % 2 == 0))
    return np.where(take_low, low, high).astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 7)


def amax(weight: Tensor, row0: int, col0: int) -> np.ndarray:
    """Returns the largest magnitude of each global block, element by element, float64."""
    values = np.abs(weight.double().numpy())
    rows, columns = values.shape
    first = row0 // 128, col0 // 128
    largest = np.zeros(((row0 + rows - 1) // 128 - first[0] + 1, (col0 + columns - 1) // 128 - first[1] + 1))
    i = (np.arange(rows) + row0) // 128 - first[0]
    j = (np.arange(columns) + col0) // 128 - first[1]
    np.maximum.at(largest, (i[:, None], j[None, :]), values)
    return largest


def quantise(weight: Tensor, scale: Tensor, row0: int, col0: int) -> np.ndarray:
    """Returns the bytes. The product with the inverse scale is rounded to float32 once, as users of the format do."""
    i = (np.arange(weight.shape[0]) + row0) // 128 - row0 // 128
    j = (np.arange(weight.shape[1]) + col0) // 128 - col0 // 128
    inverse = (np.float32(1) / scale.numpy())[i[:, None], j[None, :]]
    return nearest((weight.double().numpy() * inverse.astype(np.float64)).astype(np.float32).astype(np.float64))


def dequantise(numbers: np.ndarray, scale: Tensor, row0: int, col0: int) -> np.ndarray:
    """Returns the values in float64."""
    i = (np.arange(numbers.shape[0]) + row0) // 128 - row0 // 128
    j = (np.arange(numbers.shape[1]) + col0) // 128 - col0 // 128
    values = np.array([e4m3(byte) for byte in range(256)])[numbers]
    return values * scale.double().numpy()[i[:, None], j[None, :]]


def packed(views: list[Tensor]) -> bytes:
    """Returns the bytes of the views' elements in sequence."""
    return b"".join(view.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for view in views)


def checksum(box: Tensor) -> int:
    """Returns the checksum, computed word by word in plain integers."""
    data = packed([box])
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return sum(w * (2 * i + 1) * 0x9E3779B97F4A7C15 for i, w in enumerate(words)) % 2**64
