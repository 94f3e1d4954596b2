"""Plans carried out between real processes over gloo, and in one process."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl_mega.layout.box import Box
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.registry import architecture
from skyrl_mega.weights.execute import Exchange, buckets, copy, receive, send
from skyrl_mega.weights.plan import Transfer, plan
from skyrl_mega.weights.transport import Transport, TransportError, host_store, join
from tests.support.ranks import run_ranks
from tests.weights.grids import LAYOUTS, MODELS, cut, empty, global_tensors, pairs, whole

CPU = torch.device("cpu")


def meet(rank: int, address: str, size: int, timeout_s: float = 30) -> tuple[Transport, Any]:
    """Joins a group whose store is hosted by rank 0; its port is told through a second store at `address`."""
    host, port = address.split(":")
    lobby = torch.distributed.TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        store = host_store(host, timeout_s)
        lobby.set("port", str(store.port))
        return join(store, rank, size, f"process {rank}", device=CPU, timeout_s=timeout_s), (lobby, store)
    where = (host, int(lobby.get("port")))
    return join(where, rank, size, f"process {rank}", device=CPU, timeout_s=timeout_s), lobby


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Bit by bit, padding (NaN) too."""
    return found.keys() == wanted.keys() and all(
        torch.equal(found[k].isnan(), wanted[k].isnan())
        and torch.equal(found[k].nan_to_num().double(), wanted[k].nan_to_num().double())
        for k in wanted
    )


@pytest.mark.parametrize("hf, parallel", pairs())
def test_any_layout_and_back_is_bit_identical(hf: dict[str, Any], parallel: Parallel) -> None:
    """Whole tensors → policy shards → whole tensors, and → engine shards; compared with plain slicing."""
    arch = architecture(hf)
    for spec in ("local", "te"):
        layout = arch.megatron_layout(hf, parallel, spec)  # type: ignore[arg-type]
        tensors = global_tensors(layout.tensors)
        shards = [empty(shard) for shard in layout.shards]
        copy(plan(whole(layout), layout), [tensors], shards)
        for found, shard in zip(shards, layout.shards, strict=True):
            assert same(found, cut(shard, tensors))
        back = {name: torch.full(shape, float("nan")) for name, shape in layout.tensors.items()}
        copy(plan(layout, whole(layout)), shards, [back])
        assert same(back, tensors)


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    room=st.integers(1, 50),
    more=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_buckets_hold_everything_once_within_the_limit(shape: tuple[int, ...], room: int, more: int) -> None:
    origin = (0,) * len(shape)
    transfer = Transfer(0, 1, "t", Box(origin, shape), "a", origin, "b", (2, *origin))
    dealt = buckets([transfer] * (1 + more), room)
    count = torch.zeros(shape, dtype=torch.int64)
    for bucket in dealt:
        assert 0 < sum(t.box.numel for t in bucket) <= room
        for t in bucket:
            assert t.box.start == t.source_offset and t.target_offset == (2, *t.box.start)
            count[t.box.slices()] += 1
    assert (count == 1 + more).all()


def sync(rank: int, address: str, hf: dict[str, Any], parallel: Parallel, engine: int, dtype: torch.dtype) -> bool:
    """Policy ranks send, engine workers receive; twice, with other weights."""
    arch = architecture(hf)
    source, target = arch.megatron_layout(hf, parallel, "local"), arch.engine_layout(hf, engine)
    made = plan(source, target)
    transport, _kept = meet(rank, address, parallel.ranks + engine)
    good = True
    for seed in (1, 2):
        tensors = global_tensors(source.tensors, seed)
        if rank < parallel.ranks:
            sent = send(made, rank, cut(source.shards[rank], tensors), transport, 5000, dtype)
            good &= sent == made.bytes_out(dtype.itemsize)[rank]
        else:
            worker = rank - parallel.ranks
            params = empty(target.shards[worker], dtype)
            got = receive(made, worker, params, transport, 5000, dtype)
            good &= got == made.bytes_in(dtype.itemsize)[worker]
            good &= same(params, {k: v.to(dtype) for k, v in cut(target.shards[worker], tensors).items()})
    return good


@pytest.mark.parametrize(
    "model, layout, engine, dtype",
    [
        ("qwen3_moe", "pp2", 2, torch.float32),
        ("qwen3_moe_mixed", "tp2 ep2", 1, torch.bfloat16),
        ("qwen2_tied", "pp2 vpp2", 2, torch.bfloat16),
    ],
)
def test_sync_between_processes(model: str, layout: str, engine: int, dtype: torch.dtype) -> None:
    """float32 masters arrive in the engine's type, rounded once, in buckets far smaller than a tensor."""
    assert all(run_ranks(LAYOUTS[layout].ranks + engine, sync, MODELS[model], LAYOUTS[layout], engine, dtype))


def relayout(rank: int, address: str, hf: dict[str, Any], before: Parallel, after: Parallel) -> bool:
    """Every process is source and target at once."""
    arch = architecture(hf)
    source, target = arch.megatron_layout(hf, before, "local"), arch.megatron_layout(hf, after, "te")
    made = plan(source, target, distance=lambda s, t: float(s != t))
    transport, _kept = meet(rank, address, before.ranks)
    tensors = global_tensors(source.tensors)
    exchange = Exchange(made, transport, source=rank, target=rank, dtype=torch.float32, bucket_bytes=3000)
    good = True
    for _ in range(2):
        params = empty(target.shards[rank])
        sent, _ = exchange.run(cut(source.shards[rank], tensors), params)
        good &= same(params, cut(target.shards[rank], tensors))
        good &= 0 < sent < made.bytes_out(4)[rank]  # the rest stayed within the process
    return good


def test_relayout_among_the_same_processes() -> None:
    hf = MODELS["qwen3_moe"]
    assert all(run_ranks(4, relayout, hf, LAYOUTS["tp2 pp2 ep2"], LAYOUTS["cp2 ep2"]))


def leave(rank: int, address: str) -> str:
    """Process 1 joins and goes away; process 0 waits for a message of it."""
    transport, _kept = meet(rank, address, 2, timeout_s=10)
    if rank == 1:
        return ""
    short = replace(transport, timeout_s=1.5)
    work = short.receive(torch.empty(4), 1)
    start = time.monotonic()
    with pytest.raises(TransportError) as error:
        short.wait(work, 1, "model.norm.weight")
    assert time.monotonic() - start < 8
    return str(error.value)


def test_a_lost_peer_is_named_in_time() -> None:
    message = run_ranks(2, leave)[0]
    assert "process 0: process 1 did not answer" in message and "model.norm.weight" in message
    assert "\n" not in message


def test_who_did_not_join_is_named_in_time() -> None:
    store = host_store("127.0.0.1", 5)
    with pytest.raises(TransportError, match=r"rank 1, 2 of 3 did not join within 0\.3 s"):
        join(store, 0, 3, "policy rank 0", device=CPU, timeout_s=0.3)


def test_the_store_listens_on_its_address_only() -> None:
    import socket

    store = host_store("127.0.0.1", 5)
    with socket.socket() as other:
        # 127.0.0.2 is this machine too; a store on every address would answer there.
        assert other.connect_ex(("127.0.0.2", store.port)) != 0
