"""A single plan: the dry run, `weights plan` and the exchange move the same bytes, based on real placement."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from skyrl_mega.cli import dry_run, dry_run_text
from skyrl_mega.cli.weights import main
from skyrl_mega.cluster.actor_process import Location
from skyrl_mega.cluster.run_placement import RunPlacement, plan_placement
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import BuildConfig, Config
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.weights import sync as driver
from skyrl_mega.weights.connection import Connection
from skyrl_mega.weights.fp8.format import SUFFIX
from skyrl_mega.weights.plan.cache import cached_plan
from skyrl_mega.weights.plan.sync_plan import SyncInputs, copy_bytes, sync_plan
from skyrl_mega.weights.plan.topology import Topology
from skyrl_mega.weights.transports.group import host_store
from tests.support.ranks import run_ranks

HF = {**hf_config(BuildConfig(architecture="qwen3_moe", hidden=256, experts=4)), "head_dim": 128}
"""A model with heads of whole blocks: no FP8 block spans two policy ranks, so no scale needs agreement."""
SETTINGS = [
    "cluster.device=cuda",
    "cluster.nodes=2",
    "cluster.gpus_per_node=2",
    "policy.ranks=2",
    "policy.layout.expert=2",
    "policy.spec=local",
    "rollout.engines=2",
    "rollout.tensor=1",
    "model.dtype=bfloat16",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    return tmp_path


def settings(*more: str) -> Config:
    return compose(None, [*SETTINGS, "model.path=x", *more])


# ---- the bytes ---------------------------------------------------------------------------------------------------


def exchange(rank: int, address: str, inputs: dict[str, Any], plans: str) -> tuple[int, int, str]:
    """Joins like a process of a run and moves the weights once; returns bytes sent, bytes received and the plan's
    digest.
    """
    host, port = address.split(":")
    lobby = dist.TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        store = host_store(host, 60)
        lobby.set("port", str(store.port))
    connection = Connection(
        host=host,
        port=int(lobby.get("port")),
        group_name="weights",
        inputs=inputs,
        bucket_bytes=1 << 16,
        timeout_s=60,
        plans=plans,
    )
    ends, wire = connection.plan_inputs.endpoints()
    ranks = len(ends.policy.shards)
    shard = (ends.policy.shards + ends.engines.shards)[rank]
    kinds = {p.param: wire.type_of(p.tensor) if rank >= ranks else torch.bfloat16 for p in shard.pieces}
    params = {name: torch.full(shape, 0.5).to(kinds.get(name, torch.bfloat16)) for name, shape in shard.params.items()}
    if rank < ranks:
        joined = connection.join(torch.device("cpu"), source=rank)
        report = joined.run(source={name: tensor for name, tensor in params.items() if SUFFIX not in name})
    else:
        joined = connection.join(torch.device("cpu"), target=rank - ranks)
        report = joined.run(target=params)
    return report.sent + report.local, report.received + report.local, connection.plan().digest


@pytest.mark.parametrize("wire", ["auto", "fp8"])
def test_dry_run_command_and_exchange_count_alike(
    model: Path, tmp_path: Path, wire: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(f"weights.wire={wire}")
    inputs = asdict(SyncInputs.of(config, HF, plan_placement(config)))
    done = run_ranks(4, exchange, inputs, str(tmp_path / "plans"))

    values = dry_run.values(config, HF)
    assert main(["plan", "--json", "--model", str(model), *SETTINGS, f"weights.wire={wire}"]) == 0
    command = json.loads(capsys.readouterr().out)
    for counted in (values["sync"]["bytes"], command["bytes"]):
        assert counted["engine_rank_in"] == [received for _, received, _ in done[2:]]
        assert 2 * counted["network"] == sum(counted["engine_rank_in"]) == 2 * copied(wire)
    assert {digest for *_, digest in done} == {values["plan"]["digest"]} == {command["digest"]}
    assert values["plan"]["bytes_in_max"] == max(received for _, received, _ in done)
    text = dry_run_text.text(values)
    (line,) = (line for line in text.splitlines() if "on the wire" in line)
    assert ("FP8" in line) == ("FP8" in command["wire"]) == (wire == "fp8")
    assert values["plan"]["digest"] in text


def copied(wire: str) -> int:
    """Returns the bytes of a copy of the model, counted by hand.

    An FP8 linear weight takes a byte, plus four bytes for each block of 128 × 128.
    """
    from skyrl_mega.models.registry import architecture

    total = 0
    for name, shape in architecture(HF).engine_layout(HF, 1, 1).tensors.items():
        size = 1
        for n in shape:
            size *= n
        if wire == "fp8" and name.endswith("_proj.weight"):
            total += size + 4 * -(-shape[0] // 128) * -(-shape[1] // 128)
        else:
            total += 2 * size
    return total


@pytest.mark.parametrize("wire", ["auto", "fp8"])
def test_a_copy_without_a_plan_has_the_wires_bytes(wire: str) -> None:
    from skyrl_mega.models.registry import architecture

    tensors = architecture(HF).engine_layout(HF, 1, 1).tensors
    assert copy_bytes("bfloat16", wire == "fp8", tensors) == copied(wire)


def test_the_digest_is_that_of_what_is_moved(tmp_path: Path) -> None:
    config = settings()
    one = sync_plan(config, HF)
    assert cached_plan(tmp_path, 1, lambda: one).digest == cached_plan(tmp_path, 1, lambda: one).digest == one.digest
    assert sync_plan(settings("run.seed=7", "rollout.concurrency=3"), HF).digest == one.digest
    others = [
        sync_plan(settings("weights.wire=fp8"), HF),
        sync_plan(settings("rollout.engines=1"), HF),
        sync_plan(settings("cluster.shared=true"), HF),
        sync_plan(config, HF, RunPlacement((0, 1), (), (3, 2), 2)),
        sync_plan(config, hf_config(BuildConfig(architecture="qwen3_moe", hidden=256, experts=8))),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 6


# ---- the places --------------------------------------------------------------------------------------------------


class Group:
    """A group of fake actors with locations, recording calls."""

    name = "policy"

    def __init__(self, where: Sequence[tuple[str, int]]) -> None:
        self.where = [Location("m", 1, node, node, (str(gpu),)) for node, gpu in where]
        self.calls: list[Any] = []

    def submit(self, rank: int, *call: Any) -> Any:
        self.calls.append(call[1])
        return call[1]

    def submit_all(self, *call: Any) -> list[Any]:
        return [self.submit(rank, *call) for rank in range(len(self.where))]


PLANNED = ([("b", 0), ("b", 1)], [("a", 0), ("a", 1)])


def connected(
    monkeypatch: pytest.MonkeyPatch, folder: Path, config: Config, policy: Group, engines: Group
) -> tuple[driver.WeightSync, list[str]]:
    """Returns the driver's sync, without real processes, and the messages."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(driver, "host_store", lambda host, _: SimpleNamespace(host=host, port=1))
    monkeypatch.setattr(driver.WeightSync, "_await_all", lambda *_: [])
    messages: list[str] = []
    fleet: Any = SimpleNamespace(group=engines)
    return driver.WeightSync(policy, fleet, HF, config, plans=folder / "plans", say=messages.append), messages  # type: ignore


def told(group: Group) -> Connection:
    return Connection(**group.calls[-1])


def test_as_planned_the_plan_is_the_dry_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = settings()
    policy, engines = map(Group, PLANNED)
    sync, messages = connected(monkeypatch, tmp_path, config, policy, engines)
    sync._connect([0, 1])
    digest = dry_run.values(config, HF)["plan"]["digest"]
    assert told(policy).plan().digest == digest
    assert len(messages) == 1 and messages[0].startswith(f"transfer plan {digest}: an engine worker receives ")


def devices(inputs: SyncInputs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the devices of the policy ranks and of the engine workers."""
    topology = Topology.of(inputs.topology)
    return topology.sources, topology.targets


def test_real_places_replace_the_planned_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Places each engine next to a policy rank, as Ray may do: the network carries nothing."""
    config = settings()
    policy, engines = Group([("a", 1), ("b", 1)]), Group([("a", 0), ("b", 0)])
    sync, messages = connected(monkeypatch, tmp_path, config, policy, engines)
    sync._connect([0, 1])
    inputs = told(policy).plan_inputs
    assert devices(inputs) == ((1, 3), (0, 2))
    assert told(policy).plan().topology.sources == (1, 3)
    assert messages[0] == (
        "the processes are not placed as planned: policy rank 0 on node 0 device 1, not node 0 device 0; "
        "policy rank 1 on node 1 device 1, not node 0 device 1; worker 0 on node 0 device 0, not node 1 device 0; "
        "worker 1 on node 1 device 0, not node 1 device 1"
    )
    sync._connect([1])  # reported once
    assert told(policy).plan_inputs.members == (1,) and sum("not placed as planned" in line for line in messages) == 1
    # A restarted engine is on a third node.
    engines.where[1] = replace(engines.where[1], node="c", address="c")
    sync._connect([0, 1])
    inputs = told(policy).plan_inputs
    assert devices(inputs) == ((1, 5), (0, 2))


def test_a_kept_plan_of_other_settings_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings()
    planned, other = sync_plan(config, HF), sync_plan(settings("weights.wire=fp8"), HF)
    inputs = asdict(SyncInputs.of(config, HF, plan_placement(config)))
    cached_plan(tmp_path / "plans", inputs, lambda: other)
    policy, engines = map(Group, PLANNED)
    sync, _ = connected(monkeypatch, tmp_path, config, policy, engines)
    with caplog.at_level(logging.WARNING):
        sync._connect([0, 1])
    assert (
        f"has plan {other.digest}, but these settings give plan {planned.digest}; the file is replaced" in caplog.text
    )
    assert told(policy).plan().digest == sync.digest == planned.digest  # the ranks read this plan from disk


def test_engines_that_joined_follow_the_planned_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lets an engine join on a third node and another leave: the plan has places for engines in use only, and messages
    name engines by rank."""
    config = settings()
    policy, engines = map(Group, PLANNED)
    sync, messages = connected(monkeypatch, tmp_path, config, policy, engines)
    sync.fleet.facts = [SimpleNamespace(foreign=False)] * 4
    sync._connect([0, 1])
    engines.where += [Location("m", 1, "c", "c", (str(gpu),)) for gpu in (0, 1)]
    sync._connect([0, 1, 3])
    inputs = told(policy).plan_inputs
    assert (*devices(inputs), inputs.members) == ((0, 1), (2, 3, 5), (0, 1, 2))
    assert told(policy).engines == (0, 1, 3) and told(policy).plan().topology.targets == (2, 3, 5)
    sync._connect([1, 3])
    inputs = told(policy).plan_inputs
    assert (*devices(inputs), inputs.members) == ((0, 1), (2, 3, 5), (1, 2)) and told(policy).size == 4
    sync._connect([0, 1])
    assert told(policy).plan().digest == dry_run.values(config, HF)["plan"]["digest"], "as before"
    assert not any("not placed as planned" in line for line in messages)
