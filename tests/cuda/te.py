"""Transformer Engine's Python over a stub of its compiled extension, to build its classes on a CPU.

The wheel `transformer-engine` is pure Python. `requirements/install.sh` installs the wheel outside the import path,
because megatron-core cannot be imported beside a Transformer Engine without extension. `install` needs a separate
process: the change to `import transformer_engine` and `torch.cuda` is permanent. Everything decided in Python is real,
such as parameters, attributes and sharded state; nothing computes.
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

from tests.cuda import fla_kernels

FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "rehearsal"
"""Folder of the wheel, written by `requirements/install.sh`."""

DTYPES = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")
HOPPER = 9, 0
"""Compute capability of Hopper."""
BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}


def absent() -> str:
    """Returns the reason why the rehearsal cannot run here; '' if it can."""
    if (FOLDER / "transformer_engine").is_dir():
        return ""
    return f"{FOLDER} has no transformer_engine: `make test` puts it there where a package index has it"


def install(
    kernels: Mapping[str, Callable[..., Any]] = MappingProxyType({}), capability: tuple[int, int] = HOPPER
) -> None:
    """Makes `transformer_engine` importable in this process, over a stub, and simulates CUDA.

    Must run before the import of megatron-core, followed by `skyrl_mega.megatron.cpu.stand_in`.

    Args:
        kernels: Functions of the extension that compute (`te_kernels`), by name; all other functions are mocks.
        capability: Compute capability of the simulated device.
    """
    import torch

    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # Transformer Engine's switch for an import without libraries
    sys.path.insert(0, str(FOLDER))
    sys.modules["transformer_engine_torch"] = extension = _extension()
    for name, kernel in kernels.items():
        setattr(extension, name, kernel)
    fla_kernels.install()
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
    torch.version.cuda = "13.0"  # as in the lock file
    package.common = importlib.import_module("transformer_engine.common")
    package.common.load_framework_extension = lambda *_: None
    package.pytorch = importlib.import_module("transformer_engine.pytorch")


class _Number:
    """Member of a pybind11 enumeration: convertible to a number, but not a number."""

    value: int

    def __int__(self) -> int:
        return self.value


class _Stub(types.ModuleType):
    """Module with a mock for every name."""

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
    """Returns a stub of `transformer_engine_torch` with the enumerations checked by its importers."""
    stub: Any = _Stub("transformer_engine_torch")
    stub.DType = enum.IntEnum("DType", {name: i for i, name in enumerate(DTYPES)})
    stub.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", BACKENDS)
    stub.NVTERoutingMapFormat = enum.Enum("NVTERoutingMapFormat", {"BYTEMAP": 0, "BITMAP_U8": 1}, type=_Number)
    stub.FP8FwdTensors = enum.IntEnum("FP8FwdTensors", {f"GEMM{g}_{x}": 3 * (g - 1) + i for g in (1, 2, 3)
        for i, x in enumerate(("INPUT", "WEIGHT", "OUTPUT"))})  # fmt: skip
    stub.FP8BwdTensors = enum.IntEnum("FP8BwdTensors", {f"GRAD_{x}{g}": 2 * (g - 1) + i for g in (1, 2, 3)
        for i, x in enumerate(("OUTPUT", "INPUT"))})  # fmt: skip
    return stub
