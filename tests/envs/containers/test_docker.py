"""The runtimes podman and docker: their command lines, and whose fault the end of a container is."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import docker_container, memory_kills, program
from skyrl_mega.envs.containers.docker import Docker, Podman
from skyrl_mega.envs.containers.docker_container import CommandLineContainer
from skyrl_mega.envs.containers.registry import make_pool
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault
from tests.support import fake_podman

PROGRAM = str(Path(fake_podman.__file__))
UNAVAILABLE = {"exit": 125, "stderr": "Error: fork: resource temporarily unavailable\n"}
MISSING = "Error: OCI runtime attempted to invoke a command that was not found\n"


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"program": PROGRAM, "global_arguments": [f"--root={tmp_path}"]}


@pytest.fixture
def container(tmp_path: Path, options: dict[str, Any]) -> CommandLineContainer:
    """Returns a running container, without the calls of a start."""
    running = CommandLineContainer(Podman(options).client, "skyrl-mega-1", 7200)
    (tmp_path / "containers").mkdir()
    (tmp_path / "containers" / running.name).write_text("true false 0")
    return running


def prepare(folder: Path, subcommand: str, *answers: dict[str, Any]) -> None:
    """Prepares answers of the fake client."""
    (folder / "answers").mkdir(exist_ok=True)
    (folder / "answers" / subcommand).write_text(json.dumps(answers))


def calls(folder: Path, subcommand: str) -> list[list[str]]:
    """Returns the arguments of all calls of a subcommand."""
    found = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return [words[1:] for words in found if words[0] == subcommand]


def test_a_container_gets_limits_and_no_rights(tmp_path: Path, options: dict[str, Any]) -> None:
    Podman({**options, "memory_mib": 100, "cpus": 3, "processes": 50, "arguments": ["--shm-size=1g"]}).start(
        "image", 60
    )
    [words] = calls(tmp_path, "run")
    assert {
        "--network=none",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--pull=never",
        "--http-proxy=false",
    } < set(words)
    assert {"--memory=100m", "--memory-swap=100m", "--cpus=3", "--pids-limit=50", "--shm-size=1g"} < set(words)
    assert not [word for word in words if word.startswith(("--volume", "-v", "--mount", "--privileged", "--device"))]
    assert words[words.index("--entrypoint") :][1:3] == ["sh", "image"]


def test_docker_knows_no_option_of_podman(tmp_path: Path, options: dict[str, Any]) -> None:
    Docker({**options, "memory_mib": 0, "cpus": 0}).start("image", 60)
    [words] = calls(tmp_path, "run")
    assert not [word for word in words if word.startswith(("--http-proxy", "--memory", "--cpus"))]


def test_keys_do_not_appear_in_the_list_of_processes(tmp_path: Path, container: CommandLineContainer) -> None:
    ran = container.run(["sh", "-c", "echo $OPENAI_API_KEY"], 30, variables={"OPENAI_API_KEY": "secret-1", "A": "b c"})
    assert ran.stdout == b"secret-1\n"
    assert "--env=A=b c" in calls(tmp_path, "exec")[-1]
    assert "secret-1" not in (tmp_path / "log").read_text()


def test_a_program_that_is_late_is_ended_inside(tmp_path: Path, container: CommandLineContainer) -> None:
    start = time.monotonic()
    ran = container.run(["sleep", "60"], 0.5)
    assert (ran.status, ran.exit) == ("timeout", None) and time.monotonic() - start < 30
    assert calls(tmp_path, "exec")[-1][-1] == "kill -9 -1"
    assert container.run(["cat", "/dev/zero"], 30, limit=1000).status == "output"


@pytest.mark.parametrize("code", [1, 125, 126, 127, 137, 255])
@pytest.mark.parametrize("error", ["Error: no such container", "Cannot connect to the database"])
def test_a_program_whose_error_looks_like_the_clients_runs_once(
    tmp_path: Path, container: CommandLineContainer, code: int, error: str
) -> None:
    ran = container.run(["sh", "-c", f"echo line >> {tmp_path}/lines; echo '{error}' >&2; exit {code}"], 30)
    assert (ran.status, ran.exit, ran.stderr.decode()) == ("failed", code, f"{error}\n")
    assert (tmp_path / "lines").read_text() == "line\n" and not calls(tmp_path, "restart")


def test_the_second_run_of_a_command_has_the_remaining_time(
    tmp_path: Path, container: CommandLineContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, "exec", {**UNAVAILABLE, "seconds": 1})
    limits: list[float] = []

    def run_program(argv: list[str], timeout_s: float, **options: Any) -> CommandOutput:
        limits.append(timeout_s)
        return original(argv, timeout_s, **options)

    original = program.run_program
    monkeypatch.setattr(program, "run_program", run_program)
    assert container.run(["true"], 300).status == "ok"
    assert limits[0] == 300 and limits[-1] <= 299 and len(calls(tmp_path, "restart")) == 1


@pytest.mark.parametrize(("size", "status"), [(10, "ok"), (11, "output")])
def test_the_limit_of_output_is_exact(container: CommandLineContainer, size: int, status: str) -> None:
    for stream in (1, 2):
        ran = container.run(["sh", "-c", f"head -c {size} /dev/zero >&{stream}"], 30, limit=10)
        assert ran.status == status and max(len(ran.stdout), len(ran.stderr)) == 10


def test_a_command_runs_again_after_a_failure_of_the_client(tmp_path: Path, container: CommandLineContainer) -> None:
    prepare(tmp_path, "exec", UNAVAILABLE)
    assert container.run(["cat"], 30, stdin=b"in").stdout == b"in"
    assert len(calls(tmp_path, "restart")) == 1


def test_a_container_that_cannot_be_restarted(tmp_path: Path, container: CommandLineContainer) -> None:
    prepare(tmp_path, "exec", UNAVAILABLE, UNAVAILABLE)
    prepare(tmp_path, "restart", UNAVAILABLE, UNAVAILABLE)
    with pytest.raises(InfrastructureFault, match="temporarily unavailable"):
        container.run(["true"], 30)
    prepare(tmp_path, "container", {"exit": 0, "stdout": "true false 0"}, {"exit": 0, "stdout": "false false 137"})
    assert container.run(["true"], 30).exit is None  # the policy removed `sh`, so process 1 does not start again
    container.end_processes(30)


def test_arguments_that_no_program_can_receive_fail_the_command(container: CommandLineContainer) -> None:
    assert container.run(["echo", "a\0b"], 30).status == "failed"
    assert container.run(["echo", "a" * 200_000], 30).exit == 126


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ("false true 137", None),  # the memory limit
        ("false false 3", None),  # process 1 ended by itself
        ("false false 0", None),
        ("false false 137", "killed from outside"),
        (None, "is gone"),
    ],
)
def test_whose_fault_the_end_of_a_container_is(
    tmp_path: Path, container: CommandLineContainer, state: str | None, fault: str | None
) -> None:
    path = tmp_path / "containers" / container.name
    path.write_text(state) if state else path.unlink()
    if fault is None:
        assert [(ran.status, ran.exit) for ran in (container.run(["true"], 30),) * 2] == [("failed", None)] * 2
        container.end_processes(30)
    else:
        with pytest.raises(InfrastructureFault, match=fault):
            container.run(["true"], 30)
        with pytest.raises(InfrastructureFault, match=fault):
            container.end_processes(30)
    container.remove(30)


def test_a_kill_for_memory_that_the_client_did_not_notice_is_the_policys(
    tmp_path: Path, container: CommandLineContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "containers" / container.name).write_text("false false 137")
    monkeypatch.setattr(docker_container, "memory_kills", lambda: container._memory_kills + 1)
    monkeypatch.setattr(memory_kills, "LOG", str(tmp_path / "no log"))
    assert [container.run(["true"], 30).exit for _ in range(2)] == [None, None]
    assert b"too much memory" in container.run(["true"], 30).stderr


KILL = """\
6,1,1,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/machine/libpod-{},task_memcg=/machine/x,task=sh
3,2,2,-;Memory cgroup out of memory: Killed process 15962 (sh) total-vm:2592kB
"""
"""Records of the kernel's log about a kill for memory."""


@pytest.mark.parametrize(
    ("log", "kills", "policy"),
    [
        (KILL.format("abc") + KILL.format("def"), 1, False),  # the older kill was in the container
        (KILL.format("abc") + KILL.format("def"), 2, True),
        (KILL.format("def"), 2, True),  # the log does not show all kills
        (KILL.format("def") + KILL.splitlines()[1], 1, True),
        (
            "6,1,1,-;oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg=/libpod-abc\n" + KILL.splitlines()[1],
            1,
            False,
        ),
    ],
)
def test_a_kill_for_memory_elsewhere_is_not_the_policys(
    tmp_path: Path,
    container: CommandLineContainer,
    monkeypatch: pytest.MonkeyPatch,
    log: str,
    kills: int,
    policy: bool,
) -> None:
    (tmp_path / "log of the kernel").write_text(log)
    monkeypatch.setattr(memory_kills, "LOG", str(tmp_path / "log of the kernel"))
    monkeypatch.setattr(docker_container, "memory_kills", lambda: container._memory_kills + kills)
    (tmp_path / "containers" / container.name).write_text("false false 137")
    prepare(tmp_path, "container", {"exit": 0, "stdout": "false false 137"}, {"exit": 0, "stdout": "abc"})
    if policy:
        assert b"too much memory" in container.run(["true"], 30).stderr
    else:
        with pytest.raises(InfrastructureFault, match="killed from outside"):
            container.run(["true"], 30)


def test_the_end_of_the_lifetime_is_a_fault(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    container = Podman({**options, "lifetime_s": 100}).start("image", 60)
    (tmp_path / "containers" / container.name).write_text("false false 3")
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 101)
    with pytest.raises(InfrastructureFault, match="lifetime_s"):
        container.end_processes(30)


@pytest.mark.parametrize("subcommand", ["run", "exec"])
def test_a_container_that_does_not_start_is_removed(tmp_path: Path, options: dict[str, Any], subcommand: str) -> None:
    prepare(tmp_path, subcommand, {"exit": 127, "stderr": MISSING})
    with pytest.raises(InfrastructureFault, match=r"no container of image starts: .*not found"):
        Podman(options).start("image", 60)
    assert not list((tmp_path / "containers").iterdir())
    name = next(word for word in calls(tmp_path, "run")[0] if word.startswith("--name=")).removeprefix("--name=")
    assert calls(tmp_path, "rm") == [["--force", "--volumes", name]]


def test_containers_of_ended_owners_are_removed_at_the_first_start(tmp_path: Path, options: dict[str, Any]) -> None:
    runtime = Podman(options)
    name = runtime.start("image", 60).name
    pid, start, boot, namespace = name.removeprefix("skyrl-mega-").split("-")[:4]
    others = [
        f"skyrl-mega-{pid}-{int(start) + 1}-{boot}-{namespace}-0",  # an earlier process with the same id
        f"skyrl-mega-{pid}-{start}-{boot}-{namespace}-0",  # this process
        f"skyrl-mega-{pid}-{int(start) + 1}-{boot}-1-0",  # a process of another namespace
        f"skyrl-mega-{pid}-{int(start) + 1}-00-{namespace}-0",  # a process of another machine
        "skyrl-mega-mine",
    ]
    for other in others:
        (tmp_path / "containers" / f".{other}").write_text("skyrl-mega.owner=x")
    again = Podman({**options, "program": str(shutil.copy(PROGRAM, tmp_path / "podman"))})
    again.start("image", 60)
    assert calls(tmp_path, "rm") == [["--force", "--volumes", others[0]]]
    assert calls(tmp_path, "container")[-1][0] == "prune"


def test_a_machine_without_a_working_client_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    Podman(options).check("key")
    with pytest.raises(UserError, match=r"key.program: there is no program nothing"):
        Podman({"program": "nothing"}).check("key")
    prepare(tmp_path, "info", {"exit": 1, "stderr": "Cannot connect to the daemon\n"})
    with pytest.raises(UserError, match="Cannot connect to the daemon"):
        Docker(options).check("key")
    facts = {"host": {"security": {"rootless": True}, "cgroupVersion": "v2", "cgroupControllers": ["memory", "pids"]}}
    prepare(tmp_path, "info", {"exit": 0, "stdout": json.dumps(facts)})
    with pytest.raises(UserError, match=r"key.cpus = 2.0: podman may not limit cpu .* set key.cpus=0"):
        Podman(options).check("key")


def test_arguments_set_by_the_runtime_are_refused() -> None:
    with pytest.raises(UserError, match=r"key.arguments = --name=x"):
        make_pool("podman", {"arguments": ["--name=x"]}, "key")
    with pytest.raises(UserError, match=r"allowed: podman, docker"):
        make_pool("rkt", {}, "key")
    with pytest.raises(UserError, match=r"key.memory: there is no such option; did you mean memory_mib"):
        make_pool("podman", {"memory": 3}, "key")


def test_an_image_is_pulled_once(tmp_path: Path, options: dict[str, Any]) -> None:
    place = make_pool("podman", options, "key").place()
    for _ in range(2):
        place.remove(place.start("registry/image:1", 60))
    assert calls(tmp_path, "pull") == [["--quiet", "registry/image:1"]]
    place.close()
