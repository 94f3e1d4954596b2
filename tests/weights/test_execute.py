"""Execution of plans between real processes over gloo, and within a process. Every received element is compared."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Layout
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.exchange.exchange import Exchange, local_view
from skyrl_mega.weights.fp8.format import Wire
from skyrl_mega.weights.plan.plan import Plan, plan
from skyrl_mega.weights.plan.topology import Links, Topology
from skyrl_mega.weights.transports.group import Deadline, Message, TransportError, host_store, join
from tests.support.ranks import run_ranks
from tests.weights.grids import LAYOUTS, MODELS, cut, empty, global_tensors, pairs, whole
from tests.weights.meeting import CPU, Case, Staged, exchange, meet, same


def copy(
    transfers: Plan, source: Layout, sources: list[dict[str, Tensor]], target: Layout, targets: list[dict[str, Tensor]]
) -> None:
    """Executes a plan within this process, by direct copies from the parameters of each source rank into those of each
    target rank."""
    for route in transfers.routes:
        sender, boxes = source.shards[route.source], transfers.parts.boxes(route.parts)
        origins = transfers.parts.locate(sender, route.parts)
        for receiver in route.receivers:
            shard = target.shards[receiver]
            for (_, box), (origin, *_), places in zip(
                boxes, origins, transfers.parts.locate(shard, route.parts), strict=True
            ):
                values = sender.shaped(origin.param, sources[route.source][origin.param])
                for place in places:
                    into = shard.shaped(place.param, targets[receiver][place.param])
                    local_view(into, place.offset, box).copy_(local_view(values, origin.offset, box))


@pytest.mark.parametrize("hf, parallel", pairs())
def test_any_layout_and_back_is_bit_identical(hf: dict[str, Any], parallel: ParallelDims) -> None:
    """Converts whole tensors to policy shards and back, and to engine shards, and compares with plain slicing."""
    arch = architecture(hf)
    for spec in ("local", "te"):
        layout = arch.megatron_layout(hf, parallel, spec)  # type: ignore[arg-type]
        tensors = global_tensors(layout.tensors)
        shards = [empty(shard) for shard in layout.shards]
        copy(plan(whole(layout), layout), whole(layout), [tensors], layout, shards)
        for params, shard in zip(shards, layout.shards, strict=True):
            assert same(params, cut(shard, tensors))
        back = {name: torch.full(shape, float("nan")) for name, shape in layout.tensors.items()}
        copy(plan(layout, whole(layout)), layout, shards, whole(layout), [back])
        assert same(back, tensors)


ONE_NODE = Links(gpus_per_node=8, nics_per_node=8)
SMALL_NODES = Links(gpus_per_node=2, nics_per_node=2)
MOE, MIXED, DENSE = MODELS["qwen3_moe"], MODELS["qwen3_moe_mixed"], MODELS["qwen2_tied"]
SHARED = Topology.shared(4, 4, SMALL_NODES)

CASES = {
    "pp2 to tp2": Case(MOE, LAYOUTS["pp2"], engine=2, dtype=torch.float32, in_flight=2),
    "tp2 ep2 to tp1": Case(MIXED, LAYOUTS["tp2 ep2"]),
    "vpp2 to tp2": Case(DENSE, LAYOUTS["pp2 vpp2"], engine=2, bucket_bytes=1000),
    "etp2 to ep2": Case(MOE, LAYOUTS["tp2 ep2 etp2"], engine=2, expert_parallel=True, bucket_bytes=5000),
    "two engines in another node": Case(
        MOE, LAYOUTS["ep2"], engine=2, engines=2, topology=Topology((0, 1), (8, 9, 10, 11), ONE_NODE)
    ),
    "four engines in one node, by two buffers": Case(
        MOE, LAYOUTS["pp2"], engines=4, topology=Topology((0, 1), (8, 9, 10, 11), ONE_NODE), in_flight=2
    ),
    "two nodes of engines": Case(
        MOE, LAYOUTS["ep2"], engine=2, engines=2, topology=Topology((0, 1), (2, 3, 4, 5), SMALL_NODES)
    ),
    "shared devices": Case(MOE, LAYOUTS["tp2 pp2 ep2"], engine=2, engines=2, topology=SHARED),
    "shared devices, other nodes": Case(
        MOE, LAYOUTS["tp2 ep2 etp2"], engine=4, topology=Topology((0, 1, 2, 3), (2, 3, 0, 5), SMALL_NODES), in_flight=2
    ),
    "shared devices, hand-on to guests": Case(
        MOE, LAYOUTS["pp4"], engines=4, topology=Topology((0, 2, 4, 6), (0, 2, 4, 6), Links(4, 4)), bucket_bytes=20000
    ),
}


def sync(rank: int, address: str, case: Case) -> dict[str, int]:
    """Sends from policy ranks to engine workers twice, with different weights."""
    source, target = case.layouts()
    wire = Wire(case.dtype)
    built, transfer_plan, _kept = exchange(rank, address, case, source, target, wire)
    ranks = case.parallel.ranks
    mine = source.shards[rank] if rank < ranks else target.shards[rank - ranks]
    params = empty(mine, torch.float32 if rank < ranks else case.dtype)
    for seed, checksums in ((1, False), (2, True)):
        expected = cut(mine, global_tensors(source.tensors, seed))
        if rank < ranks:
            for name, param in params.items():
                param.copy_(expected[name])
            report = built.run(source=params, checksums=checksums)
        else:
            for param in params.values():
                param.fill_(float("nan"))
            staged = Staged(params)
            report = built.run(target=staged, checksums=checksums, loaded=staged.finish)
            assert same(params, {name: param.to(case.dtype) for name, param in expected.items()})
            assert sorted(staged.order) == sorted(params)
            assert report.received + report.local == transfer_plan.bytes_in[rank - ranks]
        # The bucket includes a checksum for every part, at least 16 bytes each, rounded up to a multiple of 256.
        assert report.extra_bytes <= case.in_flight * (case.bucket_bytes + case.bucket_bytes // 2 + 256)
    return vars(report)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sync_between_processes(case: Case) -> None:
    """Sends float32 masters in buckets far smaller than a tensor; engines receive the engine's type, rounded once."""
    reports = run_ranks(case.size, sync, case)
    ranks = case.parallel.ranks
    # Every byte received over a link was sent or forwarded exactly once.
    assert sum(r["sent"] + r["forwarded"] for r in reports) == sum(r["received"] for r in reports[ranks:])
    print({name: sum(r[name] for r in reports) for name in reports[0]})


def relayout(rank: int, address: str, hf: dict[str, Any], before: ParallelDims, after: ParallelDims) -> bool:
    """Moves weights between two layouts of the same processes, each both source and target."""
    arch = architecture(hf)
    source, target = arch.megatron_layout(hf, before, "local"), arch.megatron_layout(hf, after, "te")
    transfer_plan = plan(source, target, Topology.shared(before.ranks, after.ranks, Links(4, 4)), itemsize=4)
    transport, _kept = meet(rank, address, before.ranks)
    tensors = global_tensors(source.tensors)
    layouts = dict(source_layout=source, target_layout=target)
    wire = Wire(torch.float32)
    built = Exchange(
        transfer_plan, transport, wire, source=rank, target=rank, bucket_bytes=12000, in_flight=2, **layouts
    )
    good = True
    for _ in range(2):
        params = empty(target.shards[rank])
        report = built.run(cut(source.shards[rank], tensors), params, checksums=True)
        good &= same(params, cut(target.shards[rank], tensors))
        good &= 0 < report.sent < transfer_plan.bytes_out[rank]  # the rest stayed within the process
        good &= report.received + report.local == transfer_plan.bytes_in[rank]
    return good


def test_relayout_among_the_same_processes() -> None:
    assert all(run_ranks(4, relayout, MOE, LAYOUTS["tp2 pp2 ep2"], LAYOUTS["cp2 ep2"]))


def leave(rank: int, address: str) -> str:
    """Lets process 1 join and exit while process 0 waits for a message; returns the error of process 0."""
    transport, _kept = meet(rank, address, 2, timeout_s=60)
    if rank == 1:
        return ""
    ticket, _ = transport.exchange(Message(torch.empty(4), 1, "model.norm.weight"), None, 0)
    start = time.monotonic()
    with pytest.raises(TransportError) as error:
        transport.wait(ticket, Deadline(40))
    assert time.monotonic() - start < 30
    return str(error.value)


def test_a_lost_peer_is_named_in_time() -> None:
    message = run_ranks(2, leave)[0]
    assert message.startswith("process 0: process 1 went away while model.norm.weight was under way")
    assert "\n" not in message


def test_who_did_not_join_is_named_in_time() -> None:
    store = host_store("127.0.0.1", 60)
    with pytest.raises(TransportError, match=r"rank 1, 2 of 3 did not join within 0\.3 s"):
        join(store, 0, 3, "policy rank 0", device=CPU, timeout_s=0.3)


def test_the_store_listens_on_its_address_only() -> None:
    import socket

    store = host_store("127.0.0.1", 60)
    with socket.socket() as other:
        # 127.0.0.2 is this machine too; a store on every address would answer here.
        assert other.connect_ex(("127.0.0.2", store.port)) != 0
