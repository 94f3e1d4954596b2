"""Proof 1: the GPU's properties and abilities; a driver reading the properties leaves no process on the GPU."""

from __future__ import annotations

import shutil
import subprocess

import torch

from benchmarks.gpu import limits
from benchmarks.gpu.proof import Bench
from skyrl_mega.preflight.gpus import Gpu, gather

CONTEXT_BYTES = 64 << 20
"""Smallest size of a CUDA context. A real context takes several hundred MiB; foreign programs change less."""


def prove(bench: Bench) -> None:
    if bench.cuda:
        _nobody(bench)
        _facts(bench)
    else:
        bench.left_out("NVML before and after a CUDA context; names and sizes of the GPU")
    bench.figure("copy within memory", limits.copy_gb_s(bench), "GB/s")
    bench.figure("matrix product, bfloat16", limits.gemm_tflops(bench), "TFLOP/s")
    for pinned in (True, False):
        name = "pinned" if pinned else "pageable"
        bench.figure(f"{name} host memory to device", limits.host_gb_s(bench, pinned=pinned), "GB/s")
    bench.figure("device to pinned host memory", limits.host_gb_s(bench, pinned=True, to_device=False), "GB/s")


def _nobody(bench: Bench) -> None:
    """Reads the GPU's properties as `cli.prepare.with_device` does, and checks that the preflight sees no process of
    it."""
    before = _gpu()
    bench.holds("torch sees a CUDA device", torch.cuda.is_available())
    torch.cuda.get_device_properties(0)
    queried = _gpu()
    torch.zeros(1, device=bench.device)
    used = _gpu()
    if before is None or queried is None or used is None:
        bench.left_out("who is on the GPU: NVML does not answer here")
        return
    bench.holds("asking for the GPU's properties leaves no process on it",
                set(queried.processes) <= set(before.processes), queried.processes)  # fmt: skip
    bench.figure("memory taken by asking", (queried.used_bytes - before.used_bytes) / 2**20, "MiB",
                 at_most=CONTEXT_BYTES / 2**20)  # fmt: skip
    # A real context must be visible to NVML, else the check above proves nothing.
    bench.figure("memory of a CUDA context", (used.used_bytes - queried.used_bytes) / 2**20, "MiB",
                 at_least=CONTEXT_BYTES / 2**20)  # fmt: skip
    bench.note("processes that NVML sees", [len(g.processes) for g in (before, queried, used)])


def _gpu() -> Gpu | None:
    facts = gather()
    return facts.gpus[0] if facts.gpus else None


def _facts(bench: Bench) -> None:
    properties = torch.cuda.get_device_properties(0)
    bench.figure("memory of the GPU", properties.total_memory / 2**30, "GiB")
    bench.note("GPU", properties.name)
    bench.note("compute capability", f"{properties.major}.{properties.minor}")
    bench.note("multiprocessors", properties.multi_processor_count)
    bench.note("CUDA of torch", torch.version.cuda)
    bench.note("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    bench.note("cuDNN", torch.backends.cudnn.version())
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    nvcc_version = (
        subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20).stdout if nvcc else ""
    )
    bench.note("nvcc", next((line.strip() for line in nvcc_version.splitlines() if "release" in line), "none"))
