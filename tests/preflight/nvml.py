"""A stand-in for nvidia-ml-py's module: the functions used by a preflight, answered from a list of devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0


class NVMLError(Exception):
    """An error like `pynvml.NVMLError`."""


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


@dataclass
class Device:
    """The answers of a GPU; exceptions are raised."""

    name: str = "NVIDIA H100 80GB HBM3"
    memory: Any = (85520809984, 600 << 20)
    """Memory in bytes: total, used."""
    processes: Any = ()
    ecc: Any = 0
    remapped: Any = (0, 0, 0, 0)
    reasons: Any = 0x1
    """Clock event reasons; 0x1 means idle."""
    cpus: Any = ()
    """The nearest CPUs."""


@dataclass
class Nvml:
    """The stand-in module. A test compares the names of functions and errors with the real module."""

    devices: list[Device] = field(default_factory=lambda: [Device() for _ in range(8)])
    start: Exception | None = None
    running: int = 0
    driver: str = "580.95.05"

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    NVML_VOLATILE_ECC = NVML_VOLATILE_ECC
    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVMLError_NoPermission = NVMLError_NoPermission
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound
    NVMLError_GpuIsLost = NVMLError_GpuIsLost

    def nvmlInit(self) -> None:
        if self.start:
            raise self.start
        self.running += 1

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetCpuAffinity(self, handle: int, cpuSetSize: int) -> list[int]:
        cpus = self._answer(self.devices[handle].cpus)
        return [sum(1 << cpu % 64 for cpu in cpus if cpu // 64 == word) for word in range(cpuSetSize)]

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._answer(self.devices[handle].name)

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        total, used = self._answer(self.devices[handle].memory)
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 30) for pid in self._answer(self.devices[handle].processes)]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, error: int, counter: int) -> int:
        assert (error, counter) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
        return int(self._answer(self.devices[handle].ecc))

    def nvmlDeviceGetRemappedRows(self, handle: int) -> Any:
        return self._answer(self.devices[handle].remapped)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return int(self._answer(self.devices[handle].reasons))

    @staticmethod
    def _answer(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value
