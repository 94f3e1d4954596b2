"""Programs as agents: what they see, what they reach, how they end, and how their answers are judged."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.sandboxes import sandboxes_mib
from skyrl_mega.config.schema import Config, EnvironmentConfig
from skyrl_mega.envs import AgentEnv, BaseTextEnvStepOutput, registry
from skyrl_mega.envs.harness.env import HarnessEnv, ProgramFailed, visible_columns
from skyrl_mega.envs.harness.judge import AnswerJudge
from skyrl_mega.envs.harness.program import readable, words_of
from skyrl_mega.envs.sandbox import CONFINEMENTS, confinements
from skyrl_mega.rollout.agent.env_pool import Call
from tests.envs.harness.policy import KEY, Policy, answering
from tests.envs.processes import running, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are ended by means of Linux")
ASK = """
import json, os, urllib.request
def ask(text):
    body = json.dumps({"model": os.environ["MODEL_NAME"], "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]
"""
"""Beginning of a program that asks the policy without an SDK, which would take a second to import."""
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info, most=1.0):
    program = extra_info["program"]
    return {"score": most * (solution_str.strip() == ground_truth), "length": len(solution_str), "how": dict(program)}
"""
PROMPT = [{"role": "user", "content": "2+2"}]
EXTRAS = {
    "data_source": "sums",
    "reward_spec": {"method": "rule", "ground_truth": "4"},
    "extra_info": {"answer": "4", "level": 1},
    "solution": "4",
    "max_turns": 3,
}
Make = Callable[..., HarnessEnv]


@pytest.fixture(params=[True, False], ids=["in the sandbox", "beside it"])
def confined(request: pytest.FixtureRequest) -> bool:
    chosen: bool = request.param
    if chosen and "network namespace" not in confinements().get("network", ()):
        pytest.skip(f"this machine gives only {confinements()}")
    return chosen


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Returns a function that makes the environment of a Python program."""
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)

    def made(code: str, **options: Any) -> HarnessEnv:
        (tmp_path / "agent.py").write_text(code)
        given = {"command": "python -S agent.py", "reward": "reward.py:score", "timeout_s": 60, **options}
        return HarnessEnv(given, EXTRAS)

    return made


@pytest.fixture
def policy() -> Iterator[Policy]:
    with answering("4") as policy:
        yield policy


def play(env: HarnessEnv, policy: Policy) -> BaseTextEnvStepOutput:
    env.init(PROMPT)
    try:
        return env.run(policy.endpoint, PROMPT)
    finally:
        env.close()


def test_a_program_asks_the_policy_and_its_answer_is_judged(make: Make, policy: Policy, confined: bool) -> None:
    code = ASK + "print(ask(json.load(open(os.environ['SKYRL_TASK']))['prompt'][0]['content']))"
    output = play(make(code, confined=confined, reward_options={"most": 0.5}), policy)
    assert (output["reward"], output["done"], output["observations"]) == (0.5, True, [])
    request = {"model": "policy", "messages": [{"role": "user", "content": "2+2"}]}
    assert policy.requests == [{"path": "/v1/chat/completions", "key": KEY, **request}]
    program = output["metadata"]["program"]
    assert (program["status"], program["exit"], program["stdout"]) == ("ok", 0, "4\n")
    assert output["metadata"]["metrics"].keys() == {"length", "program_s", "program_cut"}
    assert "folder" not in program


def test_what_a_program_sees(make: Make, policy: Policy, confined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("TOOL_KEY", "given")
    code = (
        "import json, os\ntask = json.load(open(os.environ['SKYRL_TASK']))\n"
        "print(json.dumps([sorted(os.listdir('.')), task, dict(os.environ)]))"
    )
    env = make(code, confined=confined, variables={"TOOL_KEY": None, "MODE": "fast"})
    monkeypatch.setattr(
        env,
        "judge",
        type("Kept", (), {"verdict": lambda *given: {"reward": 0.0, "metadata": {"answer": given[-1]}}})(),
    )
    files, task, environment = json.loads(play(env, policy)["metadata"]["answer"])
    assert files == ["task.json"]
    assert task == {"prompt": PROMPT, "data_source": "sums", "extra_info": {"level": 1}, "max_turns": 3}
    assert {
        "TOOL_KEY": "given",
        "MODE": "fast",
        "MODEL_NAME": "policy",
        "NO_PROXY": "127.0.0.1,localhost",
    }.items() <= environment.items()
    assert "WANDB_API_KEY" not in environment and "secret" not in environment.values()
    assert environment["ANTHROPIC_BASE_URL"] + "/v1" == environment["OPENAI_BASE_URL"]
    assert (environment["OPENAI_BASE_URL"] == "http://127.0.0.1:8000/v1") == confined


def test_a_program_in_the_sandbox_reaches_the_endpoint_alone(make: Make, policy: Policy) -> None:
    if "network namespace" not in confinements().get("network", ()):
        pytest.skip(f"this machine gives only {confinements()}")
    with socket.create_server(("127.0.0.1", 0)) as other:
        code = ASK + (
            "import socket\n"
            "def tried(family, kind, address):\n"
            "    try:\n        with socket.socket(family, kind) as one:\n"
            "            one.settimeout(3)\n            one.connect(address)\n            return 'reached'\n"
            "    except OSError as error:\n        return error.strerror\n"
            f"print([tried(2, 1, ('127.0.0.1', {other.getsockname()[1]})), tried(2, 1, ('192.0.2.1', 80)), "
            "tried(16, 3, (0, 0)), tried(40, 1, (2, 80)), tried(38, 5, ('hash', 'sha1')), tried(17, 3, ('lo', 0)), "
            "ask(''), socket.gethostbyname('localhost')])"
        )
        output = play(make(code), policy)
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.accept()
    no_family = "Address family not supported by protocol"
    refused = ["Connection refused", "Network is unreachable", *[no_family] * 4, "4", "127.0.0.1"]
    assert output["metadata"]["program"]["stdout"] == f"{refused}\n"


def test_an_answer_in_a_file_counts_before_the_output(make: Make, policy: Policy, confined: bool) -> None:
    written = make("print('no')\nopen('answer.txt', 'w').write('4')", confined=confined)
    assert play(written, policy)["reward"] == 1.0
    linked = make("import os\nprint(4)\nos.symlink('/etc/passwd', 'answer.txt')", confined=confined)
    output = play(linked, policy)
    assert output["reward"] == 0.0 and output["metadata"]["length"] == 0
    piped = make("import os\nprint(4)\nos.mkfifo('answer.txt')", confined=confined)
    assert play(piped, policy)["metadata"]["length"] == 0
    folder = make("import os\nprint(4)\nos.mkdir('answer.txt')", confined=confined)
    assert play(folder, policy)["metadata"]["length"] == 0
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in opened if "answer.txt" in path]


def test_a_program_that_fails(make: Make, policy: Policy, confined: bool) -> None:
    with pytest.raises(ProgramFailed, match=r"ended with exit code 1: ZeroDivisionError: division by zero") as failed:
        play(make("print('before')\n1 / 0", confined=confined), policy)
    program = failed.value.metadata["program"]
    assert (program["exit"], program["stdout"]) == (1, "before\n") and "line 2" in program["stderr"]
    judged = play(make("print(4, flush=True)\n1 / 0", confined=confined, failed_exit="judge"), policy)
    assert judged["reward"] == 1.0 and judged["metadata"]["how"]["exit"] == 1
    suicide = "import os\nprint(5, flush=True)\nos.kill(os.getpid(), 9)"
    with pytest.raises(ProgramFailed, match="by signal 9"):
        play(make(suicide, confined=confined), policy)
    assert play(make(suicide, confined=confined, failed_exit="judge"), policy)["reward"] == 0.0


def test_a_program_out_of_time_is_judged_by_its_work_so_far(make: Make, policy: Policy, confined: bool) -> None:
    mark = f"agent_{os.getpid()}_{time.monotonic_ns()}"
    code = (
        "import os, sys, time\nprint(4)\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(600)', {mark!r}])\n"
        "    os._exit(0)\ntime.sleep(600)"
    )
    output = play(make(code, confined=confined, timeout_s=6), policy)
    assert output["reward"] == 1.0 and output["metadata"]["program"]["status"] == "timeout"
    assert output["metadata"]["metrics"]["program_cut"] == 1.0
    assert not running(mark)


def test_the_trajectorys_time_limit_ends_a_program(make: Make, policy: Policy, confined: bool) -> None:
    env = make("import time\nprint(4, flush=True)\ntime.sleep(600)", confined=confined)
    output = env.run(replace(policy.endpoint, seconds=4.0), PROMPT)
    assert output["metadata"]["program"]["status"] == "timeout"


def test_a_program_that_nobody_waits_for_any_more_is_ended(make: Make, policy: Policy, confined: bool) -> None:
    mark = f"agent_{os.getpid()}_{time.monotonic_ns()}"
    env = make("import time\ntime.sleep(600)", confined=confined, command=f"python -S agent.py {mark}")
    call = Call(env.run, policy.endpoint, PROMPT)
    thread = threading.Thread(target=call.run)
    thread.start()
    assert wait_until(lambda: running(mark), 120)
    assert call.give_up()
    thread.join(60)
    assert not thread.is_alive() and not running(mark)


def test_a_killed_run_leaves_no_program(make: Make, tmp_path: Path) -> None:
    """Beside the sandbox; tests of the sandbox show the same inside."""
    mark = f"agent_{os.getpid()}_{time.monotonic_ns()}"
    make(
        "import os, sys, time\n"
        f"if os.fork() == 0:\n    os.setsid()\n    os.execv(sys.executable, [sys.executable, '-S', '-c', "
        f"'import time; time.sleep(300)', {mark!r}])\ntime.sleep(300)"
    )
    script = (
        "from skyrl_mega.envs import AgentEndpoint\nfrom skyrl_mega.envs.harness.env import HarnessEnv\n"
        f"options = dict(command='python -S agent.py {mark}', reward='reward.py:score', confined=False)\n"
        "HarnessEnv(options).run(AgentEndpoint('http://127.0.0.1:9', 'k', 'm'), [])"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    host = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env)
    assert wait_until(lambda: len([line for line in running(mark) if "HarnessEnv" not in line]) >= 2, 120)
    host.kill()
    host.wait()
    assert wait_until(lambda: not running(mark))


def test_wrong_options(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").touch()
    for options, said in (
        ({"command": "python agnet.py"}, r"harness\.command = agnet\.py: there is no such file"),
        ({"read": ["absent"]}, r"harness\.read = absent: there is no such file"),
        ({"command": "python 'agent.py"}, "harness.command = python 'agent.py: No closing quotation"),
        ({"command": " "}, r"harness\.command = .*has no word"),
        ({"command": "no_such_program x"}, r"harness\.command: there is no program no_such_program in /"),
        ({"command": None}, r"harness\.command: it is not set"),
        ({"reward": None}, r"harness\.reward: it is not set"),
        ({"reward": "reward.py:scor"}, r"harness\.reward = reward\.py:scor: .*did you mean score"),
        ({"reward": "no_such"}, r"harness\.reward = no_such: allowed: package\.module:function"),
        ({"reward": "harness"}, r"harness\.reward = harness: allowed"),
        ({"reward_options": {"least": 1}}, r"harness\.reward: .* further arguments are .*harness\.reward_options"),
        ({"reward": "math", "reward_options": {"x": 1}}, r"harness\.reward_options\.x: there is no such option"),
        ({"variables": {"A": 3}}, r"harness\.variables\.A = 3: allowed is a name and a text"),
        ({"variables": {"NO_SUCH": None}}, r"harness\.variables\.NO_SUCH: the run has no such variable"),
        ({"sandbox": {"wall_s": 3}}, r"harness\.sandbox\.wall_s: there is no such option"),
        ({"timeout_s": 0}, r"harness\.timeout_s = 0: allowed is a number above 0"),
    ):
        given = {"command": "python agent.py", "reward": "reward.py:score", **options}
        with pytest.raises(UserError, match=said):
            registry.check_ready("harness", EnvironmentConfig(options={"harness": given}))


def test_a_machine_without_network_namespaces_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl_mega.envs.harness.program import check_box
    from skyrl_mega.envs.sandbox import Sandbox

    bare = ("namespaces",)
    if {*CONFINEMENTS} - {*confinements(bare)}:
        pytest.skip(f"this machine gives only {confinements(bare)}")
    tried: list[Sandbox] = []
    monkeypatch.setattr(Sandbox, "check", lambda box, _: tried.append(box))  # tests of the sandbox show its own trials
    with pytest.raises(UserError, match=r'a network namespace of its own: .* in network; .*without=\["network"\]'):
        check_box(Sandbox(disabled=bare), "sandbox")
    allowed = Sandbox(disabled=bare, without=("network",))
    check_box(allowed, "sandbox")
    assert allowed in tried


def test_the_words_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("bin/python", "lib/x.py", "agent.py", "home/bin/python3"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    (tmp_path / "pyvenv.cfg").write_text(f"home = {tmp_path / 'home' / 'bin'}\nversion = 3\n")
    words = words_of("bin/python agent.py --n 3 'two words' lib ./lib lib/x.py no/file", "k")
    at = {name: str(tmp_path / name) for name in ("bin/python", "agent.py", "lib", "lib/x.py")}
    assert words == [
        at["bin/python"],
        at["agent.py"],
        "--n",
        "3",
        "two words",
        "lib",
        at["lib"],
        at["lib/x.py"],
        "no/file",
    ]
    assert words_of("sh -c 'a b'", "k") == ["sh", "-c", "a b"]
    paths = readable(words, ["home"])
    assert {*at.values(), str(tmp_path / "home"), str(tmp_path / "pyvenv.cfg"), str(tmp_path / "home/bin")} <= {*paths}
    assert str(tmp_path) not in paths and readable(["/usr/bin/env"], []) == ()
    config = EnvironmentConfig(
        options={"harness": {"command": "sh agent.py", "reward": "agent.py:f", "read": ["lib"], "timeout_s": 3}}
    )
    absolute = registry.with_absolute_paths(config).options["harness"]
    assert absolute == {
        "command": f"sh {shlex.quote(at['agent.py'])}",
        "reward": f"{at['agent.py']}:f",
        "read": [at["lib"]],
        "timeout_s": 3,
    }


def test_the_judges() -> None:
    extras = {"reward_spec": {"ground_truth": "4"}, "data_source": "x"}
    assert AnswerJudge.of("math", {}, "k").verdict(extras, PROMPT, r"so \boxed{4}")["reward"] == 1.0
    call = '<tool_call>{"name": "calculate"}</tool_call> 4'
    assert AnswerJudge.of("calculator", {}, "k").verdict(extras, PROMPT, call)["reward"] == 1.0
    assert AnswerJudge.of("addition", {}, "k").verdict(extras, PROMPT, "5")["reward"] == 0.0


def test_hidden_columns_leave_the_row_alone() -> None:
    row = {"a": {"b": {"c": 1, "d": 2}}, "text": "x", "reward_model": {"ground_truth": 1}}
    assert visible_columns(row, ["a.b.c", "text.more", "none.x", "a.b.c.d"]) == {"a": {"b": {"d": 2}}, "text": "x"}
    assert row["a"] == {"b": {"c": 1, "d": 2}}


OWN = """
from skyrl_mega.envs import AgentEnv

class Whole(AgentEnv):
    def run(self, endpoint, prompt):
        raise ValueError("here")

class Empty(AgentEnv):
    pass

class Short(AgentEnv):
    def run(self, endpoint):
        pass
"""


def test_agents_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl_mega.envs.blame import fault_location

    (tmp_path / "own_agent.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    config = EnvironmentConfig(classes={"mine": "own_agent.py:Whole"})
    env = registry.make("mine", {}, config, 3)
    assert isinstance(env, AgentEnv) and env.max_turns == 3
    assert (fault_location(None, "mine", config) or "").endswith("own_agent.py, line 5, in run")
    for name, said in (("Empty", "Empty has no run; write `def run"), ("Short", r"Short\.run cannot be called by run")):
        with pytest.raises(UserError, match=said):
            registry.resolve("mine", EnvironmentConfig(classes={"mine": f"own_agent.py:{name}"}))


def test_the_plan_counts_the_sandbox() -> None:
    config = Config()
    config.environment.options = {"harness": {"sandbox": {"total_mib": 1000, "disk_mib": 10}}}
    assert sandboxes_mib(config, trajectories=3) == 1030
    for elsewhere in ({"confined": False}, {"container": "podman"}, {"reward": "swe"}):
        config.environment.options["harness"] = {"sandbox": {"total_mib": 1000}, **elsewhere}
        assert sandboxes_mib(config, trajectories=3) == 0
