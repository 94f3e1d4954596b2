"""The real `kubectl` with a small API server, whose pods are processes of this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_mega.envs.containers.kubectl import Kubectl, KubectlContainer
from skyrl_mega.envs.faults import InfrastructureFault
from tests.envs.containers.contract import check_killed_shell, check_programs
from tests.envs.processes import needs_namespaces, wait_until

pytest.importorskip("websockets")
KEY = "environment.options.swe.session_options"
CONFIG = """
apiVersion: v1
kind: Config
current-context: small
clusters: [{{name: small, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
contexts: [{{name: small, context: {{cluster: small, namespace: swe, user: nobody}}}}]
users: [{{name: nobody, user: {{}}}}]
"""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
    needs_namespaces,
]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """A runtime whose cluster is the small API server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(Path(__file__).parent / "cluster.py"), str(port)])
    config = tmp_path_factory.mktemp("kube") / "config"
    config.write_text(CONFIG.format(port=port))
    of = Kubectl({"global_arguments": [f"--kubeconfig={config}", f"--cache-dir={config.parent}/cache"]})
    wait_until(lambda: of.client.command(["get", "pods"]).status == "ok")
    yield of
    server.kill()
    server.wait()


@pytest.fixture
def box(runtime: Kubectl) -> Iterator[KubectlContainer]:
    """A container, removed at the end of the test."""
    container = runtime.start("python:3", 60)
    yield container
    container.remove(20)


def test_the_checks_of_a_cluster(runtime: Kubectl) -> None:
    runtime.check(KEY)
    runtime.check(KEY)  # the network policy exists
    assert runtime.client.command(["get", "networkpolicy", "skyrl-mega-no-network"]).status == "ok"


def test_programs_in_a_pod(box: KubectlContainer) -> None:
    check_programs(box, "/usr")


def test_a_quiet_program_keeps_its_connection(box: KubectlContainer) -> None:
    assert box.run(["sh", "-c", "sleep 11; echo end"], 60).stdout == b"end\n"


def test_the_policy_kills_the_shell(box: KubectlContainer) -> None:
    check_killed_shell(box)


def test_a_deleted_pod_is_a_fault(runtime: Kubectl) -> None:
    box = runtime.start("python:3", 60)
    box.remove(20)
    box.remove(20)
    with pytest.raises(InfrastructureFault, match=r"cannot be read: .*not found"):
        box.run(["true"], 20)
