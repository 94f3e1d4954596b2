"""Importing megatron-core without wandb, which it takes wherever it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_wandb() -> Iterator[None]:
    """For a process's first import of megatron-core: `import wandb` raises ImportError meanwhile, and works afterwards.

    megatron-core 0.16 imports it in its timers and its inference code, for a logging that nobody here asks for, and
    does without it where it cannot. The import takes up to a second, and makes two temporary folders that a process
    leaves behind when it is killed. A wandb that has been imported already stays as it is. No other thread of the
    process may import it meanwhile.
    """
    modules: dict[str, Any] = sys.modules
    if "wandb" in modules:
        yield
        return
    modules["wandb"] = None  # Python's own sign for a module that cannot be imported
    try:
        yield
    finally:
        del modules["wandb"]
