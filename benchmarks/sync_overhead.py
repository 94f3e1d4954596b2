"""Measures the seconds of a core that a weight sync costs a process, without the work of GPUs and links.

    .venv/bin/python benchmarks/sync_overhead.py [--json benchmarks/results/sync_overhead.json]

Uses the real plan of Qwen3-30B-A3B from 32 policy ranks (TP2 EP8) to 4 engines of TP8, on separate and on shared GPUs,
and all work of a process in a sync: messages, views, tables, streams, checksums. Excluded is only the work outside
Python: kernel launches, NCCL, and the bytes. Needs no GPU; the parameters are never touched.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from skyrl_mega.kernels import boxes, boxes_triton
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Layout
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.exchange import exchange as execute
from skyrl_mega.weights.exchange.exchange import Exchange
from skyrl_mega.weights.fp8.format import Wire
from skyrl_mega.weights.plan.plan import Plan, plan
from skyrl_mega.weights.plan.topology import Topology
from skyrl_mega.weights.transports.group import Transport

MODEL = "Qwen/Qwen3-30B-A3B"
POLICY, TENSOR, ENGINES = ParallelDims(32, tensor=2, expert=8), 8, 4
BUCKET = 64 << 20
CPU = torch.device("cpu")
LATER = 5
"""Syncs after the first, of each kind; the fastest counts, because other programs run too."""


@dataclass
class Overhead:
    """Cost of a process, in seconds of a core."""

    parts: int
    """Parts packed or unpacked by the process."""
    buckets: int
    first: float
    later: float
    checksums: float
    """Seconds of a later sync with checksums, in total."""
    moved: float
    """Seconds of a later sync after the parameters moved."""
    launches: int
    """Kernel launches in a later sync; the launches' time is excluded."""
    table_bytes: int


class Kernel:
    """A stand-in for a kernel: launching does nothing."""

    launches = 0

    def __getitem__(self, grid: object) -> Any:
        return self.launch

    def launch(self, *_: object, **__: object) -> None:
        Kernel.launches += 1


class Queue:
    """A stand-in for an idle stream or event."""

    def __init__(self, *_: object) -> None: ...
    def wait_stream(self, *_: object) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Group:
    """A stand-in for a group with immediate messages. Received values are all zeros, and so are checksums."""

    def send(self, *_: object) -> None: ...
    def recv(self, *_: object) -> None: ...
    def wait(self) -> None: ...
    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> Group:
        return self


class OnStreams(Transport):
    """A transport with the code path of a GPU."""

    @property
    def on_streams(self) -> bool:
        return True


class Guest:
    """A stand-in for a receiver that reads at once."""

    def ready(self, *_: object) -> None: ...
    def wait_until_read(self, *_: object) -> None: ...


class Host:
    """A stand-in for an owner with all buckets ready."""

    def __init__(self, size: int) -> None:
        self.buffers = torch.zeros(size, dtype=torch.uint8)

    def wait_until_ready(self, *_: object) -> int:
        return 0

    def read(self, *_: object) -> None: ...


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """Makes the CPU take the code path of a GPU, without kernels and streams."""
    kernel = Kernel()
    with (
        patch.object(boxes, "TABLE_DEVICES", {"cpu"}),
        patch.multiple(boxes_triton, _copy=kernel, _sum=kernel),
        patch.multiple(torch.cuda, Stream=Queue, Event=Queue, current_stream=Queue, stream=lambda _: nullcontext()),
    ):
        yield


@contextmanager
def own_objects_alone() -> Iterator[None]:
    """Keeps the garbage collector away from objects made earlier, for example by other tests."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass
class Sync:
    """Both layouts, and the plan between them."""

    source: Layout
    target: Layout
    plan: Plan

    @classmethod
    def make(cls, shared: bool) -> Sync:
        hf = dict(known(Path(MODEL)))
        arch = architecture(hf)
        source, target = arch.megatron_layout(hf, POLICY, "te"), arch.engine_layout(hf, TENSOR, ENGINES)
        ends = len(source.shards), len(target.shards)
        topology = Topology.shared(*ends) if shared else Topology.separate(*ends)
        return cls(source, target, plan(source, target, topology))

    def measure(self, *, source: int | None = None, target: int | None = None) -> Overhead:
        """Measures the syncs of a process: a policy rank or an engine worker."""
        ranks = len(self.source.shards)
        rank = source if source is not None else ranks + (target or 0)
        layout, index = (self.source, source) if source is not None else (self.target, target)
        assert index is not None
        params = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in layout.shards[index].params.items()}
        size = ranks + len(self.target.shards)
        place = {process: process for process in range(size)}
        transport = OnStreams(Group(), rank, size, ("",) * size, CPU, 60.0, group_rank=place)

        def connect(_: object, hosts: dict[int, int], buffers: Any) -> tuple[dict[int, Guest], Host | None]:
            buffers.flat.zero_()
            guests = {p: Guest() for p, host in hosts.items() if host == rank != p}
            return guests, Host(BUCKET + (1 << 20)) if hosts.get(rank, rank) != rank else None

        with without_a_gpu(), own_objects_alone(), patch.object(execute, "connect", connect):
            exchange = Exchange(
                self.plan,
                transport,
                Wire(torch.bfloat16),
                source=source,
                source_layout=self.source,
                target=target,
                target_layout=self.target,
                bucket_bytes=BUCKET,
                target_base=ranks,
            )

            def run(checksums: bool) -> float:
                start = time.process_time()
                given = {"source": params} if source is not None else {"target": params}
                self.report = exchange.run(**given, checksums=checksums)
                return time.process_time() - start

            first = run(False)
            Kernel.launches = 0
            later = min(run(False) for _ in range(LATER))
            launches = Kernel.launches // LATER
            checksums = min(run(True) for _ in range(LATER))
            elsewhere = params
            params = {name: torch.empty_like(tensor) for name, tensor in elsewhere.items()}
            moved = run(False)
        buckets = exchange._buckets
        parts = sum(len(bucket.items) for bucket in buckets)
        return Overhead(parts, len(buckets), first, later, checksums, moved, launches, self.report.table_bytes)


def main() -> None:
    """Measures all four kinds of process and prints a line for each."""
    parser = argparse.ArgumentParser(description="Seconds of Python in a weight sync.")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    overheads = {}
    for where, shared in (("GPUs of their own", False), ("the same GPUs", True)):
        sync = Sync.make(shared)
        overheads[f"policy rank, {where}"] = sync.measure(source=0)
        overheads[f"engine worker, {where}"] = sync.measure(target=0)
    columns = ("parts", "buckets", "first s", "later s", "with checksums s", "moved s", "launches", "tables MB")
    print(f"{'':33} {'  '.join(columns)}")
    for name, o in overheads.items():
        seconds = (f"{s:.3f}" for s in (o.first, o.later, o.checksums, o.moved))
        cells = (str(o.parts), str(o.buckets), *seconds, str(o.launches), f"{o.table_bytes / 1e6:.2f}")
        print(f"{name:33} {'  '.join(cell.rjust(len(c)) for cell, c in zip(cells, columns, strict=True))}")
    if args.json:
        args.json.write_text(json.dumps({name: asdict(o) for name, o in overheads.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
