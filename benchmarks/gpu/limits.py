"""Limits of the machine, measured in the same process as the compared figures."""

from __future__ import annotations

import torch

from benchmarks.gpu.proof import Bench


def copy_gb_s(bench: Bench) -> float:
    """Returns the rate of a copy within the device's memory, in GB/s (each byte is read once and written once)."""
    source = torch.zeros((2 << 30) if bench.cuda else (32 << 20), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return source.nbytes / bench.seconds(lambda: target.copy_(source)) / 1e9


def gemm_tflops(bench: Bench, dtype: torch.dtype = torch.bfloat16) -> float:
    """Returns the rate of a large square matrix product of random numbers, in TFLOP/s."""
    n = 8192 if bench.cuda else 256
    a, b = (torch.randn(n, n, device=bench.device).to(dtype) for _ in range(2))
    return 2 * n**3 / bench.seconds(lambda: a @ b, repeats=10, warm=3) / 1e12


def host_gb_s(bench: Bench, *, pinned: bool, to_device: bool = True) -> float:
    """Returns the rate of a single copy between host and device, in GB/s."""
    host = torch.zeros((1 << 30) if bench.cuda else (16 << 20), dtype=torch.uint8)
    host = host.pin_memory() if pinned and bench.cuda else host
    on_device = torch.empty_like(host, device=bench.device)

    def move() -> None:
        if to_device:
            on_device.copy_(host, non_blocking=True)
        else:
            host.copy_(on_device, non_blocking=True)

    return host.nbytes / bench.seconds(move, repeats=3) / 1e9
