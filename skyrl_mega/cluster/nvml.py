"""Access to NVML, NVIDIA's library for information about GPUs, for the duration of a `with` block."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


class NvmlUnavailable(Exception):
    """NVML is not available; the message says why."""


@contextlib.contextmanager
def open_nvml(nvml: Any = None) -> Iterator[Any]:
    """Yields nvidia-ml-py's module, initialised, and shuts NVML down at the end of the `with` block.

    Args:
        nvml: The module `pynvml` or a substitute for tests; None imports the module.

    Raises:
        NvmlUnavailable: The package is not installed, or there is no driver.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            raise NvmlUnavailable("nvidia-ml-py is not installed; pip install nvidia-ml-py") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML does not start: {error}") from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()
