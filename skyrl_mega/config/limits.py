"""Constants that several rooms need. Imports nothing: sandboxed programs read it with the standard library alone."""

from __future__ import annotations

ENVIRONMENT_WORKERS = 64
"""Environment steps at once where `environment.workers` does not say."""
SYNC_BUCKETS = 3
"""Buckets of the weight sync in one process at most: what is sent, received and handed on together."""
ENGINE_STEP_TOKENS = 8192
"""Tokens of one engine step at most, or the longest sequence where that is longer."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of a model's type, `model.dtype`."""
    return 4 if dtype == "float32" else 2
