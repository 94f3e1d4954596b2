"""Seeds of the requests' random streams."""

from __future__ import annotations

import hashlib


def stream_seed(name: str) -> int:
    """Returns a 63-bit seed that depends on every character of the name; equal names give equal seeds."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
