"""Plans of real models at full scale: planning time, exact coverage and the share of each NIC.

Exact coverage is shown twice: for all tensors by arithmetic (a worker's parts lie in its pieces, do not overlap, and
add up to the pieces), and for some tensors element by element.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from random import Random

import numpy as np
import pytest

from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Layout, Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.plan.cost import Cost, cost, imbalance
from skyrl_mega.weights.plan.plan import Plan, plan
from skyrl_mega.weights.plan.topology import Topology
from tests.support.machine import within
from tests.weights.grids import REAL


@dataclass(frozen=True)
class Case:
    """A pair of layouts on nodes of 8 GPUs and 8 NICs."""

    model: str
    policy: ParallelDims
    tensor: int
    engines: int = 1
    data: int = 1
    experts: bool = False
    """Expert sharding: True if engines deal whole experts."""
    shared: bool = False


@dataclass(frozen=True)
class Made:
    source: Layout
    target: Layout
    plan: Plan
    cost: Cost
    seconds: float
    """Limit in seconds of one core for both layouts and the plan."""


CASES = {
    "30B TP2 EP8 → 4 × TP8": Case("30B", ParallelDims(32, tensor=2, expert=8), 8, 4),
    "30B EP8 PP2 → 2 × TP8": Case("30B", ParallelDims(16, pipeline=2, expert=8), 8, 2),
    "30B EP8 PP2 → 8 × TP2": Case("30B", ParallelDims(16, pipeline=2, expert=8), 2, 8),
    "30B EP8 PP2 → TP16 EP16": Case("30B", ParallelDims(16, pipeline=2, expert=8), 16, experts=True),
    "30B EP8 PP2 → DP16 EP16": Case("30B", ParallelDims(16, pipeline=2, expert=8), 1, data=16, experts=True),
    "30B EP8 PP2 → TP2 DP8 EP16": Case("30B", ParallelDims(16, pipeline=2, expert=8), 2, data=8, experts=True),
    "30B TP4 PP2 VPP2 EP8 → TP8": Case("30B", ParallelDims(16, tensor=4, pipeline=2, virtual_pipeline=2, expert=8), 8),
    "30B TP4 PP2 VPP2 EP8 → 4 × TP8": Case(
        "30B", ParallelDims(64, tensor=4, pipeline=2, virtual_pipeline=2, expert=8), 8, 4
    ),
    "30B TP2 EP4 ETP2 → 2 × TP8": Case("30B", ParallelDims(16, tensor=2, expert=4, expert_tensor=2), 8, 2),
    "30B TP4 PP2 EP8 ETP2 → 8 × TP4": Case(
        "30B", ParallelDims(32, tensor=4, pipeline=2, expert=8, expert_tensor=2), 4, 8
    ),
    "30B CP2 TP2 EP4 ETP2 → TP4 EP4": Case(
        "30B", ParallelDims(16, tensor=2, context=2, expert=4, expert_tensor=2), 4, 4, experts=True
    ),
    "3B DP8 → 8 × TP1": Case("3B", ParallelDims(8), 1, 8),
    "3B TP2 PP2 → 4 × TP2": Case("3B", ParallelDims(8, tensor=2, pipeline=2, expert_tensor=2), 2, 4),
    "Moonlight-16B-A3B TP2 EP8 → 8 × TP2": Case("Moonlight-16B-A3B", ParallelDims(16, tensor=2, expert=8), 2, 8),
    "GLM-4.5-Air TP4 EP16 → 4 × TP8": Case("GLM-4.5-Air", ParallelDims(32, tensor=4, expert=16), 8, 4),
    "7B DP32 → 8 × TP4": Case("7B", ParallelDims(32), 4, 8),
    "7B TP4 PP2 → 4 × TP4": Case("7B", ParallelDims(16, tensor=4, pipeline=2, expert_tensor=4), 4, 4),
}
SHARED = {
    "30B TP2 EP8 = 4 × TP8": Case("30B", ParallelDims(32, tensor=2, expert=8), 8, 4, shared=True),
    "30B TP4 EP8 = 2 × TP8": Case("30B", ParallelDims(16, tensor=4, expert=8), 8, 2, shared=True),
}
_DEEPSEEK = ParallelDims(256, tensor=8, pipeline=4, expert=64, first_stage_layers=17, last_stage_layers=14)
_KIMI = ParallelDims(256, tensor=8, pipeline=4, expert=64, first_stage_layers=16, last_stage_layers=15)
"""Stages with nearly equal numbers of layers with experts, because the bytes of a stage leave from the nodes of the
stage: 14, 15, 15, 14, and 15 each."""
LARGE = {
    "235B TP4 EP32 → 32 × TP8": Case("235B", ParallelDims(256, tensor=4, expert=32), 8, 32),
    "235B TP4 PP2 EP64 → 16 × EP16": Case(
        "235B", ParallelDims(256, tensor=4, pipeline=2, expert=64), 16, 16, experts=True
    ),
    "235B TP4 PP8 EP16, 11 layers at the ends → 32 × TP8": Case(
        "235B",
        ParallelDims(256, tensor=4, pipeline=8, expert=16, first_stage_layers=11, last_stage_layers=11),
        8,
        32,
    ),
    "DeepSeek-V3 TP8 PP4 EP64 → 16 × TP16": Case("DeepSeek-V3", _DEEPSEEK, 16, 16),
    "DeepSeek-V3 TP8 PP4 EP64 → 8 × TP8 DP4 EP32": Case("DeepSeek-V3", _DEEPSEEK, 8, 8, data=4, experts=True),
    "Kimi-K2 TP8 PP4 EP64 → 8 × TP32": Case("Kimi-K2-Instruct", _KIMI, 32, 8),
    "Kimi-K2 TP8 PP4 EP64 → 4 × TP8 DP8 EP64": Case("Kimi-K2-Instruct", _KIMI, 8, 4, data=8, experts=True),
    "GLM-4.5 TP8 PP4 EP32 → 32 × TP8": Case("GLM-4.5", ParallelDims(256, tensor=8, pipeline=4, expert=32), 8, 32),
    "DeepSeek-V3 TP8 PP4 EP64 = 8 × TP32": Case("DeepSeek-V3", _DEEPSEEK, 32, 8, shared=True),
}


NIGHTLY = {
    "30B EP8 PP2 → 2 × TP8",
    "30B EP8 PP2 → DP16 EP16",
    "30B TP4 PP2 VPP2 EP8 → TP8",
    "30B TP2 EP8 → 4 × TP8",
    "30B TP4 PP2 VPP2 EP8 → 4 × TP8",
    "30B TP4 PP2 EP8 ETP2 → 8 × TP4",
    "30B EP8 PP2 → TP2 DP8 EP16",
    "30B EP8 PP2 → TP16 EP16",
    "3B DP8 → 8 × TP1",
    "7B TP4 PP2 → 4 × TP4",
    "30B TP4 EP8 = 2 × TP8",
    "GLM-4.5-Air TP4 EP16 → 4 × TP8",
    "DeepSeek-V3 TP8 PP4 EP64 → 16 × TP16",
    "DeepSeek-V3 TP8 PP4 EP64 → 8 × TP8 DP4 EP32",
    "DeepSeek-V3 TP8 PP4 EP64 = 8 × TP32",
    "Kimi-K2 TP8 PP4 EP64 → 8 × TP32",
    "Kimi-K2 TP8 PP4 EP64 → 4 × TP8 DP8 EP64",
    "GLM-4.5 TP8 PP4 EP32 → 32 × TP8",
    "235B TP4 EP32 → 32 × TP8",
    "235B TP4 PP8 EP16, 11 layers at the ends → 32 × TP8",
}
"""Cases partly covered by the cuts of other cases."""


@lru_cache(maxsize=1)
def make(case: Case) -> Made:
    hf = REAL.get(case.model) or known(case.model)
    arch = architecture(hf)
    start = time.process_time()
    source = arch.megatron_layout(hf, case.policy, "te")
    target = arch.engine_layout(hf, case.tensor, case.engines, case.experts, case.data)
    sizes = len(source.shards), len(target.shards)
    shared = Topology.shared(*sizes) if case.shared else None
    transfer_plan = plan(source, target, shared or Topology.separate(*sizes))
    seconds = time.process_time() - start
    return Made(source, target, transfer_plan, cost(transfer_plan), seconds)


def named(cases: dict[str, Case]) -> pytest.MarkDecorator:
    marks = {name: [pytest.mark.nightly] if name in NIGHTLY else [] for name in cases}
    return pytest.mark.parametrize("case", [pytest.param(cases[name], id=name, marks=marks[name]) for name in cases])


@named(CASES)
def test_apart(case: Case) -> None:
    planned_case = make(case)
    assert within(planned_case.seconds, 5)
    prove_cover(planned_case)
    prove_elements(planned_case)
    prove_share(planned_case)


@named(SHARED)
def test_recipes_that_share_gpus_send_nothing_over_a_nic(case: Case) -> None:
    planned_case = make(case)
    assert within(planned_case.seconds, 5)
    assert not planned_case.cost.nic_in.any() and not planned_case.cost.nic_out.any()
    assert planned_case.cost.local.any()
    prove_cover(planned_case)
    prove_elements(planned_case)


@pytest.mark.slow
@named(LARGE)
def test_256_to_256(case: Case) -> None:
    planned_case = make(case)
    assert within(planned_case.seconds, 60)
    prove_cover(planned_case)
    prove_elements(planned_case, tensors=4, workers=2)
    prove_share(planned_case)


def prove_cover(made: Made) -> None:
    """Checks all tensors: a worker's parts cover its pieces once, a sender holds its parts, every byte is counted."""
    parts = made.plan.parts
    numel = parts.shape.prod(1)
    assert disjoint(made)
    got: list[list[np.ndarray]] = [[] for _ in made.target.shards]
    sent: list[list[np.ndarray]] = [[] for _ in made.source.shards]
    for route in made.plan.routes:
        sent[route.source].append(route.parts)
        for rank in route.receivers:
            got[rank].append(route.parts)
    first: dict[int, np.ndarray] = {}
    for rank, shard in enumerate(made.target.shards):
        mine = np.sort(np.concatenate(got[rank]))
        if id(shard) not in first:
            assert (np.diff(mine) > 0).all()
            assert all(len(places) == 1 for places in parts.locate(shard, mine))
            stored = sum(piece.box.numel for piece in shard.pieces)
            assert numel[mine].sum() == stored
            first[id(shard)] = mine
        assert np.array_equal(mine, first[id(shard)])
        assert made.cost.rank_in[rank] == 2 * numel[mine].sum()  # 1.00× of its stored bytes
    for shard in made.source.distinct[0]:
        ranks = [rank for rank, other in enumerate(made.source.shards) if other is shard]
        given = [parts for rank in ranks for parts in sent[rank]]
        if given:
            parts.locate(shard, np.unique(np.concatenate(given)))  # raises if a part is not held
    c = made.cost
    assert c.rank_in.sum() == c.nic_in.sum() + c.fabric_in.sum() + c.local.sum()


def disjoint(made: Made) -> bool:
    """Returns True if no two parts of a tensor overlap."""
    parts = made.plan.parts
    ends = np.searchsorted(parts.tensor, np.arange(len(parts.tensors) + 1))
    for a, z in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        low, high = parts.start[a:z], parts.start[a:z] + parts.shape[a:z]
        overlap = ((low[:, None] < high) & (low < high[:, None])).all(2)
        if overlap.sum() != z - a:
            return False
    return True


def prove_elements(made: Made, tensors: int = 6, workers: int = 3) -> None:
    """Copies local tensors of global element numbers for some tensors and workers, and compares with the plan."""
    random = Random(0)
    names = list(made.target.tensors)
    layer = random.choice([name for name in names if "o_proj.weight" in name]).split(".self_attn")[0]
    kinds = ("self_attn.q_", "self_attn.k", "self_attn.o_proj.weight")
    attention = [name for name in names if name.startswith(tuple(f"{layer}.{kind}" for kind in kinds))]
    sample = random.sample(attention, 3) + random.sample([n for n in names if n.startswith(f"{layer}.mlp")], 3)
    sample = [name for name in sample if prod(made.target.tensors[name]) < 2**27][:tensors]
    assert len(sample) >= min(tensors, 4)
    wanted = {names.index(name) for name in sample}
    parts = made.plan.parts
    held: dict[int, Numbers] = {}
    for worker in random.sample(range(len(made.target.shards)), workers):
        shard = made.target.shards[worker]
        expected = local_numbers(made.target, shard, sample)
        values_by_place = {where: np.full_like(values, -1) for where, values in expected.items()}
        for route in (route for route in made.plan.routes if worker in route.receivers):
            mine = route.parts[np.isin(parts.tensor[route.parts], list(wanted))]
            if len(mine):
                sender = made.source.shards[route.source]
                if id(sender) not in held:
                    held[id(sender)] = local_numbers(made.source, sender, sample)
                here, taken = held[id(sender)], parts.locate(sender, mine)
                put = parts.locate(shard, mine)
                for (_, box), (a, *_), (b,) in zip(parts.boxes(mine), taken, put, strict=True):
                    region = view(values_by_place, b.param, b.offset, box.shape)
                    assert (region == -1).all()
                    region[...] = view(here, a.param, a.offset, box.shape)
        for where, values in expected.items():
            assert np.array_equal(values_by_place[where], values)


Numbers = dict[tuple[str, tuple[int, ...]], np.ndarray]
"""Element numbers, [rows, columns] or [rows], by local parameter and entry of the stack."""


def local_numbers(layout: Layout, shard: Shard, sample: list[str]) -> Numbers:
    """Returns the sampled tensors of a shard; an element is its number over all sampled tensors, -1 elsewhere."""
    local: Numbers = {}
    for piece in shard.pieces:
        if piece.tensor in sample:
            axes = len(piece.box.shape)
            numbers = np.ravel_multi_index(
                np.ix_(*(np.arange(a, a + n) for a, n in zip(piece.box.start, piece.box.shape, strict=True))),
                layout.tensors[piece.tensor],
            )
            where = piece.param, piece.offset[:-axes]
            local.setdefault(where, np.full(shard.params[piece.param][-axes:], -1, np.int32))
            view(local, piece.param, piece.offset, piece.box.shape)[...] = numbers + (sample.index(piece.tensor) << 27)
    return local


def view(local: Numbers, param: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    inner = tuple(slice(o, o + n) for o, n in zip(offset[-len(shape) :], shape, strict=True))
    return local[param, offset[: -len(shape)]][inner]


def prove_share(made: Made) -> None:
    """Checks balance, out and in: the busiest NIC carries at most 1.05× the mean of active NICs, and of the bound."""
    assert imbalance(made.cost.nic_out) <= 1.05
    assert imbalance(made.cost.nic_in) <= 1.05
    assert made.cost.bound <= made.cost.predicted <= 1.05 * made.cost.bound
