"""Seconds of Python in a sync of the real size, on the way that GPUs take; see benchmarks/sync_overhead.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the tables' kernels cannot be imported")

from benchmarks.sync_overhead import BUCKET, Sync
from skyrl_mega.weights.plan.cost import COMPILE_S, host_time


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared devices"])
def test_a_later_sync_costs_the_host_next_to_nothing(shared: bool) -> None:
    """Qwen3-30B-A3B to TP8: 18,800 parts of a worker, and those of a policy rank."""
    sync = Sync.make(shared)
    estimate = host_time(sync.plan, BUCKET)
    for found in (sync.measure(target=0), sync.measure(source=0)):
        print(found)
        assert found.parts > 18_000
        assert found.later < 0.15 and found.checksums < 0.5
        assert found.launches <= 1.2 * found.buckets, "one launch packs or unpacks a bucket"
        assert found.table_bytes < 7.6e9 / 1000
        assert found.moved < 0.15, "parameters that lie elsewhere need new addresses, not new tables"
        # The estimate is an upper one: launches are in it, and are nothing here.
        assert found.later < estimate.later and found.checksums < estimate.checksums
        assert found.first < estimate.first - COMPILE_S + 0.5
