"""GPUs: facts from NVML and the kernel's log, and the resulting findings."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from skyrl_mega.cluster import devices
from skyrl_mega.cluster.devices import TorchView
from skyrl_mega.preflight import gpus
from tests.preflight import nvml
from tests.preflight.nvml import Device, Nvml


def findings(*devices: Device, wanted: int = 1, xids: Any = ()) -> list[tuple[str, str]]:
    facts = gpus.gather(Nvml(list(devices)))
    facts = gpus.GpuFacts(facts.driver, facts.gpus, facts.lost, xids, facts.error)
    return [(f.status, f.text) for f in gpus.check({"a": facts}, wanted)]


def test_healthy_empty_gpus() -> None:
    library = Nvml()
    facts = gpus.gather(library, lambda: TorchView("2.13.0", "13.0", True))
    assert library.running == 0
    assert (facts.driver, len(facts.gpus), facts.error, facts.lost) == ("580.95.05", 8, None, ())
    assert facts.gpus[3].bus == "00000000:03:00.0" and facts.gpus[3].memory_bytes == 85520809984
    assert findings(*[Device()] * 8, wanted=8) == []


def test_the_stand_in_has_the_librarys_names() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name, value in vars(Nvml).items():
        if name.startswith("nvml"):
            ours = list(inspect.signature(value).parameters)[1:]
            theirs = list(inspect.signature(getattr(pynvml, name)).parameters)
            assert len(ours) <= len(theirs), name
        elif name.startswith("NVMLError"):
            assert issubclass(getattr(pynvml, name), pynvml.NVMLError), name
        elif name.startswith("NVML_"):
            assert getattr(pynvml, name) == value, name
    for bit, reason in ((0x8, "HwSlowdown"), (0x20, "SwThermalSlowdown"), (0x40, "HwThermalSlowdown")):
        assert getattr(pynvml, f"nvmlClocksEventReason{reason}") == bit and bit in gpus.CLOCK_FAULTS


@pytest.mark.parametrize(
    "device, words",
    [
        (Device(ecc=2), "GPU 0: 2 uncorrected ECC errors"),
        (Device(remapped=(0, 1, 1, 0)), "GPU 0: memory rows wait to be remapped"),
        (Device(remapped=(0, 1, 0, 1)), "GPU 0: row remapping failed"),
        (Device(reasons=0x40 | 0x4), "GPU 0: clocks are reduced: too hot (hardware)"),
        (Device(reasons=0x80), "GPU 0: clocks are reduced: power brake"),
        (Device(processes=(4242, 77)), "GPU 0: processes 4242, 77 compute on it"),
        (Device(memory=(80 << 30, 3 << 30)), "GPU 0: 3.0 GiB of its memory are in use"),
        (Device(name=nvml.NVMLError_GpuIsLost("GPU is lost")), "GPU 0: GPU is lost; drain"),  # type: ignore[arg-type]
    ],
)
def test_a_gpu_that_is_not_fit_is_named(device: Device, words: str) -> None:
    problems = findings(device, wanted=0)
    assert [status for status, _ in problems] == ["bad"]
    assert words in problems[0][1]


def test_what_a_device_does_not_tell_is_no_fault() -> None:
    no = nvml.NVMLError_NotSupported("Not Supported")
    old = nvml.NVMLError_FunctionNotFound("Function Not Found")
    assert findings(Device(ecc=no, remapped=no, processes=no, reasons=old)) == []
    assert findings(Device(reasons=0x1 | 0x4)) == []  # idle and power cap are no faults


def test_missing_and_other_gpus() -> None:
    assert findings(*[Device()] * 7, wanted=8) == [("bad", "7 GPUs answer, 8 are wanted (cluster.gpus_per_node)")]
    facts = {
        node: gpus.GpuFacts("1", gpus.gather(Nvml([Device(name=name)])).gpus)
        for node, name in (("a", "H200"), ("b", "H100"), ("c", "H100"))
    }
    problems = gpus.check(facts, 1)
    assert [(f.node, f.status, f.text) for f in problems] == [("a", "warn", "GPU 0: is a H200, other nodes have H100")]


def test_no_driver() -> None:
    facts = gpus.gather(Nvml(start=nvml.NVMLError_LibraryNotFound("NVML Shared Library Not Found")))
    [finding] = gpus.check({"a": facts}, 8)
    assert finding.text == "NVML does not start: NVML Shared Library Not Found"


@pytest.mark.parametrize(
    "torch, driver, expected",
    [
        (TorchView("2.13.0", "13.0", True), "580.95.05", []),
        (
            TorchView("2.13.0+cpu", None, False),
            "580.95.05",
            [("bad", f"torch 2.13.0+cpu is built without CUDA; {devices.REMEDY}")],
        ),
        (
            TorchView("2.13.0", "13.0", False),
            "570.86.15",
            [("bad", "torch 2.13.0 is built for CUDA 13.0, which needs driver 580; this one is 570.86.15")],
        ),
        (
            TorchView("2.13.0", "13.0", True),
            "570.86.15",
            [
                (
                    "warn",
                    "driver 570.86.15 is older than 580, CUDA 13.0 runs by its compatibility library; update the "
                    "driver if programs fail",
                )
            ],
        ),
        (
            TorchView("2.13.0", "13.0", False, "CUDA initialization: error 802"),
            "580.95.05",
            [("bad", "torch 2.13.0 (CUDA 13.0) sees none of them: CUDA initialization: error 802")],
        ),
    ],
)
def test_what_torch_makes_of_them(torch: TorchView, driver: str, expected: list[tuple[str, str]]) -> None:
    library = Nvml([Device()], driver=driver)
    facts = gpus.gather(library, lambda: torch)
    problems = gpus.check({"a": replace(facts, xids=())}, 1)
    assert [(f.status, f.text) for f in problems] == expected


KMSG = [
    "4,1,100000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.95.05",
    "3,2,5000000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.",  # long ago
    "3,3,99990000000,-;NVRM: Xid (PCI:0000:3d:00): 48, pid='<unknown>', name=<unknown>, DBE",
    "3,4,99995000000,-;NVRM: Xid (PCI:0000:3d:00): 13, pid=77, Graphics Exception",
    "6,5,99995000001,-;usb 1-1: Xid (PCI:0000:00:00): 48 is no line of the driver",
]


def test_xids_of_the_kernels_log() -> None:
    recent = gpus.parse_xids(KMSG, uptime_s=100_000.0)
    assert recent == (("0000:3d:00", 48), ("0000:3d:00", 13))
    problems = findings(Device(), xids=recent)
    assert problems == [
        ("bad", "Xid 48 (double-bit ECC error) of 0000:3d:00 in the last 24 h; reset or drain the node")
    ]
    assert [status for status, _ in findings(Device(), xids=None)] == ["warn"]
