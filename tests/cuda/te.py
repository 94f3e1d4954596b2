"""Transformer Engine's own Python over a stub of its compiled extension, so that its classes can be built on a CPU.

The wheel `transformer-engine` is Python alone; `requirements/install.sh` puts it into a folder that nobody imports
from, for megatron-core cannot be imported while it is there without its extension. `install` is for a process of its
own: it changes what `import transformer_engine` and `torch.cuda` mean for good. Parameters, attributes, sharded state
and everything else that is decided in Python are real; nothing computes.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import MagicMock

FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "rehearsal"
"""Where the wheel is, as `requirements/install.sh` has put it."""

DTYPES = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")
HOPPER = 9, 0
"""Compute capability."""
BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}


def absent() -> str:
    """Why the rehearsal cannot run here; '' where it can."""
    if (FOLDER / "transformer_engine").is_dir():
        return ""
    return f"{FOLDER} has no transformer_engine: `make test` puts it there where a package index has it"


def install(
    kernels: Mapping[str, Callable[..., Any]] = MappingProxyType({}), capability: tuple[int, int] = HOPPER
) -> None:
    """Makes `transformer_engine` importable in this process, over a stub, and CUDA apparently there.

    Call it before megatron-core is imported, then `skyrl_mega.megatron.cpu.stand_in`.

    Args:
        kernels: Functions of the extension that compute (`te_kernels`), by name; all others are mocks.
        capability: Of the device that is apparently there.
    """
    import torch

    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own way to be imported without its libraries
    sys.path.insert(0, str(FOLDER))
    sys.modules["transformer_engine_torch"] = extension = _extension()
    for name, kernel in kernels.items():
        setattr(extension, name, kernel)
    for name in ("onnx", "onnxscript"):
        sys.modules[name] = _Stub(name)

    package: Any = types.ModuleType("transformer_engine")
    package.__path__ = [str(FOLDER / "transformer_engine")]
    package.__version__ = version("transformer-engine")
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    sys.modules["transformer_engine"] = package
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.device_count = lambda: 1
    torch.version.cuda = "13.0"  # as in the lock
    package.common = importlib.import_module("transformer_engine.common")
    package.common.load_framework_extension = lambda *_: None
    package.pytorch = importlib.import_module("transformer_engine.pytorch")


class _Number:
    """An enumeration of pybind11's, whose members can be made into a number and are none."""

    value: int

    def __int__(self) -> int:
        return self.value


class _Stub(types.ModuleType):
    """A module of which every name is a mock."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def _extension() -> _Stub:
    """`transformer_engine_torch`, with what its importers compare with their own lists."""
    stub: Any = _Stub("transformer_engine_torch")
    stub.DType = enum.IntEnum("DType", {name: i for i, name in enumerate(DTYPES)})
    stub.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", BACKENDS)
    stub.NVTERoutingMapFormat = enum.Enum("NVTERoutingMapFormat", {"BYTEMAP": 0, "BITMAP_U8": 1}, type=_Number)
    stub.FP8FwdTensors = enum.IntEnum("FP8FwdTensors", {f"GEMM{g}_{x}": 3 * (g - 1) + i for g in (1, 2, 3)
        for i, x in enumerate(("INPUT", "WEIGHT", "OUTPUT"))})  # fmt: skip
    stub.FP8BwdTensors = enum.IntEnum("FP8BwdTensors", {f"GRAD_{x}{g}": 2 * (g - 1) + i for g in (1, 2, 3)
        for i, x in enumerate(("OUTPUT", "INPUT"))})  # fmt: skip
    return stub
