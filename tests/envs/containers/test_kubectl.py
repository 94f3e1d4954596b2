"""Kubernetes pods, with a fake `kubectl` whose pods are processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import kubectl, owner, pod
from skyrl_mega.envs.containers.kubectl import Kubectl, KubectlContainer
from skyrl_mega.envs.containers.program import COMMAND_S
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import filled
from tests.envs.containers.boxes import client
from tests.envs.containers.contract import check_killed_shell, check_programs
from tests.envs.processes import needs_namespaces, wait_until
from tests.envs.processes import owner as new_owner

KEY = "environment.options.swe.session_options"

pytestmark = needs_namespaces


def runtime(folder: Path, **options: Any) -> Kubectl:
    given = {"program": client(folder, "fake_kubectl"), "global_arguments": [f"--kubeconfig={folder}"], **options}
    Kubectl.check_options(given, KEY)
    return Kubectl(given)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake cluster."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture
def box(cluster: Path) -> Iterator[KubectlContainer]:
    """A container, removed at the end of the test."""
    container = runtime(cluster).start("plain", 60)
    yield container
    container.remove(20)


def present_umask() -> int:
    """Returns the mask of new files of this process, which the fake client's programs inherit."""
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def edit(cluster: Path, container: KubectlContainer, **facts: Any) -> dict[str, Any]:
    """Changes the facts of a pod and returns them."""
    file = cluster / f"{container.name}.pod"
    known = {**json.loads(file.read_text()), **facts}
    file.write_text(json.dumps(known))
    return known


def test_programs_in_a_pod(box: KubectlContainer) -> None:
    check_programs(box, "/usr")
    assert box.run(["sh", "-c", "umask"], 20).stdout == f"{present_umask():04o}\n".encode()
    assert box.run(["sh", "-c", "ls -A /tmp | wc -l"], 20).stdout == b"1\n"


def test_secrets_of_a_program_stay_out_of_process_lists(cluster: Path, box: KubectlContainer) -> None:
    box.run(["sh", "-c", "echo $KEY"], 20, variables={"KEY": "very-secret"})
    assert "very-secret" not in (cluster / "log").read_text()


def test_the_policy_kills_the_shell(box: KubectlContainer) -> None:
    check_killed_shell(box)


def test_too_much_memory_is_the_policys_failure(cluster: Path, box: KubectlContainer) -> None:
    os.kill(edit(cluster, box, end="OOMKilled")["pid"], signal.SIGKILL)
    for _ in range(2):
        ran = box.run(["true"], 20)
        assert (ran.status, ran.exit) == ("failed", None)
        assert b"too much memory" in ran.stderr


@pytest.mark.parametrize(
    ("reason", "is_fault"),
    [
        (["Evicted", "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi."], True),
        (["Evicted", 'Container box exceeded its local ephemeral storage limit "20Gi". '], False),
        (["DeadlineExceeded", "Pod was active on the node longer than the specified deadline"], True),
    ],
)
def test_an_eviction_is_a_fault_unless_the_policy_filled_the_disk(
    cluster: Path, box: KubectlContainer, reason: list[str], is_fault: bool
) -> None:
    os.kill(edit(cluster, box, evicted=reason)["pid"], signal.SIGKILL)
    if is_fault:
        with pytest.raises(InfrastructureFault, match="is lost"):
            box.run(["true"], 20)
    else:
        assert b"too much disk" in box.run(["true"], 20).stderr


def test_a_container_killed_from_outside_is_a_fault(cluster: Path, box: KubectlContainer) -> None:
    killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {edit(cluster, box)['pid']}"])
    with pytest.raises(InfrastructureFault, match="is lost"):
        box.run(["sleep", "30"], 60)
    assert killer.wait() == 0


def test_a_deleted_pod_is_a_fault(box: KubectlContainer) -> None:
    box.remove(20)
    with pytest.raises(InfrastructureFault, match=r"cannot be read: .*not found"):
        box.run(["true"], 20)


def test_a_cluster_that_does_not_answer_says_nothing_about_a_pod() -> None:
    silent = Kubectl({"program": "sh", "global_arguments": ["-c", "echo Unable to connect to the server >&2; exit 1"]})
    with pytest.raises(InfrastructureFault, match="state of the pod box cannot be read: Unable to connect"):
        silent.pod("box")


def test_half_a_reply_is_a_fault(cluster: Path, box: KubectlContainer) -> None:
    (cluster / "cut").touch()
    with pytest.raises(InfrastructureFault, match="the outputs are incomplete"):
        box.run(["seq", "1000"], 20)
    assert box.run(["echo", "again"], 20).stdout == b"again\n"


def test_a_container_without_a_shell_is_the_policys_failure(box: KubectlContainer) -> None:
    ran = box._explain(box._exec(["no-such-shell"], 20))
    assert (ran.status, ran.exit) == ("failed", None)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("missing", "ErrImagePull: .*not found"),
        ("huge", "Unschedulable: 0/3 nodes are available"),
        ("quota", "exceeded quota"),
    ],
)
def test_a_pod_that_does_not_start_is_a_fault_with_its_reason(cluster: Path, image: str, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(InfrastructureFault, match=message):
        runtime(cluster).start(image, 3 if image == "huge" else 100)
    assert time.monotonic() - begin < 60
    assert not [file for file in cluster.glob("*.pod") if image in file.read_text()]


def test_a_slow_pod_is_waited_for(cluster: Path) -> None:
    container = runtime(cluster).start("slow", 60)
    assert container.run(["echo", "here"], 20).stdout == b"here\n"
    container.remove(20)
    container.remove(20)


def test_a_killed_owner_leaves_no_pod(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.envs.containers.test_kubectl import runtime\n"
        f"runtime(Path({str(tmp_path)!r})).start('plain', 60)\nprint('up', flush=True)\ntime.sleep(99)"
    )
    with new_owner(script) as (_, line):
        assert line == "up"
        (file,) = tmp_path.glob("*.pod")
        pid = json.loads(file.read_text())["pid"]
    assert wait_until(lambda: not file.exists())
    assert not Path(f"/proc/{pid}/root").exists()


@pytest.mark.parametrize("right", ["create pods exec", "list pods", "delete pods"])
def test_a_missing_right_is_named(tmp_path: Path, right: str) -> None:
    (tmp_path / "denied").write_text(right)
    verb, _, rest = right.partition(" ")
    with pytest.raises(UserError, match=f"may not {verb} {rest.replace(' ', '/')}"):
        runtime(tmp_path).check(KEY)


def test_the_network_policy_selects_the_pods(tmp_path: Path) -> None:
    runtime(tmp_path).check(KEY)
    policy = json.loads((tmp_path / "policy.json").read_text())
    labels = pod.manifest("a", "b", Kubectl({}).options, {})["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert "egress" not in policy["spec"]


def test_a_missing_client_is_refused() -> None:
    with pytest.raises(UserError, match="there is no program no-such-kubectl"):
        Kubectl({"program": "no-such-kubectl"}).check(KEY)


def test_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "cpus": 1.5,
        "pod": {"tolerations": [{"key": "gpu"}], "nodeSelector": {"disk": "ssd"}},
        "node_selector": {"pool": "swe"},
        "container": {"securityContext": {"runAsUser": 7}},
        "pull_secrets": ["login"],
        "namespace": "rl",
    }
    for name, value in (("POD_NAME", "driver"), ("POD_UID", "u-1"), ("POD_NAMESPACE", "rl")):
        monkeypatch.setenv(name, value)
    made = pod.manifest("a", "python:3", Kubectl(options).options, {owner.LABEL: owner.owner()})
    spec, box = made["spec"], made["spec"]["containers"][0]
    assert made["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert spec["nodeSelector"] == {"pool": "swe", "disk": "ssd"}
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"], spec["automountServiceAccountToken"]) == (
        "Never",
        7200,
        False,
    )
    assert box["resources"]["limits"] == {"cpu": "1.5", "memory": "4096Mi", "ephemeral-storage": "20Gi"}
    assert box["securityContext"]["runAsUser"] == 7
    assert box["securityContext"]["allowPrivilegeEscalation"] is False
    monkeypatch.setenv("POD_NAMESPACE", "other")
    assert "ownerReferences" not in pod.manifest("a", "b", Kubectl(options).options, {})["metadata"]


def test_fields_of_the_runtime_are_refused() -> None:
    with pytest.raises(UserError, match="sets this field itself"):
        Kubectl.check_options(filled(KEY, {"pod": {"containers": []}}, Kubectl.OPTIONS), KEY)


def test_the_time_for_a_lost_container_is_bounded() -> None:
    assert kubectl.SETTLE_S < COMMAND_S
