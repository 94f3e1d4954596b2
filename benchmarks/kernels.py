"""Measures the Triton kernels on a GPU: time and share of memory bandwidth, next to the torch references; and the fused
head next to the chunked head, with the share of a large matrix product.

    .venv/bin/python -m benchmarks.kernels

Every kernel is first compared bit for bit with the reference. Bytes are the minimum to read and write; the bandwidth is
the data sheet's, from the driver's memory clock and bus width. The head is compared within 0.03 nats, half a unit in
the last place of the chunked head's logits. Writes benchmarks/results/kernels_<device>.json. Without a CUDA device the
program prints a line and exits with 0; a difference exits with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.head import CHUNK, SHAPES, Measured, Shape
from skyrl_mega.kernels import block_fp8
from skyrl_mega.kernels.boxes import Boxes, checksums_reference, pack_reference, regions, unpack_reference

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """A kernel and an input: the kernel's and the reference's function, each returning the output, and the bytes read
    and written."""

    name: str
    kernel: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    nbytes: int


def fp8_cases(device: str, experts: int, rows: int = 768, columns: int = 2048) -> list[Case]:
    """Returns cases with a stack of Qwen3-30B-A3B's expert matrices, whole and as a shard with its start inside a
    block."""
    cases = []
    for title, row0 in (("", 0), (", begins inside a block", 96)):
        weight = torch.randn(experts, rows, columns, device=device).bfloat16()
        scales = block_fp8.scales(block_fp8.block_amax_reference(weight, row0))
        numbers = block_fp8.quantise_reference(weight, scales, row0)
        bf16, fp8 = weight.nbytes, numbers.nbytes
        # Bound now: the loop variables change.
        cases += [
            Case(
                f"block_amax{title}",
                lambda w=weight, r=row0: block_fp8.block_amax(w, r),
                lambda w=weight, r=row0: block_fp8.block_amax_reference(w, r),
                bf16,
            ),
            Case(
                f"quantise{title}",
                lambda w=weight, s=scales, r=row0: block_fp8.quantise(w, s, r),
                lambda w=weight, s=scales, r=row0: block_fp8.quantise_reference(w, s, r),
                bf16 + fp8,
            ),
            Case(
                f"dequantise{title}",
                lambda q=numbers, s=scales, r=row0: block_fp8.dequantise(q, s, r),
                lambda q=numbers, s=scales, r=row0: block_fp8.dequantise_reference(q, s, r),
                fp8 + bf16,
            ),
        ]
    return cases


def box_cases(device: str, boxes: int) -> list[Case]:
    """Returns cases with columns of experts' down projections (192 bytes a row, as in TP8), and with many boxes of a
    few KiB."""
    cases = []
    for count, size, (rows, columns), width in (
        (boxes // 8, "384 KiB", (2048, 768), 96),
        (boxes, "4 KiB", (16, 256), 128),
    ):
        title = f"{count} boxes of {size}"
        base = torch.randn(count, rows, columns, device=device).bfloat16()
        views = [matrix[:, width : 2 * width] for matrix in base]
        where = regions(views, range(0, count * views[0].nbytes, views[0].nbytes))
        packer = Boxes(where, base.device)
        flat = torch.empty(packer.nbytes, dtype=torch.uint8, device=device)
        pack_reference(where, views, flat)

        def run(copy: Callable[..., None], *arguments: object, result: Tensor) -> Tensor:
            copy(*arguments)
            return result

        cases += [
            Case(
                f"pack {title}",
                lambda m=packer, v=views, f=flat: run(m.pack, v, f, result=f),
                lambda r=where, v=views, f=flat: run(pack_reference, r, v, f, result=f),
                2 * flat.nbytes,
            ),
            Case(
                f"unpack {title}",
                lambda m=packer, v=views, f=flat, b=base: run(m.unpack, v, f, result=b),
                lambda r=where, v=views, f=flat, b=base: run(unpack_reference, r, v, f, result=b),
                2 * flat.nbytes,
            ),
            Case(
                f"checksums of {title}",
                lambda m=packer, v=views: m.checksums(v),
                lambda r=where, v=views: checksums_reference(r, v),
                flat.nbytes,
            ),
        ]
    return cases


def same(case: Case) -> bool:
    """Returns True if kernel and reference give the same bytes."""
    output = case.kernel().contiguous().view(torch.uint8).clone()
    return torch.equal(output, case.reference().contiguous().view(torch.uint8))


@dataclass(frozen=True)
class HeadRow:
    """A head at a shape, forward only or with the backward pass."""

    head: str
    way: str
    ms: float
    share_of_product: float
    """Share of the FLOPs per second of a large matrix product."""
    buffer_bytes: int | None
    """Counted bytes of the fused head's buffers."""
    same: bool
    """True if the log-probs of both heads agree within the precision."""


def head_rows(device: str, shapes: Sequence[Shape], chunk: int, time_ms: Callable[..., float]) -> list[HeadRow]:
    """Measures both heads at every shape; `time_ms` measures a function."""
    n = 8192 if device == "cuda" else 64
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    product = 2 * n**3 / time_ms(lambda: a @ b)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    rows = []
    for shape in shapes:
        head = Measured(shape, torch.device(device))
        same = bool((head.forward(None) - head.forward(chunk)).abs().max() <= 0.03)
        for way, tokens in (("fused", None), ("chunked", chunk)):
            for what, work, products in (("forward", head.forward, 1), ("with backward", head.both, 4)):
                ms = time_ms(lambda work=work, tokens=tokens: work(tokens))
                size = shape.buffers(2)[products > 1] if tokens is None else None
                share = products * shape.product / ms / product
                rows.append(HeadRow(f"{shape.name}, {what}", way, ms, share, size, same))
    dist.destroy_process_group()
    return rows


def main() -> int:
    """Checks, measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128, help="matrices of 768 × 2048 in a stack")
    parser.add_argument("--boxes", type=int, default=10_000)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    from triton.testing import do_bench

    device = torch.cuda.get_device_properties(0)
    peak = 2 * device.memory_clock_rate * 1e3 * device.memory_bus_width / 8  # two transfers a clock
    table = Table(title=f"{device.name}, {peak / 1e12:.2f} TB/s")
    for title in ("kernel", "ms", "GB/s", "share of bandwidth", "torch, ms", "same bits"):
        table.add_column(title, justify="left" if title == "kernel" else "right")
    rows = []
    for build, size in ((fp8_cases, options.experts), (box_cases, options.boxes)):
        for case in build("cuda", size):
            print(f"  {case.name}", flush=True)
            agrees = same(case)
            ms = do_bench(case.kernel, return_mode="median")
            reference_ms = do_bench(case.reference, warmup=1, rep=100, return_mode="median")
            speed = case.nbytes / (ms * 1e-3)
            rows.append(
                {
                    "kernel": case.name,
                    "ms": ms,
                    "bytes": case.nbytes,
                    "share_of_bandwidth": speed / peak,
                    "reference_ms": reference_ms,
                    "same_bits": agrees,
                }
            )
            shown = (f"{ms:.3f}", f"{speed / 1e9:.0f}", f"{speed / peak:.1%}", f"{reference_ms:.3f}", str(agrees))
            table.add_row(case.name, *shown)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    heads = head_rows("cuda", SHAPES, CHUNK, partial(do_bench, return_mode="median"))
    table = Table(title=f"{device.name}, output heads")
    for title in ("head", "way", "ms", "share of a matrix product", "buffers, MiB", "same"):
        table.add_column(title, justify="left" if title in ("head", "way") else "right")
    for row in heads:
        size = "" if row.buffer_bytes is None else f"{row.buffer_bytes / 2**20:.0f}"
        table.add_row(row.head, row.way, f"{row.ms:.2f}", f"{row.share_of_product:.1%}", size, str(row.same))
    console.print(table)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"kernels_{device.name.lower().replace(' ', '_')}.json"
    kept = {"device": device.name, "bandwidth": peak, "kernels": rows, "heads": [asdict(row) for row in heads]}
    file.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if all(row["same_bits"] for row in rows) and all(row.same for row in heads) else 1


if __name__ == "__main__":
    sys.exit(main())
