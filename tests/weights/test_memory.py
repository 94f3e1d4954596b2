"""Extra memory during a sync as counted by the operating system, and the time of full checksums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.kernels import block_fp8
from skyrl_mega.kernels.checksum import checksum
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.weights.fp8.format import Wire, quantised, with_scales
from skyrl_mega.weights.plan.topology import Links, Topology
from tests.support.ranks import run_ranks
from tests.weights.grids import LAYOUTS
from tests.weights.meeting import Case, exchange

BUCKET = 8 << 20
SLACK = 6 << 20
"""Bytes allowed for thread stacks, sockets and copies of strips under conversion."""
LARGE = {
    **hf_config(BuildConfig(architecture="qwen3_moe", layers=2)),
    "hidden_size": 1024,
    "num_experts": 16,
    "moe_intermediate_size": 512,
}
"""A model of 117 MB in bfloat16."""


def memory(field: str) -> int:
    """Returns the bytes of this process in a field of /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def peak(rank: int, address: str, case: Case, fp8: bool) -> dict[str, float]:
    """Returns a run's peak memory above the start, the run's own report, and the seconds."""
    source, target = case.layouts()
    names = quantised(target.tensors) if fp8 else frozenset()
    wire = Wire(case.dtype, names)
    if fp8:
        source, target = with_scales(source, names), with_scales(target, names)
    built, _, _kept = exchange(rank, address, case, source, target, wire)
    ranks = case.parallel.ranks
    is_source = rank < ranks
    shard = source.shards[rank] if is_source else target.shards[rank - ranks]
    types = {piece.param: wire.type_of(piece.tensor) for piece in shard.pieces}
    params = {
        name: torch.ones(shape, dtype=torch.bfloat16 if is_source else types[name])
        for name, shape in shard.params.items()
        if not (is_source and "_scale_inv" in name)
    }
    # The first call of a function adds pages of code to the memory count.
    square = torch.ones(256, 256, dtype=torch.bfloat16)
    block_fp8.quantise(square, block_fp8.scales(block_fp8.block_amax(square)))
    checksum(square)
    figures = {}
    for checksums in (False, True):
        Path("/proc/self/clear_refs").write_text("5")  # starts the count of the peak
        before = memory("VmRSS")
        report = (
            built.run(source=params, checksums=checksums)
            if is_source
            else built.run(target=params, checksums=checksums)
        )
        figures[f"peak {checksums}"] = memory("VmHWM") - before
        figures[f"seconds {checksums}"] = (
            report.pack_s + report.wire_s + report.load_s + report.quantise_s + report.checksum_s
        )
        assert report.extra_bytes <= 3 * (BUCKET + 4096)
    return figures | {"checksum": report.checksum_s}


CASES = {
    "pp2 to two engines in another node": (
        Case(LARGE, LAYOUTS["pp2"], engines=2, topology=Topology((0, 1), (4, 5), Links(4, 4)), bucket_bytes=BUCKET),
        False,
    ),
    "shared devices": (
        Case(LARGE, LAYOUTS["ep2"], engine=2, topology=Topology.shared(2, 2, Links(2, 2)), bucket_bytes=BUCKET),
        False,
    ),
    "FP8 wire": (Case(LARGE, LAYOUTS["ep2"], engine=1, bucket_bytes=BUCKET), True),
}


@pytest.mark.parametrize("case, fp8", CASES.values(), ids=CASES)
def test_extra_memory_is_three_buckets(case: Case, fp8: bool) -> None:
    peaks = run_ranks(case.size, peak, case, fp8)
    total = sum(f["seconds True"] for f in peaks)
    print(f"checksums {sum(f['checksum'] for f in peaks) / total:.1%} of a sync, without them", end=" ")
    print(
        f"{max(f['seconds False'] for f in peaks):.2f} s, with them {max(f['seconds True'] for f in peaks):.2f} s;",
        end=" ",
    )
    print("extra MiB:", [round(max(f["peak False"], f["peak True"]) / 2**20, 1) for f in peaks])
    for f in peaks:
        assert max(f["peak False"], f["peak True"]) <= 3 * BUCKET + SLACK
