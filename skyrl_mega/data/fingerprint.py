"""Fingerprints of data files, to detect changed contents under the same names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

BYTES = 16
"""Length of a fingerprint, in bytes."""


def fingerprint(files: Sequence[str | Path]) -> str:
    """Returns a hash (32 hex digits) of the contents of files, in order. The files' names do not count. Raises OSError
    if a file cannot be read."""
    digest = hashlib.blake2b(digest_size=BYTES)
    for file in files:
        with Path(file).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=BYTES)).digest())
    return digest.hexdigest()
