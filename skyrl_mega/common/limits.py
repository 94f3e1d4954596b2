"""Constants shared by several packages. Imports nothing, because sandboxed programs read this file with only the
standard library installed."""

from __future__ import annotations

ENVIRONMENT_WORKERS = 64
"""Default of `environment.workers`: concurrent environment calls."""
CONTAINERS = 64
"""Default of the option `containers`: concurrent containers of each process that runs trajectories."""
CONTAINER_LIFETIME_S = 7200
"""Default of the option `lifetime_s`: seconds after which a container ends by itself."""
SYNC_BUCKETS = 3
"""Maximum number of weight sync buckets per process: sent, received and forwarded together."""
ENGINE_STEP_TOKENS = 8192
"""Maximum number of tokens per engine step, unless the longest sequence is longer."""

OPTIMIZER_PIECE = 256 * 2**20
"""Bytes of master weights and moments transferred to the device at once (`policy.optimizer.streamed`)."""
OPTIMIZER_PIECES = 3
"""Maximum number of optimizer pieces on the device: arriving, being stepped, leaving."""


def itemsize(dtype: str) -> int:
    """Returns the bytes per element of a `model.dtype`: 4 for float32, otherwise 2."""
    return 4 if dtype == "float32" else 2
