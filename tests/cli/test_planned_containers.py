"""Containers of environments in a dry run: numbers by hand, and notes about nodes that cannot hold the containers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl_mega.cli.planned_containers import GIB, PlannedContainers, container_notes, planned_containers
from skyrl_mega.config.compose import compose
from skyrl_mega.config.sandboxes import sandboxes_mib
from skyrl_mega.config.schema import Config

OPTIONS = "environment.options.swe.session_options"


def config(*settings: str) -> Config:
    """Returns a run of 256 trajectories a step in podman's containers of 4 GiB and 2 cores, on two nodes."""
    containers = ["session=podman", "session_options={memory_mib: 4096, cpus: 2, containers: 100}"]
    given = [f"environment.options.swe.{each}" for each in containers]
    return compose(
        "configs/gsm8k.yaml",
        [
            *("cluster=h100_2x8", "data.prompts_per_step=32", "data.samples_per_prompt=8"),
            *("data.mini_batch_prompts=null", "data.eval=[]", *given, *settings),
        ],
    )


def test_the_driver_holds_as_many_containers_as_a_process_may() -> None:
    assert planned_containers(config()) == PlannedContainers(OPTIONS, "podman", 100, 1, 100, 409_600, 200)


@pytest.mark.parametrize(
    ("settings", "most", "nodes", "on_node"),
    [
        (["environment.slots=64"], 64, 1, 64),
        (["environment.processes=2"], 200, 2, 100),
        (["environment.processes=4"], 256, 2, 128),
        (["environment.processes=4", "environment.slots=48"], 48, 2, 24),
        (["environment.processes=1"], 100, 1, 100),
    ],
)
def test_slots_and_processes_bound_and_spread_containers(
    settings: list[str], most: int, nodes: int, on_node: int
) -> None:
    planned = planned_containers(config(*settings))
    assert planned is not None and (planned.most, planned.nodes, planned.on_node) == (most, nodes, on_node)
    assert planned.node_memory_mib == on_node * 4096 and planned.node_cores == on_node * 2


def test_containers_elsewhere_need_no_memory_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_mega.cli.planned_containers.ON_HOSTS", ())
    planned = planned_containers(config())
    assert planned is not None and planned.nodes == 0
    assert [*container_notes(config("cluster.host_memory_gib=1000"), [10**15])] == []


def test_agents_in_containers_are_as_many_as_may_work_at_once() -> None:
    key = "environment.options.harness"
    local, given = "environment.options.swe.session=local", "{memory_mib: 1024, cpus: 1, containers: 512}"
    container = [f"{key}.container=podman", f"{key}.container_options={given}", "environment.workers=40"]
    planned = planned_containers(config(local, *container))
    assert planned is not None and (planned.key, planned.most) == (f"{key}.container_options", 40)
    judged = [f"{key}.reward=swe", f"{key}.reward_options={{session: podman, session_options: {given}}}"]
    planned = planned_containers(config(local, *judged))
    assert planned is not None and planned.key == f"{key}.reward_options.session_options"
    assert (planned.most, planned.node_cores) == (64, 64)


def test_other_sessions_are_no_containers() -> None:
    assert planned_containers(compose("configs/gsm8k.yaml")) is None
    assert planned_containers(config("environment.options.swe.session=local")) is None


def test_a_container_is_no_sandboxed_program() -> None:
    assert sandboxes_mib(config()) == 0.0 < sandboxes_mib(config("environment.options.swe.session=local"))


def test_nodes_without_memory_or_cores_for_the_containers_are_noted() -> None:
    roomy = config("cluster.host_memory_gib=1000", "cluster.cores_per_node=200")
    assert [*container_notes(roomy, [500 * GIB, 999 * GIB])] == [], "the second node has no containers"
    [memory] = container_notes(roomy, [700 * GIB, 0])
    assert "100 containers at once on a node may take 400 GiB together, and the run leaves 300 GiB" in memory
    [cores] = container_notes(replace(roomy, cluster=replace(roomy.cluster, cores_per_node=199)), [0, 0])
    assert "may use 200 cores, and cluster.cores_per_node = 199" in cores
    unknown = replace(roomy, cluster=replace(roomy.cluster, host_memory_gib=None, cores_per_node=None))
    assert [*container_notes(unknown, [10**15])] == []
