"""NVML, the library that tells of a machine's GPUs, for the length of a `with` block."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


class NoNvml(Exception):
    """NVML cannot be asked; says why."""


@contextlib.contextmanager
def opened(nvml: Any = None) -> Iterator[Any]:
    """nvidia-ml-py's module, started.

    Args:
        nvml: The module `pynvml`, or what stands for it in tests; None imports it.

    Raises:
        NoNvml: It is not installed, or there is no driver.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            raise NoNvml("nvidia-ml-py is not installed; pip install nvidia-ml-py") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoNvml(f"NVML does not start: {error}") from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()
