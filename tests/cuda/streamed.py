"""The weight exchange as on GPUs, with simulated CUDA, between real processes over gloo. pytest does not collect this
file: test_streams.py runs it in a process with TRITON_INTERPRET, a variable needed before the first kernel is defined.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_mega.weights.exchange import exchange as execute
from skyrl_mega.weights.exchange import executor
from skyrl_mega.weights.exchange.executor import ChecksumError
from skyrl_mega.weights.fp8.format import Wire, quantised, with_scales
from skyrl_mega.weights.plan.topology import Links, Topology
from skyrl_mega.weights.transports.group import TransportError
from skyrl_mega.weights.transports.ipc import SharedBuffers
from tests.cuda import streams
from tests.support.ranks import Server, run_ranks
from tests.weights.grids import LAYOUTS, cut, empty, global_tensors
from tests.weights.meeting import Case, Staged, exchange, same
from tests.weights.test_fp8_wire import EVEN, whole_tensors

SMALL: dict[str, Any] = {
    **EVEN,
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_experts": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 50,
}
"""Model with small sizes, because Triton's interpreter takes some milliseconds for each part."""
RUNS = 3
SERVER = Server("tests.cuda.streamed", OMP_NUM_THREADS="1")
"""Server of ranks with the imports of this module alone."""

CASES = {
    "two processes": Case(SMALL, LAYOUTS["one"], engine=1, bucket_bytes=20000, device=streams.CUDA),
    "handed on": Case(
        SMALL,
        LAYOUTS["pp2"],
        engines=2,
        topology=Topology((0, 1), (4, 5), Links(4, 4)),
        bucket_bytes=20000,
        device=streams.CUDA,
        in_flight=2,
    ),
    "two and two guests": Case(
        SMALL,
        LAYOUTS["ep2"],
        engine=2,
        topology=Topology.shared(2, 2, Links(2, 2)),
        bucket_bytes=20000,
        device=streams.CUDA,
    ),
}


class Counted(SharedBuffers):
    made = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Counted.made += 1


def sync(rank: int, address: str, case: Case) -> dict[str, int]:
    """Runs three syncs of different weights: without checksums, with checksums, and with checksums into new memory."""
    source, target = case.layouts()
    ranks = case.parallel.ranks
    is_source = rank < ranks
    mine = source.shards[rank] if is_source else target.shards[rank - ranks]
    execute.SharedBuffers = Counted  # type: ignore[misc]
    streams.Stream.made.clear()
    with streams.pretended() as kernels:
        built, transfer_plan, _kept = exchange(rank, address, case, source, target, Wire(case.dtype))
        params = empty(mine, case.dtype)
        for run in range(RUNS):
            expected = {name: t.to(case.dtype) for name, t in cut(mine, global_tensors(source.tensors, run)).items()}
            streams.MAIN.count += 1  # simulates the optimizer's step
            if is_source:
                for name, param in params.items():
                    param.copy_(expected[name])
                report = built.run(source=params, checksums=run > 0)
            else:
                if run == RUNS - 1:
                    params = {name: param.clone() for name, param in params.items()}
                for param in params.values():
                    param.fill_(float("nan"))
                staged = Staged(params)
                report = built.run(target=staged, checksums=run > 0, loaded=staged.finish)
                assert same(params, expected)
                assert report.received + report.local == transfer_plan.bytes_in[rank - ranks]
            assert (len(streams.Stream.made), Counted.made) == (1, 1), "one stream, one set of buffers for all runs"
            (side,) = streams.Stream.made
            assert streams.MAIN.seen[side] == side.count, "what it wrote is not waited for"
        assert streams.Pool.settings.endswith("expandable_segments:True")
        built.close()
        built.close()
        assert streams.Nccl.aborted == (built._owner is None)
    return vars(report) | {name: kernel.launches for name, kernel in kernels.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_syncs_on_streams(case: Case) -> None:
    reports = run_ranks(case.size, sync, case, server=SERVER)
    assert all(r["_copy"] and r["_sum"] for r in reports)
    ranks = case.parallel.ranks
    assert sum(r["sent"] + r["forwarded"] for r in reports) == sum(r["received"] for r in reports[ranks:])


FP8 = Case(
    {
        **SMALL,
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "head_dim": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 256,
        "num_experts": 2,
    },
    LAYOUTS["ep2"],
    engine=2,
    topology=Topology.shared(2, 2, Links(2, 2)),
    bucket_bytes=1 << 17,
    device=streams.CUDA,
)


def fp8_sync(rank: int, address: str, case: Case) -> dict[str, int]:
    """Sends FP8 numbers and scales to engines and compares with a quantisation of the whole tensors."""
    source, target = case.layouts()
    names = quantised(target.tensors)
    wire = Wire(case.dtype, names)
    source, target = with_scales(source, names), with_scales(target, names)
    ranks = case.parallel.ranks
    mine = source.shards[rank] if rank < ranks else target.shards[rank - ranks]
    tensors = {name: t.bfloat16() for name, t in global_tensors(case.layouts()[1].tensors).items()}
    with streams.pretended() as kernels:
        built, _, _kept = exchange(rank, address, case, source, target, wire)
        if rank < ranks:
            held = cut(case.layouts()[0].shards[rank], {name: t.float() for name, t in tensors.items()})
            built.run(source={name: t.bfloat16() for name, t in held.items()}, checksums=True)
        else:
            types = {piece.param: wire.type_of(piece.tensor) for piece in mine.pieces}
            params = {name: tensor.to(types[name]) for name, tensor in empty(mine).items()}
            built.run(target=params, checksums=True)
            with streams.no_cuda():
                numbers, scales = whole_tensors(tensors, names)
            expected = cut(mine, {name: t.float() for name, t in (numbers | scales).items()})
            assert same({name: t.float() for name, t in params.items()}, expected)
    return {name: kernel.launches for name, kernel in kernels.items()}


def test_fp8_on_streams() -> None:
    launches = run_ranks(FP8.size, fp8_sync, FP8, server=SERVER)
    assert all(r["_amax"] and r["_quantise"] for r in launches[:2])


def fail(rank: int, address: str, case: Case, how: str) -> str:
    """Runs a sync that fails: process 0 sends a wrong byte or has a hanging device, or the last process leaves."""
    source, target = case.layouts()
    ranks = case.parallel.ranks
    streams.Stream.made.clear()
    with streams.pretended():
        built, _, _kept = exchange(rank, address, case, source, target, Wire(case.dtype))
        if how == "a wrong byte" and rank == 0:
            pack = executor.ExchangeRun.pack

            def wrong(self: Any, bucket: Any, flat: Tensor) -> None:
                pack(self, bucket, flat)
                flat[bucket.items[-1].offset] ^= 1

            executor.ExchangeRun.pack = wrong  # type: ignore[method-assign]
        if how != "a wrong byte" and rank == 0:
            streams.Event.hang = True
        params = empty(source.shards[rank] if rank < ranks else target.shards[rank - ranks], case.dtype)
        try:
            if rank < ranks:
                params = {name: torch.ones_like(param) for name, param in params.items()}
                built.run(source=params, checksums=True)
            else:
                built.run(target=params, checksums=True)
                if how == "a peer that leaves":
                    built.transport.give_up("model.norm.weight")
        except (ChecksumError, TransportError) as error:
            assert built.transport.group is None, "it is still in the group"
            assert streams.Nccl.aborted == (built._owner is None)
            assert [streams.MAIN.seen[side] for side in streams.Stream.made] == [streams.Stream.made[0].count]
            return str(error)
    return ""


def test_a_wrong_byte_is_found_on_streams() -> None:
    case = CASES["two and two guests"]
    errors = run_ranks(case.size, fail, case, "a wrong byte", server=SERVER)
    assert any("is not what process 0 sent" in message for message in errors)


@pytest.mark.parametrize(
    "how, timeout_s, said",
    [("a device that hangs", 4, "did not answer within 4 s"), ("a peer that leaves", 600, "went away")],
)
def test_a_stream_that_does_not_end_is_waited_for_with_a_limit(how: str, timeout_s: float, said: str) -> None:
    case = replace(CASES["two processes"], timeout_s=timeout_s)
    errors = run_ranks(case.size, fail, case, how, server=SERVER)
    assert f"process 1 {said} while" in errors[0] and ".weight" in errors[0]
