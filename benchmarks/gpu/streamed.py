"""Proof: an optimizer in host memory gives the same bits, at the speed of the link, with three pieces in GPU memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from benchmarks.gpu import limits, parts
from benchmarks.gpu.proof import Bench
from skyrl_mega.common.limits import OPTIMIZER_PIECES

if TYPE_CHECKING:
    from skyrl_mega.megatron.streamed_optimizer import StreamedOptimizer
    from skyrl_mega.megatron.worker import ModelWorker

GIB = 2**30
LAYERS = 24
"""Half of the slice's layers: two slices exist at the same time."""


def prove(bench: Bench) -> None:
    hf, parallel = parts.slice_of_30b(tiny_size=bench.tiny, layers=LAYERS)
    ranks = []
    for streamed in (False, True):
        policy = parts.policy_config()
        policy = replace(policy, optimizer=replace(policy.optimizer, streamed=streamed))
        ranks.append(parts.open_rank(hf, parallel, device=bench.device, policy=policy))
    staying, streamed_rank = ranks
    _, _, state = parts.held_bytes(staying)
    with torch.no_grad():
        for p, q in zip(staying.params.values(), streamed_rank.params.values(), strict=True):
            q.copy_(p)
    streamed_rank.optimizer.reload_model_params()
    for seed in (1, 2):
        for rank in ranks:
            _gradients(rank, seed)
            rank.optimizer.step()
    pairs = zip(staying.params.values(), streamed_rank.params.values(), strict=True)
    bench.holds("two steps give the same bits", all(torch.equal(p, q) for p, q in pairs))
    bench.holds("the device holds no master weight and no moment between steps", _there(streamed_rank) == 0)

    alone, beside = (bench.seconds(lambda rank=rank: rank.optimizer.step(), repeats=3) for rank in ranks)
    rate = min(limits.host_gb_s(bench, pinned=True, to_device=way) for way in (True, False))
    bench.figure("a step with all on the device", alone, "s")
    bench.figure("a streamed step", beside, "s", limit=state / rate / 1e9, limit_of="its bytes once over the link",
                 at_most=1.5 * state / rate / 1e9 + alone if bench.cuda else None)  # fmt: skip
    if not bench.cuda:
        bench.left_out("memory in a streamed step")
        return
    base = torch.cuda.memory_allocated()
    bench.figure("memory that a streamed step takes", (bench.peak(streamed_rank.optimizer.step) - base) / GIB, "GiB",
                 at_most=1.05 * _most(streamed_rank) / GIB)  # fmt: skip


def _gradients(rank: ModelWorker, seed: int) -> None:
    generator = torch.Generator(next(iter(rank.params.values())).device).manual_seed(seed)
    rank.optimizer.zero_grad()
    params: list[Any] = [*rank.params.values()]
    for p in params:
        p.main_grad.normal_(0, 0.01, generator=generator)


def _state(rank: ModelWorker) -> list[Any]:
    from skyrl_mega.megatron import moments

    return [
        (master, *(part.optimizer.state[master][kind] for kind in moments.MOMENTS))
        for part in moments.inner_optimizers(rank.optimizer)
        for p, master in moments.master_weights(part)
        if p.dtype != torch.float32
    ]


def _there(rank: ModelWorker) -> int:
    return sum(t.untyped_storage().nbytes() for kinds in _state(rank) for t in kinds)


def _most(rank: ModelWorker) -> int:
    """Returns the bytes of the three largest neighbouring pieces."""
    largest, streamed = 0, cast("StreamedOptimizer", rank.resident.streamed)
    for part in streamed.parts:
        sizes = [sum(t.numel() * t.itemsize for t in piece.tensors(part.part.optimizer)) for piece in part.pieces]
        largest = max(largest, *(sum(sizes[i : i + OPTIMIZER_PIECES]) for i in range(len(sizes))))
    return largest
