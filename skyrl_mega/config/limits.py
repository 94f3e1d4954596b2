"""Constants that several rooms need. Imports nothing: sandboxed programs read it with the standard library alone."""

from __future__ import annotations

ENVIRONMENT_WORKERS = 64
"""Environment steps at once where `environment.workers` does not say."""
SYNC_BUCKETS = 3
"""Buckets of the weight sync in one process at most: what is sent, received and handed on together."""
ENGINE_STEP_TOKENS = 8192
"""Tokens of one engine step at most, or the longest sequence where that is longer."""

OPTIMIZER_PIECE = 256 * 2**20
"""Bytes of master weights and moments that go to the device at once (`policy.optimizer.streamed`)."""
OPTIMIZER_PIECES = 3
"""Of them on the device at most: one that comes, one that is stepped, one that leaves."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of a model's type, `model.dtype`."""
    return 4 if dtype == "float32" else 2
