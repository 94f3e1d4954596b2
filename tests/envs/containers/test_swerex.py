"""Containers behind a server of SWE-ReX: a small server with its protocol, and at night the real server."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import inside, swerex
from skyrl_mega.envs.containers.starter import StarterProgram
from skyrl_mega.envs.containers.swerex import SweRexContainer, SweRexRuntime, _with_values
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import filled
from tests.envs.containers.contract import check_killed_shell, check_programs
from tests.envs.processes import ROOT, needs_namespaces, owner, wait_until

REAL = ROOT / ".venv-swerex" / "bin" / "python"
"""`python -m venv .venv-swerex; .venv-swerex/bin/pip install swe-rex==1.4.0`."""
STARTER = f"{sys.executable} {Path(__file__).parent / 'rex_server.py'}"
KEY = "environment.options.swe.session_options"
Start = Callable[..., SweRexContainer]

pytestmark = needs_namespaces


def runtime(command: str = f"{STARTER} {{image}}") -> SweRexRuntime:
    options = filled(KEY, {"command": command}, SweRexRuntime.OPTIONS)
    SweRexRuntime.check_options(options, KEY)
    return SweRexRuntime(options)


@pytest.fixture
def start() -> Iterator[Start]:
    """Returns a function that starts a container, removed at the end of the test."""
    started = []

    def new(image: str = "plain", command: str = f"{STARTER} {{image}}") -> SweRexContainer:
        started.append(runtime(command).start(image, 60))
        return started[-1]

    yield new
    for container in started:
        container.remove(20)


@pytest.fixture(
    scope="module",
    params=[
        "own",
        pytest.param(
            "swe-rex 1.4.0",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(not REAL.exists(), reason="SWE-ReX is not installed in .venv-swerex"),
            ],
        ),
    ],
)
def container(request: pytest.FixtureRequest) -> Iterator[SweRexContainer]:
    """A container of either server, for the tests of this file."""
    command = f"{STARTER} {{image}}" + ("" if request.param == "own" else f" {REAL}")
    opened = runtime(command).start("plain", 60)
    yield opened
    opened.remove(20)


def sh(container: SweRexContainer, script: str, timeout_s: float = 20) -> bytes:
    ran = container.run(["sh", "-c", script], timeout_s)
    assert (ran.status, ran.stderr) == ("ok", b"")
    return ran.stdout


def test_a_program_gets_its_input_and_returns_bytes(container: SweRexContainer) -> None:
    data = bytes(range(256)) * 40_000  # more than a part
    ran = container.run(["sh", "-c", "cat; echo no >&2; exit 3"], 30, stdin=data)
    assert (ran.status, ran.exit, ran.stderr) == ("failed", 3, b"no\n")
    assert ran.stdout == data


def test_programs_in_a_container(container: SweRexContainer) -> None:
    check_programs(container, "/usr")
    ran = container.run(["sh", "-c", "pwd; echo $A"], 20, folder="/usr/bin", variables={"A": "b  'c"})
    assert ran.stdout == b"/usr/bin\nb 'c\n"


def test_a_program_with_too_much_output_is_ended(container: SweRexContainer) -> None:
    ran = container.run(["yes"], 20, limit=1001)
    assert (ran.status, ran.exit, ran.stdout) == ("output", None, b"y\n" * 500 + b"y")


def test_a_quick_program_with_too_much_output(container: SweRexContainer) -> None:
    ran = container.run(["seq", "1000"], 20, limit=10)
    assert (ran.status, ran.exit, ran.stdout) == ("output", None, b"1\n2\n3\n4\n5\n")


def test_no_process_survives_a_program(container: SweRexContainer) -> None:
    hidden = (
        "import os,time; open('/proc/self/comm','w').write(') S 1 1'); os.fork(); os.setsid(); time.sleep(98765432)"
    )
    ran = container.run(["sh", "-c", f'nohup setsid {sys.executable} -c "{hidden}" & sleep 0.5; exit 0'], 20)
    assert ran.status == "ok"
    assert b"98765432" not in sh(container, "cat /proc/[0-9]*/cmdline 2>/dev/null || true")


def test_processes_without_end_are_killed(container: SweRexContainer) -> None:
    many = "i=0; while [ $i -lt 200 ]; do (while :; do sleep 0.01; done) & i=$((i+1)); done"
    assert container.run(["sh", "-c", many], 20).status == "ok"
    assert int(sh(container, "grep -sL 'State:.Z' /proc/[0-9]*/status | wc -l")) < 15


def test_a_killed_shell_is_the_policys_failure(container: SweRexContainer) -> None:
    check_killed_shell(container)


def test_a_missing_program_fails(container: SweRexContainer) -> None:
    assert container.run(["no-such-program"], 20).exit == 127


@pytest.mark.parametrize("size", [2 * inside.PIECE + 5, pytest.param(inside.PIECE, marks=pytest.mark.nightly)])
def test_large_outputs_come_in_pieces(container: SweRexContainer, size: int) -> None:
    ran = container.run(["sh", "-c", f"head -c {size} /dev/zero; head -c 7 /dev/zero >&2"], 60, limit=2**26)
    assert (len(ran.stdout), ran.stderr) == (size, b"\0" * 7)
    assert sh(container, "find /tmp -size +1M") == b""


def test_a_command_with_a_lost_reply_runs_once(start: Start) -> None:
    container = start("cut")
    assert sh(container, "echo once >>/tmp/runs; cat /tmp/runs") == b"once\n"


def test_a_server_killed_by_its_machine_is_a_fault(start: Start) -> None:
    container = start()
    begin, starter = time.monotonic(), container._starter._process.pid
    server = int(Path(f"/proc/{starter}/task/{starter}/children").read_text())
    os.kill(server, signal.SIGKILL)
    with pytest.raises(InfrastructureFault, match="is lost"):
        container.run(["true"], 100)
    assert time.monotonic() - begin < 60


def test_a_used_container_is_refused(start: Start) -> None:
    first = start()
    again = f"sh -c 'echo {first._client.url} {first._client._token}; cat' {{image}}"
    with pytest.raises(InfrastructureFault, match="has served a trajectory before"):
        runtime(again).start("plain", 20)
    assert sh(first, "echo here") == b"here\n"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("fails", "exit code 1 without a first line: there is no machine left"),
        ("talks", "no address and token"),
        ("refuses", "refuses the token: HTTP 401"),
        ("silent", "did not answer in"),
    ],
)
def test_a_container_that_does_not_start_is_a_fault(image: str, message: str) -> None:
    with pytest.raises(InfrastructureFault, match=message):
        runtime().start(image, 2 if image == "silent" else 30)


def test_a_program_without_a_line_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swerex, "GRACE_S", 0.2)
    with pytest.raises(InfrastructureFault, match=r"ran for 0\.3 s without a first line"):
        runtime("sleep 99 {image}").start("0", 0.3)


def test_a_program_with_an_endless_line_is_a_fault() -> None:
    with pytest.raises(InfrastructureFault, match="printed 8192 bytes without a line break"):
        runtime("sh -c 'head -c 9000 /dev/zero; cat' {image}").start("0", 30)


def test_a_starter_that_stays_is_killed(start: Start) -> None:
    container = start("stays")
    starter: StarterProgram = container._starter
    container.remove(1)
    container.remove(1)
    assert starter.ended()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/is_alive", trust_env=False).status_code == 401
    except httpx.ConnectError:
        return False


def test_a_killed_owner_leaves_no_container(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom tests.envs.containers.test_swerex import runtime\n"
        "box = runtime().start('plain', 60)\nprint(box._client.url, flush=True)\ntime.sleep(99)"
    )
    with owner(script) as (_, url):
        assert answers(url)
    assert wait_until(lambda: not answers(url))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (None, "needs a program"),
        ("start 'it", "close the quotation"),
        ("start_server", r"no argument has \{image\}"),
    ],
)
def test_a_wrong_command_is_refused(command: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SweRexRuntime.check_options(filled(KEY, {"command": command}, SweRexRuntime.OPTIONS), KEY)


def test_a_missing_program_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match="there is no program no-such-program"):
        runtime(f"no-such-program-{secrets.token_hex(4)} {{image}}").check(KEY)


def test_values_are_no_placeholders() -> None:
    assert runtime("echo {image} {lifetime_s}").words == ["echo", "{image}", "{lifetime_s}"]
    container = ["a{lifetime_s}", "{image}b"]
    values = {"{image}": "{lifetime_s}", "{lifetime_s}": "9"}
    assert [_with_values(word, values) for word in container] == ["a9", "{lifetime_s}b"]
