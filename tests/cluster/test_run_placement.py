"""Placement of a run: a device for every process, nodes filled in Ray's order, and real placement over the plan."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skyrl_mega.cluster.actor_process import Location
from skyrl_mega.cluster.run_placement import RunPlacement, actual_placement, check_nodes, plan_placement
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.devices import check_gpus
from skyrl_mega.config.derived import critic_ranks, engine_ranks, policy_ranks, reference_ranks
from skyrl_mega.config.schema import (
    AlgorithmConfig,
    ClusterConfig,
    Config,
    CriticConfig,
    LayoutConfig,
    PolicyConfig,
    ReferenceConfig,
    RolloutConfig,
)


@st.composite
def configs(draw: st.DrawFn, device: str | None = None) -> Config:
    """Draws settings of any size; with shared GPUs, each engine shares GPUs with policy ranks of a single node."""
    node = draw(st.integers(1, 8))
    tensor = draw(st.integers(1, node))
    where = device or draw(st.sampled_from(["cpu", "cuda", "auto"]))
    shared = draw(st.booleans())
    if shared and where != "cpu":
        tensor = draw(st.sampled_from([n for n in range(1, node + 1) if node % n == 0]))
    engines = draw(st.integers(1, 9))
    policy = draw(st.integers(engines * tensor if shared else 1, 90))
    layout = draw(st.sampled_from([None, LayoutConfig()]))
    gae = draw(st.booleans())
    return Config(
        algorithm=AlgorithmConfig(advantage="gae" if gae else "grpo"),
        critic=CriticConfig(ranks=draw(st.integers(1, 20)) if gae else None),
        cluster=ClusterConfig(device=where, nodes=draw(st.integers(1, 5)), gpus_per_node=node, shared=shared),
        policy=PolicyConfig(ranks=policy),
        reference=ReferenceConfig(layout=layout, ranks=draw(st.integers(1, 20)) if layout else None),
        rollout=RolloutConfig(engines=engines, tensor=tensor),
    )


@given(configs())
def test_every_process_has_a_device(config: Config) -> None:
    placement = plan_placement(config)
    workers = config.rollout.engines * engine_ranks(config.rollout)
    assert (len(placement.policy), len(placement.reference)) == (policy_ranks(config), reference_ranks(config))
    assert len(placement.critic) == critic_ranks(config) == (config.critic.ranks or 0)
    assert len(placement.engines) == workers
    devices = [
        *placement.policy,
        *placement.reference,
        *placement.critic,
        *(() if config.cluster.shared else placement.engines),
    ]
    assert len(devices) == len({*devices}) and min(devices) == 0
    if config.cluster.shared:
        on_cpu = config.cluster.device == "cpu"
        for worker, device in enumerate(placement.engines):
            apart = placement.node(device) != placement.node(placement.policy[worker])
            assert device == placement.policy[worker] or (on_cpu and apart and device not in devices)
    assert {*map(placement.node, (*devices, *placement.engines))} == {*range(placement.nodes)}, "no node is left out"


@given(configs("cuda"))
def test_engines_are_within_nodes_that_fill_up(config: Config) -> None:
    placement, per_node, size = plan_placement(config), config.cluster.gpus_per_node, engine_ranks(config.rollout)
    assert placement.per_node == per_node
    for first in range(0, len(placement.engines), size):
        devices = placement.engines[first : first + size]
        assert len({*map(placement.node, devices)}) == 1 and [*devices] == [*range(devices[0], devices[0] + size)]
    for ranks in (placement.policy, placement.reference):
        for first in range(0, len(ranks), per_node):
            group = ranks[first : first + per_node]
            assert len({*map(placement.node, group)}) == 1 and [*group] == [*range(group[0], group[0] + len(group))]
    # A node takes engines until full; at most one node has room left.
    used = Counter(map(placement.node, {*placement.policy, *placement.reference, *placement.engines}))
    with_room = [node for node in {*map(placement.node, placement.engines)} if used[node] + size <= per_node]
    assert config.cluster.shared or len(with_room) <= 1


@given(configs("cuda"))
def test_engines_are_numbered_as_they_are_once_they_are_up(config: Config) -> None:
    """Compares with the order of `by_gpu`: the first numbers go to the nodes with the most engines."""
    assume(not config.cluster.shared)
    placement, size = plan_placement(config), engine_ranks(config.rollout)
    nodes = [placement.node(device) for device in placement.engines[::size]]
    counts = Counter(nodes)
    assert nodes == sorted(nodes, key=lambda node: (-counts[node], node))


@pytest.mark.parametrize(
    ("policy", "reference", "engines", "tensor", "nodes"),
    [
        (4, 4, 3, 4, [{0: 4}, {1: 4}, {2: 2, 3: 1}]),
        (12, 4, 4, 4, [{0: 8, 1: 4}, {2: 4}, {3: 2, 1: 1, 2: 1}]),
        (12, 8, 3, 4, [{0: 8, 1: 4}, {2: 8}, {3: 2, 1: 1}]),
        (4, 0, 3, 4, [{0: 4}, {}, {1: 2, 2: 1}]),
        (12, 0, 6, 2, [{0: 8, 1: 4}, {}, {2: 4, 3: 2}]),
        (8, 0, 2, 8, [{0: 8}, {}, {1: 1, 2: 1}]),
    ],
)
def test_as_ray_packed_four_nodes(
    policy: int, reference: int, engines: int, tensor: int, nodes: list[dict[int, int]]
) -> None:
    """Compares with Ray's placement on four nodes of 8 GPUs for these sizes."""
    config = Config(
        cluster=ClusterConfig(device="cuda", nodes=4, gpus_per_node=8),
        policy=PolicyConfig(ranks=policy),
        reference=ReferenceConfig(layout=LayoutConfig(), ranks=reference) if reference else ReferenceConfig(),
        rollout=RolloutConfig(engines=engines, tensor=tensor),
    )
    placement = plan_placement(config)
    every = (placement.policy, placement.reference, placement.engines[::tensor])
    assert [Counter(map(placement.node, devices)) for devices in every] == nodes


def refused(config: Config, training: bool = True) -> str:
    """Returns the error message for settings with enough GPUs and no valid placement, or an empty text."""
    check_gpus(config, training)
    try:
        check_nodes(config, training)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("reference", [None, LayoutConfig()])
@pytest.mark.parametrize("shared", [False, True])
def test_a_policy_that_takes_every_node_is_refused_too(shared: bool, reference: LayoutConfig | None) -> None:
    """Rejects a policy on all nodes: `policy.ranks` and `reference.ranks` follow `cluster.nodes`, so more nodes mean
    more ranks.
    """
    config = Config(
        cluster=ClusterConfig(device="cuda", nodes=2, gpus_per_node=8, shared=shared),
        reference=ReferenceConfig(layout=reference),
        rollout=RolloutConfig(engines=2, tensor=8),
    )
    if shared and reference is None:
        check_nodes(config)
        return
    enough = 2 + 2 * (reference is not None) + 2 * (not shared)
    with pytest.raises(UserError, match=f"cluster.nodes = 2: policy 16 .* give cluster.nodes={enough},"):
        check_nodes(config)


def test_what_has_gpus_enough_and_no_place_is_refused_with_a_number_of_nodes_that_do() -> None:
    """Tries all sizes on up to three nodes of 4 GPUs. Settings with room for all parts in order raise no error."""
    refused_count = 0
    for nodes, policy, reference, engines, tensor in product(
        (1, 2, 3), range(1, 12), range(8), range(1, 6), range(1, 5)
    ):
        if policy + reference + engines * tensor > 4 * nodes:
            continue
        config = Config(
            cluster=ClusterConfig(device="cuda", nodes=nodes, gpus_per_node=4),
            policy=PolicyConfig(ranks=policy),
            reference=ReferenceConfig(layout=LayoutConfig(), ranks=reference) if reference else ReferenceConfig(),
            rollout=RolloutConfig(engines=engines, tensor=tensor),
        )
        line = refused(config)
        assert bool(line) == (plan_placement(config).nodes > nodes), config
        if line:
            refused_count += 1
            assert line.startswith(f"cluster.nodes = {nodes}: policy {policy} + ") and "rollout.engines" in line, line
            enough = int(line.partition("give cluster.nodes=")[2].partition(",")[0])
            assert not refused(replace(config, cluster=replace(config.cluster, nodes=enough)))
        if not reference and tensor <= 2 and policy % tensor == 0:
            assert not line, "what is left of every node is whole engines"
    assert refused_count > 50


def test_a_policy_and_a_reference_that_take_half_a_node_each_leave_none_for_an_engine() -> None:
    cluster = ClusterConfig(device="cuda", nodes=2, gpus_per_node=8)
    config = Config(
        cluster=cluster,
        policy=PolicyConfig(ranks=4),
        reference=ReferenceConfig(layout=LayoutConfig(), ranks=4),
        rollout=RolloutConfig(engines=1, tensor=8),
    )
    assert "policy 4 + reference 4 + 1 engines of 8 GPUs" in refused(config)
    assert "give cluster.nodes=3," in refused(config)


def test_an_evaluations_engines_need_nodes_that_hold_them_whole() -> None:
    """Rejects five engines of 3 GPUs on two nodes: 15 GPUs of 16, but a node of 8 holds only two engines."""
    config = Config(
        cluster=ClusterConfig(device="cuda", nodes=2, gpus_per_node=8), rollout=RolloutConfig(engines=5, tensor=3)
    )
    assert refused(config, training=False).startswith("cluster.nodes = 2: 5 engines of 3 GPUs do not fit there")
    assert not refused(replace(config, rollout=RolloutConfig(engines=4, tensor=3)), training=False)


@given(configs("cpu"))
def test_cpus_share_the_processes_evenly(config: Config) -> None:
    placement = plan_placement(config)
    assert placement.nodes <= config.cluster.nodes
    assume(not config.cluster.shared)
    engines = placement.engines[:: engine_ranks(config.rollout)]
    shares = Counter(map(placement.node, [*placement.policy, *placement.reference, *placement.critic, *engines]))
    assert max(shares.values()) - min(shares.values()) <= 1


def up(config: Config, placement: RunPlacement, names: list[str]) -> tuple[list[Location], list[Location]]:
    """Returns the locations of processes placed as planned; `names` are the node names."""
    size, cpu = engine_ranks(config.rollout), config.cluster.device == "cpu"

    def at(devices: tuple[int, ...]) -> Location:
        gpus = () if cpu else tuple(str(device % placement.per_node) for device in devices)
        return Location("m", 1, "10.0.0.1", names[placement.node(devices[0])], gpus)

    engines = [placement.engines[i : i + size] for i in range(0, len(placement.engines), size)]
    policy = [at((device,)) for device in placement.policy]
    return policy, [replace(at(e), gpus=()) if config.cluster.shared else at(e) for e in engines]


@given(configs(), st.randoms(use_true_random=False))
def test_what_is_up_as_planned_is_the_plan(config: Config, order: random.Random) -> None:
    """Compares real placement with the plan under any node names."""
    planned = plan_placement(config)
    names = [f"node{n}" for n in range(planned.nodes)]
    order.shuffle(names)
    assert actual_placement(config, *up(config, planned, names)) == planned


def test_what_is_up_otherwise() -> None:
    """Swaps the places of engines and puts an engine next to the policy."""
    config = Config(
        cluster=ClusterConfig(device="cuda", nodes=3, gpus_per_node=4),
        policy=PolicyConfig(ranks=2),
        rollout=RolloutConfig(engines=3, tensor=2),
    )
    assert plan_placement(config) == RunPlacement((0, 1), (), (4, 5, 6, 7, 8, 9), 4)

    def at(node: str, *gpus: str) -> Location:
        return Location("m", 1, node, node, gpus)

    policy = [at("b", "2"), at("b", "3")]
    placement = actual_placement(config, policy, [at("c", "0", "1"), at("a", "2", "3"), at("b", "0", "1")])
    assert placement == RunPlacement((2, 3), (), (4, 5, 10, 11, 0, 1), 4)
    assert [placement.node(device) for device in placement.engines] == [1, 1, 2, 2, 0, 0]
    # GPUs without small numbers as names are counted.
    placement = actual_placement(
        config, [at("b", "GPU-x"), at("b", "GPU-y")], [at("c", *"45"), at("c", *"67"), at("b", *"01")]
    )
    assert placement == RunPlacement((0, 1), (), (4, 5, 6, 7, 2, 3), 4)


def test_shared_gpus_on_cpus_of_several_nodes() -> None:
    """Places engines next to the policy ranks; a worker gets a separate device if the rank is on another node."""
    config = Config(
        cluster=ClusterConfig(device="cpu", nodes=2, shared=True),
        policy=PolicyConfig(ranks=4),
        rollout=RolloutConfig(engines=1, tensor=4),
    )
    assert plan_placement(config) == RunPlacement((0, 1, 8, 9), (), (0, 1, 2, 3), 8)
