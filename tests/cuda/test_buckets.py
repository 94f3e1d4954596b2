"""Tests of buckets with parameters on CUDA, without a GPU: fake tensors up to every kernel's launch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Layout
from skyrl_mega.weights.exchange import pack as views_of
from skyrl_mega.weights.exchange.rank_program import RankBucket, Role, rank_program
from skyrl_mega.weights.exchange.tensors import BucketViewCache
from skyrl_mega.weights.fp8.format import FP8, Wire, quantised, with_scales
from skyrl_mega.weights.fp8.scales import Scales
from skyrl_mega.weights.plan.plan import plan
from skyrl_mega.weights.transports.ipc import device_owners
from tests.support.machine import within
from tests.weights.grids import LAYOUTS
from tests.weights.test_fp8_wire import ODD

triton = pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot be imported")

from skyrl_mega.kernels import block_fp8_triton, boxes, boxes_triton  # noqa: E402

CUDA = torch.device("cuda", 0)
MANY: dict[str, Any] = {**ODD, "num_experts": 32}


class Kernel:
    """Simulated kernel with a record of the arguments of all launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **_: self.launches.append((grid, args))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Kernel]]:
    """Replaces the kernels and yields their recorders, with fake tensors on CUDA."""
    recorders = {}
    for module, names in ((boxes_triton, ("_copy", "_sum")), (block_fp8_triton, ("_amax", "_quantise", "_dequantise"))):
        for name in names:
            recorders[name] = Kernel()
            monkeypatch.setattr(module, name, recorders[name])

    def address(tensor: Tensor) -> int:
        return (1 << 40) + tensor.untyped_storage()._cdata * 512 + tensor.storage_offset() * tensor.element_size()

    def upload(array: np.ndarray, device: torch.device) -> Tensor:
        assert device == CUDA
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)

    # torch's C++ does not run these operations on tensors of a device missing in the build.
    monkeypatch.setattr(FakeTensor, "data_ptr", address, raising=False)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: torch.ops.aten.copy_(self, source))
    monkeypatch.setattr(FakeTensor, "__getitem__", _part, raising=False)
    monkeypatch.setattr(FakeTensor, "__setitem__", _put, raising=False)
    monkeypatch.setattr(boxes, "upload", upload)
    monkeypatch.setattr(boxes_triton, "upload", upload)
    monkeypatch.setattr(views_of, "upload", upload)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield recorders


def _part(tensor: Tensor, index: Any) -> Tensor:
    """Returns the indexed part of a tensor; the index is numbers and slices, or tensors."""
    index = index if isinstance(index, tuple) else (index,)
    if isinstance(index[0], Tensor):
        return torch.ops.aten.index.Tensor(tensor, list(index))
    axis = 0
    for at in index:
        if isinstance(at, int):
            tensor = tensor.select(axis, at)
        else:
            start, stop, _ = at.indices(tensor.shape[axis])
            tensor, axis = tensor.narrow(axis, start, stop - start), axis + 1
    return tensor


def _put(tensor: Tensor, index: Tensor, values: Tensor) -> None:
    torch.ops.aten.index_put_(tensor, [index], values)


def ends(hf: dict[str, Any], fp8: bool, size: int) -> tuple[Layout, Layout, Wire, list[RankBucket], list[RankBucket]]:
    """Returns layouts, wire, rank 0's buckets and the worker's buckets, for a sync from two policy ranks to one
    worker."""
    arch = architecture(hf)
    source, target = arch.megatron_layout(hf, LAYOUTS["tp2 ep2"], "te"), arch.engine_layout(hf, 1, 1)
    names = quantised(target.tensors) if fp8 else frozenset()
    wire = Wire(torch.bfloat16, names)
    if fp8:
        source, target = with_scales(source, names), with_scales(target, names)
    transfer_plan = plan(source, target, itemsize=wire.itemsize)
    where = device_owners(transfer_plan.topology, 2)
    sender, receiver = Role(0, source.shards[0], None), Role(2, None, target.shards[0])
    sent, _ = rank_program(transfer_plan, wire, sender, bucket_bytes=size, in_flight=3, target_base=2, owners=where)
    got, _ = rank_program(transfer_plan, wire, receiver, bucket_bytes=size, in_flight=3, target_base=2, owners=where)
    return source, target, wire, *([bucket for step in steps for bucket in step.new] for steps in (sent, got))


def on_cuda(shapes: dict[str, tuple[int, ...]], odd: torch.dtype | None = None) -> dict[str, Tensor]:
    """Returns bfloat16 parameters on CUDA; norms and the router get the dtype `odd` if given."""
    return {
        name: torch.empty(shape, device=CUDA, dtype=odd if odd and "norm" in name else torch.bfloat16)
        for name, shape in shapes.items()
    }


def test_hundreds_of_parts_are_one_launch(kernels: dict[str, Kernel]) -> None:
    source, target, _, sent, got = ends(MANY, False, 64 << 20)
    for shards, buckets, is_source in ((source.shards[0], sent, True), (target.shards[0], got, False)):
        params, side = on_cuda(shards.params), BucketViewCache(is_source, CUDA)
        for bucket in buckets:
            flat = torch.empty(bucket.size(True), dtype=torch.uint8, device=CUDA)
            views, owners = side.of(bucket, params.__getitem__)
            assert len(views.views) > 100 and not views.copies and not views.conversions
            views.pack(owners, flat) if is_source else views.unpack(owners, flat)
            (grid, (addresses, rows, of_tile, launched_with)), *more = kernels["_copy"].launches
            assert not more and launched_with is flat and addresses.shape == (len(views.names),)
            assert rows.shape[1] == 9 and of_tile.shape == (*grid, 2) and len(rows) >= len(views.views)
            assert {t.device for t in (addresses, rows, of_tile)} == {CUDA}
            sums = views.checksums(owners, flat)
            assert (sums.shape, sums.dtype, sums.device) == ((len(views.views),), torch.int64, CUDA)
            assert len(kernels["_sum"].launches) == 1
            kernels["_copy"].launches.clear()
            kernels["_sum"].launches.clear()
            again, _ = side.of(bucket, {name: p.clone() for name, p in params.items()}.__getitem__)
            assert again is views, "tensors of the same form, elsewhere, need no new table"
            grown = {name: p.float() for name, p in params.items()}
            assert side.of(bucket, grown.__getitem__)[0] is not views


def test_parts_that_convert_are_among_those_that_copy(kernels: dict[str, Kernel]) -> None:
    """Packs an FP8 wire from bfloat16 with norms in float32: every kind of part at both ends."""
    source, target, wire, sent, got = ends({**ODD, "num_experts": 8}, True, 1 << 20)
    shard = source.shards[0]
    sent_params = on_cuda({n: s for n, s in shard.params.items() if "_scale_inv" not in n}, torch.float32)
    scales = Scales(source, 0, wire.quantised, {i.tensor for c in sent for i in c.items}, lambda amax: None, CUDA)
    scales.compute(sent_params)
    assert kernels["_amax"].launches
    received_params = on_cuda(
        {n: s for n, s in target.shards[0].params.items() if "_scale_inv" not in n}, torch.float32
    )
    received_params |= {
        n: torch.empty(s, device=CUDA, dtype=torch.float32)
        for n, s in target.shards[0].params.items()
        if "_scale_inv" in n
    }
    for params, buckets, is_source in (({**sent_params, **scales.tables}, sent, True), (received_params, got, False)):
        kinds = set()
        for bucket in buckets:
            flat = torch.empty(bucket.size(True), dtype=torch.uint8, device=CUDA)
            views, owners = BucketViewCache(is_source, CUDA).of(bucket, params.__getitem__)
            for kernel in kernels.values():
                kernel.launches.clear()
            kinds |= {(view.dtype, view.region.dtype, view.plain) for view in views.views}
            if is_source:
                views.pack(owners, flat)
                views.quantise(owners, flat)
                assert len(kernels["_quantise"].launches) == len(views.conversions)
                assert views.checksums(owners, flat).shape == (len(views.views),)
                assert len(kernels["_sum"].launches) == 1
            else:
                views.unpack(owners, flat)
                views.dequantise(owners, flat)
                assert len(kernels["_dequantise"].launches) == len(views.conversions)
                trailer = flat[bucket.nbytes :].view(torch.int64)
                different = views.mismatches(owners, flat, trailer)
                assert (different.shape, different.dtype, different.device) == ((len(views.views),), torch.bool, CUDA)
        assert (FP8, torch.bfloat16, False) in kinds and (torch.bfloat16, torch.float32, False) in kinds
        assert (torch.bfloat16, torch.bfloat16, True) in kinds and (torch.float32, torch.float32, True) in kinds


def test_parameters_that_lie_elsewhere_are_copied_one_by_one(kernels: dict[str, Kernel]) -> None:
    """Packs a bucket on the GPU with an export's whole tensors on the host."""
    weight, on_gpu = torch.empty(8, 8, dtype=torch.bfloat16), torch.empty(8, 8, dtype=torch.bfloat16, device=CUDA)
    parts = []
    for i, (owner, param) in enumerate(((0, weight), (1, on_gpu), (0, weight))):
        at = views_of.region(owner, param, (i, 0), (0, 0), (1, 8), 16 * i)
        parts.append(views_of.BucketView(at, torch.bfloat16, None, (0, 0)))
    params = [weight, on_gpu]
    views = views_of.BucketViews(parts, ["whole", "here"], params, CUDA)
    assert views.copies == [parts[0], parts[2]]
    flat = torch.empty(48 + 24, dtype=torch.uint8, device=CUDA)
    views.pack(params, flat)
    views.unpack(params, flat)
    different = views.mismatches(params, flat, flat[48:].view(torch.int64))
    assert (different.shape, different.device) == ((3,), CUDA)
    assert len(kernels["_copy"].launches) == 2 and len(kernels["_sum"].launches) == 1


def test_views_are_told_apart_without_comparing_them(
    kernels: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds views without comparing pairs: pairwise comparison would take minutes, and comparing tensors would
    fail."""

    def compared(*_: object) -> bool:
        raise AssertionError("views are compared")

    monkeypatch.setattr(views_of.BucketView, "__eq__", compared)
    weight, other = (torch.empty(200, 200, dtype=t, device=CUDA) for t in (torch.bfloat16, torch.float32))
    parts = []
    for i in range(20_000):
        owner, param = (i % 2, (weight, other)[i % 2])
        at = views_of.region(owner, param, (i % 200, i // 200), (0, 0), (1, 1), 16 * i)
        parts.append(views_of.BucketView(at, torch.bfloat16, None, (0, 0)))
    start = time.process_time()
    views = views_of.BucketViews(parts, ["a", "b"], [weight, other], CUDA)
    assert within(time.process_time() - start, 5)
    assert len(views.copies) == 10_000 and views.views == tuple(parts)
