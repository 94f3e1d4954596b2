"""The steps of a single process at the size of real models, without running processes."""

from __future__ import annotations

import math
import time
from collections import Counter

import pytest
import torch

from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.exchange.rank_program import Role, rank_program
from skyrl_mega.weights.fp8.format import Wire
from skyrl_mega.weights.plan.plan import plan
from skyrl_mega.weights.plan.topology import Links, Topology
from skyrl_mega.weights.transports.ipc import device_owners
from tests.support.machine import within
from tests.weights.grids import REAL

BF16 = Wire(torch.bfloat16)
BUCKET = 64 << 20


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared devices"])
def test_layers_arrive_one_after_the_other(shared: bool) -> None:
    """Plans 30B from 32 ranks to 4 engines × TP8: at most a seventh of a worker's parameters is incomplete at a time.

    The number of rounds stays near the lower bound of the bytes, and planning takes seconds.
    """
    hf, parallel, links = REAL["30B"], ParallelDims(32, tensor=2, expert=8), Links()
    arch = architecture(hf)
    source, target = arch.megatron_layout(hf, parallel, "te"), arch.engine_layout(hf, 8, 4)
    topology = Topology.shared(32, 32, links) if shared else Topology.separate(32, 32, links)
    transfer_plan = plan(source, target, topology)
    start = time.process_time()
    role = Role(32, None, target.shards[0])
    steps, visits = rank_program(
        transfer_plan,
        BF16,
        role,
        bucket_bytes=BUCKET,
        in_flight=3,
        target_base=32,
        owners=device_owners(topology, 32),
    )
    assert within(time.process_time() - start, 5)
    buckets = visits or [bucket for step in steps for bucket in step.new]
    assert len(buckets) <= 1.15 * transfer_plan.bytes_in[0] / BUCKET
    assert not steps or steps[-1].round <= 1.2 * transfer_plan.bytes_in[0] / BUCKET
    left = Counter(place.param for bucket in buckets for item in bucket.items for place in item.unpacked_to)
    size = {name: 2 * math.prod(shape) for name, shape in target.shards[0].params.items()}
    begun: set[str] = set()
    most = 0
    for bucket in buckets:
        places = [place for item in bucket.items for place in item.unpacked_to]
        begun |= {place.param for place in places}
        most = max(most, sum(size[name] for name in begun))
        left.subtract(place.param for place in places)
        begun = {name for name in begun if left[name]}
    assert not begun
    print(f"{most / sum(size.values()):.1%} incomplete at once")
    assert most < sum(size.values()) / 6


def test_two_policy_ranks_on_one_device_are_refused() -> None:
    with pytest.raises(ValueError, match="source ranks 0 and 1 share a device"):
        device_owners(Topology((3, 3), (4,)), 2)


def test_hosts() -> None:
    assert device_owners(Topology((0, 1), (0, 1, 2, 2)), 2) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 4, 5: 4}
    assert device_owners(Topology.shared(2, 2), 0) == {0: 0, 1: 1}  # the same processes
