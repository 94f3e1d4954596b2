"""The launcher on a running Ray cluster of several nodes, with a token."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.slurm.cluster import ROOT, ClusterFault, Slurm
from tests.slurm.conftest import ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Tiny = Callable[..., list[str]]


def test_who_is_refused_and_who_waits(slurm: Slurm, tiny: Tiny) -> None:
    """Launches on a cluster of two nodes with a wrong token, and with too many nodes."""
    with ray_cluster(slurm, ["node1", "node2"]) as cluster:
        arguments = tiny("refused", "cluster.start_timeout_s=3")

        def launch(*settings: str, **env: str) -> str:
            around = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address, **env}
            command = [sys.executable, "-m", "skyrl_mega.launch", *arguments, *settings]
            with pytest.raises(ClusterFault) as caught:
                slurm.run(*command, node="node2", env=around, timeout=200)
            return str(caught.value)

        other = launch(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
        assert "exit 2" in other and "refuses the connection" in other and "RAY_AUTH_TOKEN_PATH" in other
        missing = launch("cluster.nodes=3", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=cluster.token)
        assert "exit 1" in missing and "2 of 3 nodes of the Ray cluster have joined: 10.77.0.1, 10.77.0.2" in missing
