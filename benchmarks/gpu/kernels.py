"""Proof 2: the Triton kernels, and packing and unpacking a bucket, give the same bits as on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import limits, parts
from benchmarks.gpu.proof import Bench
from benchmarks.gpu.runner import ROOT, there
from skyrl_mega.kernels.boxes import Boxes, regions
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.exchange.exchange import Exchange
from skyrl_mega.weights.fp8.format import Wire, quantised, with_scales
from skyrl_mega.weights.plan.plan import plan
from skyrl_mega.weights.plan.topology import Links, Topology
from skyrl_mega.weights.transports.group import host_store, join

BUCKET_BYTES = 64 << 20
"""Size of a bucket that holds all parts, more than 600."""
WORKERS, TESTS_S = 8, 220
"""Number of pytest processes for `tests/gpu`, and the time limit of the run. A first run compiles kernels for 205 CPU
seconds."""
WIRES = {
    "as it is": (torch.bfloat16, torch.bfloat16, False),
    "converted": (torch.float32, torch.bfloat16, False),
    "as FP8": (torch.bfloat16, torch.bfloat16, True),
}
"""Wire types: dtype at the sender, dtype at the receiver, and True if the weights are quantised for the wire."""


def prove(bench: Bench) -> None:
    """Runs this proof's own checks first, because compiling for `tests/gpu` takes minutes of CPU time."""
    if bench.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined
    _checksums(bench)
    hf = parts.worker_of_30b(tiny_size=True) | {"num_experts": 100, "hidden_size": 320, "moe_intermediate_size": 64}
    cpu = torch.device("cpu")
    for name in WIRES:
        wanted, count = _moved(hf, name, cpu)
        actual, _ = _moved(hf, name, bench.device)
        wrong = sum(int((actual[k].view(torch.uint8) != w.view(torch.uint8)).sum()) for k, w in wanted.items())
        bench.figure(f"bytes of {count} parts, {name}, otherwise than by a CPU", wrong, "bytes", at_most=0)
        zeros = min(float((w != 0).float().mean()) for w in wanted.values())
        bench.holds(f"every parameter has arrived, {name}", zeros > 0.9, zeros)
    _kernels(bench)


def _kernels(bench: Bench) -> None:
    if not there("triton"):
        bench.left_out("the kernels: Triton cannot be imported")
        return
    if bench.cuda and there("pytest"):
        workers = ["-n", str(min(WORKERS, os.cpu_count() or 1))] if there("xdist") else []
        command = [*(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"), *workers, "tests/gpu"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_S)
        lines = (done.stdout + done.stderr).strip().splitlines() or [""]
        bench.holds("tests/gpu passes", done.returncode == 0 and " skipped" not in lines[-1], "\n".join(lines[-15:]))
        return
    from tests.kernels import cases, head_cases

    device = bench.device.type
    cases.fp8_every_byte(device)
    cases.boxes_like_the_reference(device)
    if bench.cuda:  # without pytest: the same cases as in tests/gpu
        cases.fp8_not_a_number(device)
        cases.one_table_for_tensors_that_move(device)
        cases.checksums_like_the_reference(device)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for rows, columns, row0, col0 in (*cases.SHARDS, (768, 2048, 0, 0), (1536, 5000, 77, 300)):
                weight = cases.hard(rows, columns, dtype=dtype, device=device)
                cases.fp8_like_the_reference(weight, row0, col0, dtype)
        for case, kind, near in head_cases.ON_A_GPU:
            head_cases.like_autograd(case, kind, "cuda", by_kernel=True, near=near)
        head_cases.extremes_are_exact("cuda", torch.float32, by_kernel=True)
    bench.holds("the kernels give their references' bits", True)


def _checksums(bench: Bench) -> None:
    """Measures the checksums of a bucket with rows of 192 bytes, the experts' rows at TP8: one launch reads every byte
    once."""
    count, rows = (455, 768) if bench.cuda else (4, 16)
    base = torch.randint(0, 2**15, (count, rows, 192), dtype=torch.int16, device=bench.device)
    views = [matrix[:, 96:] for matrix in base]
    copies = Boxes(regions(views, range(0, count * views[0].nbytes, views[0].nbytes)), base.device)
    rate = copies.nbytes / bench.seconds(lambda: copies.checksums(views)) / 1e9
    copied = 2 * limits.copy_gb_s(bench)
    bench.figure(
        f"checksums of a bucket of {copies.nbytes >> 20} MiB",
        rate,
        "GB/s",
        limit=copied,
        limit_of="bytes read and written by a copy",
    )


def _moved(hf: dict[str, Any], how: str, device: torch.device) -> tuple[dict[str, Tensor], int]:
    """Returns an engine worker's parameters after two syncs within one process, and the number of parts."""
    before, after, fp8 = WIRES[how]
    arch = architecture(hf)
    source, target = arch.megatron_layout(hf, ParallelDims(), "local"), arch.engine_layout(hf, 1, 1)
    names = quantised(target.tensors) if fp8 else frozenset[str]()
    source, target = with_scales(source, names), with_scales(target, names)
    wire = Wire(torch.bfloat16, names)
    copies = plan(source, target, Topology.shared(1, 1, Links(1, 1)), wire.itemsize)
    store = host_store("127.0.0.1", parts.TIMEOUT_S)
    transport = join(store, 0, 1, "process 0", device=device, timeout_s=parts.TIMEOUT_S)
    exchange = Exchange(
        copies,
        transport,
        wire,
        source=0,
        target=0,
        source_layout=source,
        target_layout=target,
        bucket_bytes=BUCKET_BYTES,
        agree=lambda amax: None,
    )
    generator = torch.Generator().manual_seed(5)
    host_params = {
        name: (torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-9, 3, shape, generator=generator)).to(
            before
        )
        for name, shape in source.shards[0].params.items()
        if "_scale_inv" not in name
    }
    sent = {name: p.to(device, copy=True) for name, p in host_params.items()}
    received = {
        name: torch.zeros(shape, dtype=after, device=device)
        for name, shape in target.shards[0].params.items()
        if "_scale_inv" not in name
    }
    for checksums in (True, False):
        exchange.run(sent, received, checksums=checksums)
        for p in sent.values():
            p.mul_(-1)
    moved = {name: p.cpu() for name, p in received.items()}
    transport.close()
    return moved, len(copies.parts)
