"""A preflight of several Ray nodes on one machine: healthy nodes, a node with a different package, a silent node."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_mega.cluster.errors import ClusterError
from skyrl_mega.cluster.ray_session import ENVIRONMENT
from skyrl_mega.config.schema import BuildConfig, ClusterConfig, Config
from skyrl_mega.models.tiny import build
from skyrl_mega.preflight import network, preflight
from skyrl_mega.preflight.preflight import ClusterNode, before_run, cluster_nodes
from skyrl_mega.telemetry.console import Console

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ClusterNode]]:
    """Yields three nodes; only the last node lists an extra package."""
    import ray
    from ray.cluster_utils import Cluster

    package = tmp_path_factory.mktemp("packages") / "transformer_engine-2.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.0\n")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            listed = cluster_nodes()
            for environment in ({}, {"PYTHONPATH": str(package.parent)}):
                cluster.add_node(num_cpus=1, env_vars=environment)
                listed += [node for node in cluster_nodes() if node.id not in {n.id for n in listed}]
            yield listed
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that runs a preflight of some nodes."""
    build(BuildConfig(), tmp_path / "model")
    (tmp_path / "run").mkdir()

    def make(nodes: list[ClusterNode], timeout_s: float = 240.0) -> dict[str, Any]:
        names = [ClusterNode(node.id, f"node-{i}", node.address) for i, node in enumerate(nodes)]
        monkeypatch.setattr(preflight, "cluster_nodes", lambda: names)
        config = Config(cluster=ClusterConfig(device="cpu", preflight="always", preflight_timeout_s=timeout_s))
        try:
            before_run(config, tmp_path / "model", tmp_path / "run", Console())
        finally:
            assert {p.name for p in (tmp_path / "run").iterdir()} <= {"preflight.json"}
        return json.loads((tmp_path / "run" / "preflight.json").read_text())

    return make


def test_two_nodes_that_are_fit(nodes: list[ClusterNode], run: Any) -> None:
    report = run(nodes[:2])
    assert report["fit"] and [f for f in report["findings"] if f["status"] == "bad"] == []
    assert list(report["nodes"]["node-0"]) == ["answers", "versions", "paths", "disk", "model", "network"]
    assert len(report["gb_s"]) == 1 and report["gb_s"][0] > 0


def test_a_node_with_another_package_is_named(
    nodes: list[ClusterNode], run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(network, "pairs", lambda names: [])
    with pytest.raises(ClusterError, match=r"not fit: node-2;.*node-2: transformer-engine 2\.0, 2 of 3 nodes"):
        run(nodes)
    report = json.loads((tmp_path / "run" / "preflight.json").read_text())
    assert report["bad"] == ["node-2"] and report["nodes"]["node-2"]["versions"] == "bad"
    assert report["nodes"]["node-1"]["versions"] == "ok"


def test_a_node_that_does_not_answer_is_named_in_time(
    nodes: list[ClusterNode], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "pairs", lambda names: [])
    monkeypatch.setattr(preflight, "START_S", 25.0)
    processes = psutil.process_iter(["name", "cmdline"])  # skips processes that end meanwhile
    raylets = [p for p in processes if p.info["name"] == "raylet"]
    [stopped] = [p for p in raylets if f"--node_id={nodes[1].id}" in p.info["cmdline"]]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ClusterError, match=r"not fit: node-1;.*node-1: no answer within 35 s"):
            run(nodes[:2], timeout_s=10.0)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
