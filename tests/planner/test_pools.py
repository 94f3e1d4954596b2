"""Engines on nodes of another kind: placement, transfer plan, memory, times and cost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.cli import dry_run, simulate_choices
from skyrl_mega.cluster.run_placement import check_nodes, plan_placement
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.derived import engine_ranks, policy_ranks
from skyrl_mega.config.gpus import GPUS
from skyrl_mega.config.pools import engine_view, label_of, total_nodes
from skyrl_mega.config.schema import ClusterConfig, Config, PolicyConfig, RolloutConfig
from skyrl_mega.config.schema.pools import PoolConfig, PoolsConfig
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fit, search
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.decode import reads
from skyrl_mega.planner.memory import GIB, engine_memory, gpu_bytes
from skyrl_mega.planner.times import decoding, policy_times
from skyrl_mega.weights.plan.cost import cost
from skyrl_mega.weights.plan.plan import Plan, plan
from skyrl_mega.weights.plan.topology import Links, PoolLinks, Topology
from tests.weights.grids import MODELS

BIG = "models/Qwen3-30B-A3B"
SETTINGS = [
    *("model.path=" + BIG, "cluster.device=cuda", "cluster.nodes=4", "policy.ranks=32", "policy.layout.tensor=4"),
    *("policy.layout.expert=8", "policy.recompute=full", "rollout.tensor=4", "rollout.engines=4"),
    *("cluster.pools.engines.nodes=2", "rollout.memory_fraction=0.9", "run.name=pools", "run.steps=10"),
]


def settings(*given: str) -> Config:
    return compose(None, [*SETTINGS, 'data.train=["a.parquet"]', *given])


@st.composite
def pools(draw: st.DrawFn) -> Config:
    node, other = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    tensor = draw(st.integers(1, other))
    pool = PoolConfig(nodes=draw(st.integers(1, 4)), gpus_per_node=other)
    device = draw(st.sampled_from(["cpu", "cuda"]))
    return Config(
        cluster=ClusterConfig(
            device=device, nodes=draw(st.integers(1, 4)), gpus_per_node=node, pools=PoolsConfig(engines=pool)
        ),
        policy=PolicyConfig(ranks=draw(st.integers(1, 40))),
        rollout=RolloutConfig(engines=draw(st.integers(1, 9)), tensor=tensor),
    )


@given(pools())
def test_engines_are_on_the_nodes_of_the_pool_alone(config: Config) -> None:
    placed, pool, size = plan_placement(config), config.cluster.pools.engines, engine_ranks(config.rollout)
    assert pool is not None
    assert len(placed.policy) == policy_ranks(config) and len({*placed.policy}) == len(placed.policy)
    assert len({*placed.engines}) == len(placed.engines) == config.rollout.engines * size
    on_engines = Counter(map(placed.node, placed.engines))
    assert min(on_engines) >= config.cluster.nodes
    for first in range(0, len(placed.engines), size):
        assert len({*map(placed.node, placed.engines[first : first + size])}) == 1
    if config.cluster.device == "cpu":
        assert {*map(placed.node, placed.policy)} <= {*range(config.cluster.nodes)}
        return
    assert max(device % placed.per_node for device in placed.engines) < pool.gpus_per_node
    assert max(device % placed.per_node for device in placed.policy) < config.cluster.gpus_per_node
    policy_fits = policy_ranks(config) <= config.cluster.nodes * config.cluster.gpus_per_node
    engines_fit = config.rollout.engines <= pool.nodes * (pool.gpus_per_node // size)
    try:
        check_nodes(config)
        fits = True
    except UserError:
        fits = False
    assert fits == (policy_fits and engines_fit)
    if fits:
        assert {*map(placed.node, placed.policy)}.isdisjoint(on_engines) and placed.nodes <= total_nodes(config)


@pytest.mark.parametrize("links", [Links(8, 8), Links(8, 2, 25.0)], ids=["a card each", "two cards"])
def test_bytes_and_seconds_are_those_of_each_nodes_own_links(links: Links) -> None:
    """Counts the plan's bytes over every link route by route, in plain Python, and divides by the link's own speed."""
    arch, hf = architecture(MODELS["qwen3_moe"]), MODELS["qwen3_moe"]
    other = Links(4, 1, nic_gb_s=7.0, fabric_gb_s=20.0)
    parallel = ParallelDims(ranks=16, tensor=2, expert=4)
    source, target = arch.megatron_layout(hf, parallel, "local"), arch.engine_layout(hf, 2, 4)
    targets = tuple(8 * node + gpu for node in (2, 3) for gpu in range(4))
    made = plan(source, target, Topology(tuple(range(16)), targets, links, PoolLinks(2, other)))
    nic, fabric = hops(made, links, other)
    found = cost(made)
    sent = max(size / links.nic_gb_s for (_, way, _), size in nic.items() if way == "out")
    received = max(size / other.nic_gb_s for (_, way, _), size in nic.items() if way == "in")
    forwarded = max(fabric.values()) / other.fabric_gb_s
    assert found.seconds["nic_out"] * 1e9 == pytest.approx(sent)
    assert found.seconds["nic_in"] * 1e9 == pytest.approx(received)
    assert found.seconds["fabric_in"] * 1e9 == pytest.approx(forwarded)
    assert 0 < found.bound <= found.predicted * (1 + 1e-9)
    assert found.node_in[2:].sum() == found.nic_in.sum() == sum(s for (_, way, _), s in nic.items() if way == "in")


def hops(made: Plan, links: Links, other: Links) -> tuple[Counter[tuple[int, str, int]], Counter[int]]:
    """Returns (node, way, NIC of the node) → bytes, and receiving device → bytes from other devices of the node."""
    nic: Counter[tuple[int, str, int]] = Counter()
    fabric: Counter[int] = Counter()
    for route in made.routes:
        size = int(made.parts.nbytes[route.parts].sum())
        start, first = made.topology.sources[route.source], made.topology.targets[route.receivers[0]]
        nic[start // 8, "out", start % 8 * links.nics_per_node // 8] += size
        nic[first // 8, "in", first % 8 * other.nics_per_node // 4] += size
        for further in route.receivers[1:]:
            fabric[made.topology.targets[further]] += size
    return nic, fabric


def test_a_pool_of_the_same_kind_changes_no_byte() -> None:
    arch, hf = architecture(MODELS["qwen3_moe"]), MODELS["qwen3_moe"]
    source, target = arch.megatron_layout(hf, ParallelDims(ranks=8), "local"), arch.engine_layout(hf, 2, 2)
    ends = (tuple(range(8)), tuple(range(8, 12)))
    alike = cost(plan(source, target, Topology(*ends, Links())))
    apart = cost(plan(source, target, Topology(*ends, Links(), PoolLinks(1, Links()))))
    assert np.array_equal(alike.nic_in, apart.nic_in) and alike.seconds == apart.seconds
    assert alike.bound == apart.bound


@pytest.mark.parametrize("gpu", ["L40S", "A100", "H200"])
def test_engines_fit_their_own_gpu(gpu: str) -> None:
    config = settings(f"cluster.pools.engines.gpu={gpu}")
    hf, _ = dry_run.checked(config)
    decoder = architecture(hf).describe(hf)
    memory = engine_memory(config, decoder)
    assert memory.budget == int(0.9 * int(GPUS[gpu].memory_gib * GIB))
    assert gpu_bytes(config) == int(79.1 * GIB) and gpu_bytes(engine_view(config)) == int(GPUS[gpu].memory_gib * GIB)


def test_an_engine_too_large_for_its_gpu_is_refused_with_its_memory() -> None:
    config = settings("cluster.pools.engines.gpu=L40S", "rollout.tensor=1", "rollout.engines=16")
    hf, _ = dry_run.checked(settings())
    with pytest.raises(UserError, match=r"rollout.memory_fraction = 0.9: an engine worker may take 40.0 GiB"):
        fit.check(replace(config, policy=replace(config.policy, micro_tokens=8192)), hf)


def test_engines_decode_at_the_rates_of_their_gpu_and_the_policy_trains_at_its_own() -> None:
    slow, fast = settings("cluster.pools.engines.gpu=L40S"), settings("cluster.pools.engines.gpu=H200")
    hf, _ = dry_run.checked(slow)
    decoder = architecture(hf).describe(hf)
    read = reads(slow, decoder)
    share = slow.cluster.rates.memory_share
    for running in (1, 8):
        per_step = read.weights(running) + running * 1000.0 * read.per_token
        gap = per_step / share * (1 / GPUS["L40S"].memory_gb_s - 1 / GPUS["H200"].memory_gb_s) / 1e9
        assert decoding(slow, decoder, 1000.0)(running) - decoding(fast, decoder, 1000.0)(running) == pytest.approx(gap)
    trained = [
        policy_times(replace(c, policy=replace(c.policy, micro_tokens=8192)), decoder, grid, batch(c, grid))
        for c in (slow, fast)
        if (grid := fit.parallel_of(c)[0])
    ]
    assert trained[0] == trained[1]


def test_gpu_hours_are_counted_by_kind() -> None:
    config = settings("cluster.pools.engines.gpu=A100", "cluster.pools.engines.gpus_per_node=4", "rollout.engines=2")
    hf, _ = dry_run.checked(config)
    run = dry_run.values(config, hf)["time"]["run"]
    hours = run["seconds"]["estimate"] / 3600
    assert run["gpus"] == 32 + 8
    assert run["gpu_hours_by_kind"] == {"policy": pytest.approx(32 * hours), "engines": pytest.approx(8 * hours)}
    assert run["gpu_hours"]["estimate"] == pytest.approx(40 * hours)


def test_suggest_and_simulate_leave_each_side_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings("cluster.pools.engines.gpu=H200")
    hf, _ = dry_run.checked(config)
    monkeypatch.setattr(search, "SECONDS", 2)
    found = search.search(config, hf).suggestions
    assert found
    for suggestion in found:
        assert suggestion.config.policy.ranks == 32
        assert suggestion.config.rollout.engines * engine_ranks(suggestion.config.rollout) == 16
        check(suggestion.config, planned=True)
    splits = simulate_choices.splits(config, hf)
    assert splits and {dict(split)["rollout.engines"] for split in splits} == {4}
    assert max(dict(split)["policy.ranks"] for split in splits) == 32


def test_a_label_of_the_users_own_or_of_the_gpu() -> None:
    assert label_of(PoolConfig(gpu="L40S")) == ("ray.io/accelerator-type", "L40S")
    assert label_of(PoolConfig(label=" pool = engines")) == ("pool", "engines")


def test_a_label_is_one_that_a_node_of_ray_can_have() -> None:
    for label in ("a", "a=", "=b", "a=b=c", "a=!b", "a= !b", "a=in(b,c)", "a b=c d", "a=b_", "-a=b", "a=" + 64 * "b"):
        assert [key for key, *_ in PoolConfig(label=label).refusals("pool")] == ["pool.label"], label
    for label in (None, "pool=engines", " pool = engines", "ray.io/accelerator-type=H100", "a=1", "a=" + 63 * "b"):
        assert not [*PoolConfig(label=label).refusals("pool")], label


def test_random_pools_have_lower_bounds_below_their_plans() -> None:
    chance = random.Random(5)
    arch, hf = architecture(MODELS["qwen3_moe"]), MODELS["qwen3_moe"]
    source = arch.megatron_layout(hf, ParallelDims(ranks=8, expert=2), "local")
    for _ in range(6):
        other = Links(4, chance.choice([1, 2, 4]), chance.uniform(1, 90), chance.uniform(5, 900))
        target = arch.engine_layout(hf, 2, 4)
        targets = tuple(8 * node + gpu for node in (1, 2) for gpu in range(4))
        found = cost(plan(source, target, Topology(tuple(range(8)), targets, Links(8, 8, 40.0), PoolLinks(1, other))))
        assert found.bound <= found.predicted * (1 + 1e-9)
