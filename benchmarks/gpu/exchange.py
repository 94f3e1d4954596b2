"""Proof 3: a weight sync between two processes on one GPU.

The sender is a policy rank alone in its group. The receiver, an engine worker, reads the sender's buckets through CUDA
IPC (through a shared file on a CPU). The model has the size and the number of parts of a TP8 engine worker's shard of
Qwen3-30B-A3B.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu import limits, parts, pattern
from benchmarks.gpu.processes import KILLED, Job, together
from benchmarks.gpu.proof import Bench
from skyrl_mega.config import allocator
from skyrl_mega.parallel.box import Layout
from skyrl_mega.weights.connection import Connection
from skyrl_mega.weights.fp8.format import quantised
from skyrl_mega.weights.transports.group import TransportError, host_store

PYTHON_S = 0.15
"""Upper bound of Python time in a second or later sync, at either end. `CHECKED_S` applies with checksums (docs/gpu.md,
F12)."""
CHECKED_S = 0.5
SEGMENTS = allocator.variables({})
"""Allocator settings of the policy's process. An engine has no such settings."""
GROWTH_MIB = 64.0
"""Upper bound of memory growth from the second run to the last (F16: new streams and buffers in each run took
gigabytes)."""


@dataclass(frozen=True)
class Case:
    """Inputs of both processes."""

    connection: Connection
    device: str
    runs: int
    checked: int
    """First run with checksums; all later runs have checksums too."""
    later: Connection | None = None
    """Connection of a second group, used after the first group failed."""


def prove(bench: Bench) -> None:
    """Checks bits, speed, Python time and memory over 40 runs."""
    runs = 40 if bench.cuda else 8
    case, store = _case(bench, runs=runs, checked=runs - 3)
    sender, receiver = together(Job(_sender, (case,)), Job(_receiver, (case,)), timeout_s=230)
    del store
    wrong = sum(receiver["different"])
    bench.figure("elements that differ after two syncs of other weights", wrong, "elements", at_most=0)
    bench.figure("parts", receiver["parts"], "parts")
    bench.figure("bytes of a sync", receiver["bytes"] / 1e9, "GB")
    bench.figure("joining, the plan included", sender["join_s"], "s")
    bench.figure("first sync", sender["wall_s"][0], "s")
    plain = slice(3, case.checked)  # in the third run the sender waits for the receiver's comparison
    wall = statistics.median(sender["wall_s"][plain])
    # Every byte is copied twice: into the bucket and out of the bucket.
    bench.figure("a later sync", receiver["bytes"] / wall / 1e9, "GB/s", limit=limits.copy_gb_s(bench) / 2,
                 limit_of="two copies within memory")  # fmt: skip
    bench.figure("a later sync takes", wall, "s")
    for name, end in (("sender", sender), ("receiver", receiver)):
        allowed = PYTHON_S if bench.cuda else None
        bench.figure(f"Python of the {name} in a later sync", statistics.median(end["python_s"][plain]), "s",
                     at_most=allowed)  # fmt: skip
        allowed = CHECKED_S if bench.cuda else None
        bench.figure(f"… with checksums, {name}", statistics.median(end["python_s"][case.checked :]), "s",
                     at_most=allowed)  # fmt: skip
        if bench.cuda:
            bench.figure(f"memory that the {name} gained from run 2 to run {runs}",
                         (end["reserved"][-1] - end["reserved"][1]) / 2**20, "MiB", at_most=GROWTH_MIB)  # fmt: skip
    if bench.cuda:
        bench.figure("memory of the GPU gained by both", (sender["free"][1] - sender["free"][-1]) / 2**20, "MiB",
                     at_most=2 * GROWTH_MIB)  # fmt: skip
    else:
        bench.left_out("memory of the GPU, and CUDA IPC: a shared file stood in for it")


def prove_killed(bench: Bench) -> None:
    """Kills the receiver halfway: the sender must report the loss in time and then serve the next receiver."""
    case, store = _case(bench, runs=2, checked=2, later="after it")
    sender, first, second = together(
        Job(_sender_of_killed, (case,)), Job(_killed_receiver, (case,)), Job(_late_receiver, (case,)), timeout_s=85
    )
    del store
    bench.holds("the receiver was killed", first == KILLED, first)
    bench.holds("the sender names it", "engine 0 worker 0 went away" in sender["error"], sender["error"])
    bench.figure("until the sender knows", sender["noticed_s"], "s", at_most=5.0)
    bench.holds("the sender's device works on", sender["works"])
    bench.figure("elements that differ at the next receiver", second["different"], "elements", at_most=0)


def prove_segments(bench: Bench) -> None:
    """Syncs with expandable segments in the sender. CUDA IPC cannot share such memory directly (F15)."""
    if not bench.cuda:
        bench.left_out("expandable segments: a CPU has none")
        return
    case, store = _case(bench, runs=8, checked=7)
    sender, receiver = together(Job(_sender, (case,), SEGMENTS), Job(_receiver, (case,)), timeout_s=85)
    del store
    bench.figure("elements that differ", sum(receiver["different"]), "elements",
                 at_most=0)  # fmt: skip
    # Without the third run: the sender waits in it, while the receiver compares the second run's elements.
    wall = statistics.median(sender["wall_s"][3 : case.checked])
    bench.figure("a sync", receiver["bytes"] / wall / 1e9, "GB/s", limit=limits.copy_gb_s(bench) / 2,
                 limit_of="two copies within memory")  # fmt: skip


def prove_fp8(bench: Bench) -> None:
    """Syncs the same weights as block-scaled FP8 and compares the bits with plain torch.

    The sender reads each element twice (maxima, numbers) and writes a byte. The receiver reads the byte and writes
    bfloat16. This makes 8 bytes of traffic per element, as in a bfloat16 sync.
    """
    case, store = _case(bench, runs=6, checked=5, fp8=True)
    sender, receiver = together(Job(_sender, (case,)), Job(_receiver, (case,)), timeout_s=110)
    del store
    bench.figure("elements that differ from plain torch's quantisation", sum(receiver["different"]), "elements",
                 at_most=0)  # fmt: skip
    wall = statistics.median(sender["wall_s"][3 : case.checked])
    bench.figure("a sync, counted in bfloat16", receiver["bytes"] / wall / 1e9, "GB/s",
                 limit=limits.copy_gb_s(bench) / 2, limit_of="two copies within memory")  # fmt: skip
    bench.figure("a sync takes", wall, "s")
    allowed = PYTHON_S if bench.cuda else None
    bench.figure("Python of the sender", statistics.median(sender["python_s"][2 : case.checked]), "s", at_most=allowed)


def _case(bench: Bench, runs: int, checked: int, later: str = "", fp8: bool = False) -> tuple[Case, Any]:
    store = host_store("127.0.0.1", parts.TIMEOUT_S)

    def meeting(name: str) -> Connection:
        return parts.connection(
            parts.worker_of_30b(tiny_size=bench.tiny),
            store.port,
            name,
            bucket_bytes=(64 << 20) if bench.cuda else (16 << 10),
            timeout_s=parts.TIMEOUT_S,
            plans=bench.folder / "plans",
            fp8=fp8,
        )

    return Case(meeting("weights"), str(bench.device), runs, checked, meeting(later) if later else None), store


def _open(connection: Connection, device: str, end: str) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the exchange, layout and parameters of one end: bfloat16 without scales, for every wire type."""
    own_device = torch.device(device)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    both, _ = replace(connection.plan_inputs, fp8=False).endpoints()
    layout = both.policy if end == "source" else both.engines
    params = {
        name: torch.full(shape, float("nan"), dtype=torch.bfloat16, device=own_device)
        for name, shape in layout.shards[0].params.items()
    }
    return connection.join(own_device, **{end: 0}), layout, params


def _sender(case: Case) -> dict[str, Any]:
    start = time.perf_counter()
    exchange, layout, params = _open(case.connection, case.device, "source")
    figures: dict[str, Any] = {"join_s": time.perf_counter() - start, "wall_s": [], **_nothing()}
    for number in range(case.runs):
        if number < 2:
            pattern.fill(layout.shards[0], layout.tensors, params, version=number)
            _wait(case)
        start = time.perf_counter()
        report = exchange.run(source=params, checksums=number >= case.checked)
        _wait(case)
        figures["wall_s"].append(time.perf_counter() - start)
        _remember(figures, report, case)
    return figures


def _receiver(case: Case) -> dict[str, Any]:
    exchange, layout, params = _open(case.connection, case.device, "target")
    figures: dict[str, Any] = {"different": [], **_nothing()}
    for number in range(case.runs):
        report = exchange.run(target=params, checksums=number >= case.checked)
        _wait(case)
        _remember(figures, report, case)
        if number < 2:
            figures["different"].append(
                pattern.different(layout.shards[0], layout.tensors, params, number, _quantised(case, layout))
            )
    figures["bytes"] = sum(piece.box.numel for piece in layout.shards[0].pieces) * 2
    figures["parts"] = len(layout.shards[0].pieces)
    return figures


def _quantised(case: Case, layout: Layout) -> frozenset[str]:
    """Returns the names of the tensors sent as FP8."""
    return quantised(layout.tensors) if case.connection.plan_inputs.fp8 else frozenset()


def _nothing() -> dict[str, list[float]]:
    return {"python_s": [], "reserved": [], "free": []}


def _remember(figures: dict[str, Any], report: Any, case: Case) -> None:
    figures["python_s"].append(report.pack_s + report.load_s + report.quantise_s + report.checksum_s)
    if case.device != "cpu":
        figures["reserved"].append(torch.cuda.memory_reserved())
        figures["free"].append(torch.cuda.mem_get_info()[0])


def _wait(case: Case) -> None:
    if case.device != "cpu":
        torch.cuda.synchronize()


def _sender_of_killed(case: Case) -> dict[str, Any]:
    exchange, layout, params = _open(case.connection, case.device, "source")
    pattern.fill(layout.shards[0], layout.tensors, params, version=0)
    exchange.run(source=params)
    start, error = time.monotonic(), "none"
    try:
        exchange.run(source=params)
    except TransportError as caught:
        error = str(caught)
    noticed = time.monotonic() - start
    works = bool(torch.ones(8, device=case.device).sum().item() == 8)
    assert case.later is not None
    exchange, layout, params = _open(case.later, case.device, "source")
    pattern.fill(layout.shards[0], layout.tensors, params, version=1)
    exchange.run(source=params)
    _wait(case)
    return {"error": error, "noticed_s": noticed, "works": works}


def _killed_receiver(case: Case) -> None:
    exchange, _, params = _open(case.connection, case.device, "target")
    exchange.run(target=params)
    left = [len(params) // 2]

    def half(_: str) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    exchange.run(target=params, loaded=half)


def _late_receiver(case: Case) -> dict[str, Any]:
    assert case.later is not None
    exchange, layout, params = _open(case.later, case.device, "target")
    exchange.run(target=params)
    _wait(case)
    return {"different": pattern.different(layout.shards[0], layout.tensors, params, version=1)}
