"""Seconds of Python in a full-size sync on the GPU path; see benchmarks/sync_overhead.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the tables' kernels cannot be imported")

from benchmarks.sync_overhead import BUCKET, Sync
from skyrl_mega.weights.plan.cost import COMPILE_S, host_time
from tests.support.machine import within


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared devices"])
def test_a_later_sync_costs_the_host_next_to_nothing(shared: bool) -> None:
    """Measures Qwen3-30B-A3B to TP8: 18,800 parts of an engine worker, and the parts of a policy rank."""
    sync = Sync.make(shared)
    estimate = host_time(sync.plan, BUCKET)
    for cost in (sync.measure(target=0), sync.measure(source=0)):
        print(cost)
        assert cost.parts > 18_000
        assert within(cost.later, 0.15) and within(cost.checksums, 0.5)
        assert cost.launches <= 1.2 * cost.buckets, "one launch packs or unpacks a bucket"
        assert cost.table_bytes < 7.6e9 / 1000
        assert within(cost.moved, 0.15), "parameters that lie elsewhere need new addresses, not new tables"
        # The estimate is an upper bound: its launches cost nothing here.
        assert within(cost.later, estimate.later) and within(cost.checksums, estimate.checksums)
        assert within(cost.first, estimate.first - COMPILE_S + 0.5)
