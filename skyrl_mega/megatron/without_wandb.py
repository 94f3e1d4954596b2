"""Import of megatron-core without wandb, which megatron-core imports if installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_wandb() -> Iterator[None]:
    """Makes `import wandb` raise ImportError inside the context, for a process's first import of megatron-core.

    megatron-core 0.16 imports wandb in timers and inference code, for logging not used here, and works without. The
    import takes up to a second and creates two temporary folders, left behind if the process is killed. An already
    imported wandb stays unchanged. No other thread of the process may import wandb inside the context.
    """
    modules: dict[str, Any] = sys.modules
    if "wandb" in modules:
        yield
        return
    modules["wandb"] = None  # makes Python raise ImportError
    try:
        yield
    finally:
        del modules["wandb"]
