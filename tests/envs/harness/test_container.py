"""Programs in containers, with a stand-in for the container runtime: a network namespace and plain processes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import BaseTextEnvStepOutput, registry
from skyrl_mega.envs.containers import registry as registry_of_runtimes
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.harness import container_program
from skyrl_mega.envs.harness.env import HarnessEnv, ProgramFailed
from skyrl_mega.envs.options import Option, text, whole
from tests.envs.harness.policy import KEY, Policy, answering
from tests.envs.harness.test_harness import ASK, EXTRAS, PROMPT, REWARD


class Namespace:
    """A stand-in for a container: a network namespace without a network, and the files of this machine."""

    def __init__(self, *, own_network: bool) -> None:
        words = ["unshare", "--net"] if own_network else []
        self.holder = subprocess.Popen([*words, "sh", "-c", "echo up; exec sleep 600"], stdout=subprocess.PIPE)
        assert self.holder.stdout is not None
        self.holder.stdout.readline()
        self.ended = False

    def process(self) -> int:
        return self.holder.pid

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        *,
        stdin: bytes = b"",
        folder: str | None = None,
        variables: Mapping[str, str] | None = None,
        limit: int = 2**24,
    ) -> CommandOutput:
        if self.holder.poll() is not None:
            raise InfrastructureFault("the container is gone")
        words = ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", *argv]
        given = {"PATH": os.environ["PATH"], **(variables or {})}
        process = subprocess.Popen(
            words, cwd=folder or "/", env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            return CommandOutput("timeout", None, stdout[:limit], stderr[:limit])
        status = "ok" if process.returncode == 0 else "failed"
        return CommandOutput(status, process.returncode, stdout[:limit], stderr[:limit])

    def end_processes(self, timeout_s: float) -> None:
        self.ended = True

    def remove(self, timeout_s: float) -> None:
        self.holder.kill()
        self.holder.wait()
        shutil.rmtree(container_program.FOLDER, ignore_errors=True)


class StandIn:
    """A runtime of such containers."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "network": text("none", "network"),
        "lifetime_s": whole(600, "lifetime", low=1),
    }
    started: ClassVar[list[tuple[str, Namespace]]] = []
    missing: ClassVar[str | None] = None

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    @classmethod
    def check_options(cls, options: Mapping[str, Any], key: str) -> None:
        pass

    def check(self, key: str) -> None:
        if self.missing:
            raise UserError(self.missing, key=key)

    def pull(self, image: str, timeout_s: float) -> None:
        pass

    def start(self, image: str, timeout_s: float) -> Namespace:
        if image == "broken":
            raise InfrastructureFault("no container starts")
        container = Namespace(own_network=self.options["network"] == "none")
        self.started.append((image, container))
        return container


Make = Callable[..., HarnessEnv]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Returns a function that makes the environment of a Python program in a container."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], check=False).returncode != 0:
        pytest.skip("only root makes network namespaces")
    monkeypatch.setitem(registry_of_runtimes.RUNTIMES, "podman", f"{__name__}:StandIn")
    monkeypatch.setattr(container_program, "FOLDER", str(tmp_path / "inside"))
    monkeypatch.setattr(StandIn, "started", [])
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)

    def made(code: str, **options: Any) -> HarnessEnv:
        (tmp_path / "agent.py").write_text(code)
        given = {"command": f"{sys.executable} -S agent.py", "reward": "reward.py:score", "timeout_s": 60}
        return HarnessEnv({**given, "container": "podman", "image": "an-image", **options}, EXTRAS)

    yield made
    for _, container in StandIn.started:
        assert container.holder.poll() is not None, "a container is left"


def play(env: HarnessEnv, policy: Policy) -> BaseTextEnvStepOutput:
    env.init(PROMPT)
    try:
        env.prepare()
        return env.run(policy.endpoint, PROMPT)
    finally:
        env.close()


def test_a_program_in_a_container_reaches_the_policy_alone(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, answering("4") as policy:
        code = ASK + (
            "import socket\ntask = json.load(open(os.environ['SKYRL_TASK']))\n"
            f"print(socket.socket().connect_ex(('127.0.0.1', {other.getsockname()[1]})) != 0)\n"
            "open(os.path.join(os.path.dirname(os.environ['SKYRL_TASK']), 'answer.txt'), 'w').write(\n"
            "    ask(task['prompt'][0]['content']))\nprint(os.getcwd(), sorted(os.listdir('.')), len(sys.argv))"
        )
        output = play(make("import sys\n" + code), policy)
    assert output["reward"] == 1.0, output["metadata"]
    assert output["metadata"]["program"]["stdout"] == (
        f"True\n{container_program.FOLDER} ['agent.py', 'answer.txt', 'task.json'] 1\n"
    )
    assert policy.requests[0]["key"] == KEY and output["metadata"]["how"]["folder"] is None
    ((image, container),) = StandIn.started
    assert image == "an-image" and container.ended


def test_a_container_with_the_network_of_this_machine_uses_the_address_itself(make: Make) -> None:
    with answering("4") as policy:
        code = ASK + "print(ask(os.environ['OPENAI_BASE_URL']))"
        assert play(make(code, container_options={"network": "host"}), policy)["reward"] == 1.0
        assert policy.requests[0]["messages"][0]["content"] == f"{policy.endpoint.url}/v1"


def test_the_image_of_a_row_comes_first(make: Make) -> None:
    env = make("print(4)", image="other")
    row = {**EXTRAS, "extra_info": {"image": "of-the-row"}}
    with answering("4") as policy:
        play(HarnessEnv(env.env_config, row), policy)
    assert [image for image, _ in StandIn.started] == ["of-the-row"]
    options = HarnessEnv(env.env_config, row).options
    assert HarnessEnv.wrong_row(row, {**options, "image": None}) is None
    assert "extra_info.image is missing" in str(HarnessEnv.wrong_row(EXTRAS, {**options, "image": None}))
    for image in ("--privileged", "docker-archive:a.tar", "dir:/etc", "docker://a/b", "a b", 7):
        wrong = {**EXTRAS, "extra_info": {"image": image}}
        assert "extra_info.image = " in str(HarnessEnv.wrong_row(wrong, options)), image
    fine = {**EXTRAS, "extra_info": {"image": "registry:5000/docker:27@sha256:ab"}}
    assert HarnessEnv.wrong_row(fine, options) is None


def test_ends_of_a_program_in_a_container(make: Make) -> None:
    with answering("4") as policy:
        with pytest.raises(ProgramFailed, match="exit code 3: no"):
            play(make("import sys\nprint('no', file=sys.stderr)\nsys.exit(3)"), policy)
        late = play(make("import time\nprint(4, flush=True)\ntime.sleep(60)", timeout_s=2), policy)
        assert late["reward"] == 1.0 and late["metadata"]["metrics"]["program_cut"] == 1.0
        linked = play(make("import os\nprint(4)\nos.symlink('/etc/passwd', 'answer.txt')"), policy)
        assert linked["reward"] == 0.0 and linked["metadata"]["length"] == 0
        with pytest.raises(InfrastructureFault, match="no container starts"):
            play(make("print(4)", image="broken"), policy)
        killed = make("print(4)")
        killed.prepare()
        StandIn.started[-1][1].holder.kill()
        StandIn.started[-1][1].holder.wait()
        with pytest.raises(InfrastructureFault):
            killed.run(policy.endpoint, PROMPT)
        killed.close()


def test_wrong_options_of_containers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, said in (
        ({"container": "kubectl"}, r"harness\.container = kubectl: its containers cannot reach the policy"),
        ({"container_options": {"x": 1}}, r"harness\.container_options\.x: there is no such option"),
        ({"command": "python absent.py"}, r"harness\.command = absent\.py: there is no such file"),
        ({"reward": "swe"}, r"harness\.container = podman: the program runs in the container of the software task"),
        ({"reward": "swe", "container": None}, r"reward_options\.session = local: its containers cannot reach"),
    ):
        given = {**make("print(4)").env_config, **options}
        with pytest.raises(UserError, match=said):
            registry.check_ready("harness", EnvironmentConfig(options={"harness": given}))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match=r"container_options\.network = none: only root may bring"):
        registry.check_ready("harness", EnvironmentConfig(options={"harness": make("print(4)").env_config}))


def test_scripts_are_taken_along_and_other_words_are_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "notes").write_text("2")
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"timeout_s": 1.0, "environment": {}, "output_bytes": 9}
    program = container_program.ContainerProgram.of("python a.py notes /opt/x.py 'b c'", "k", **given)
    assert program.argv == ("python", f"{container_program.FOLDER}/a.py", "notes", "/opt/x.py", "b c")
    assert program.scripts == {"a.py": b"1"}
    absolute = container_program.words_with_scripts("python a.py notes", "k")
    assert absolute == ["python", f"{tmp_path}/a.py", "notes"]
