"""Published figures of GPUs: memory, peak rates and links, from NVIDIA's data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuFigures:
    """A kind of GPU. Rates are those of NVIDIA's data sheet; GB is 10⁹ bytes."""

    memory_gib: float
    """GiB of memory, as CUDA reports it."""
    tflops: float
    """Dense bfloat16 TFLOP/s; a data sheet's figure with sparsity is halved."""
    memory_gb_s: float
    """Memory bandwidth in GB/s."""
    fabric_gb_s: float
    """GB/s between a GPU and the rest of the node, per direction: NVLink, or PCIe for GPUs without NVLink."""
    device_gb_s: float
    """GB/s of a copy within the memory, assumed as 0.45 of the bandwidth, as for the H100."""
    ray: str
    """The GPU's name in Ray's label `ray.io/accelerator-type`."""


def _gpu(memory_gib: float, tflops: float, memory_gb_s: float, fabric_gb_s: float, ray: str) -> GpuFigures:
    return GpuFigures(memory_gib, tflops, memory_gb_s, fabric_gb_s, 0.45 * memory_gb_s, ray)


GPUS: Mapping[str, GpuFigures] = {
    "H100": _gpu(79.1, 989.0, 3350.0, 450.0, "H100"),
    "H200": _gpu(139.8, 989.0, 4800.0, 450.0, "H200"),
    "H20": _gpu(95.1, 148.0, 4000.0, 450.0, "H20"),
    "B200": _gpu(178.4, 2250.0, 8000.0, 900.0, "B200"),
    "A100": _gpu(79.1, 312.0, 2039.0, 300.0, "A100"),
    "A100-40GB": _gpu(39.4, 312.0, 1555.0, 300.0, "A100"),
    "L40S": _gpu(44.4, 362.0, 864.0, 32.0, "L40S"),
    "L4": _gpu(22.0, 121.0, 300.0, 32.0, "L4"),
}
"""Name → figures: SXM modules of H100, H200, H20, A100 (80 GB, 40 GB) and B200, and the PCIe cards L40S and L4."""
