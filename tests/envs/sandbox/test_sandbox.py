"""Harmful programs: each is contained, gets the right status, and leaves nothing running."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.sandboxes import default_total_mib, machine_mib
from skyrl_mega.envs.sandbox import (
    CONFINEMENTS,
    CommandLimits,
    Sandbox,
    SandboxResult,
    Workspace,
    confinements,
    folders,
)
from skyrl_mega.envs.sandbox import budget as sandbox_budget
from skyrl_mega.envs.sandbox.budget import Budget
from skyrl_mega.envs.sandbox.run import python
from tests.envs.processes import running, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
SMALL = CommandLimits(wall_s=10, memory_mib=256, processes=8, disk_mib=16, file_mib=4, output_kib=64)
SYSTEM = "/usr/bin/python3"


def machines() -> list[tuple[str, ...]]:
    """Returns the disabled confinements to test: none, and namespaces if the system's Python is available."""
    return [(), *([("namespaces",)] if Path(SYSTEM).exists() else [])]


@pytest.fixture(params=machines(), ids=lambda disabled: "without " + disabled[0] if disabled else "whole")
def box(request: pytest.FixtureRequest) -> Sandbox:
    disabled: tuple[str, ...] = request.param
    if set(confinements(disabled)) != set(CONFINEMENTS):
        pytest.skip(f"this machine gives only {confinements(disabled)}")
    return Sandbox(SMALL, disabled=disabled)


def play(
    box: Sandbox, code: str, limits: CommandLimits = SMALL, stdin: str = "", workspace: Workspace | None = None
) -> SandboxResult:
    command = [SYSTEM, *python()[1:]] if box.disabled else python()
    return box.run(command, files={"main.py": code}, limits=limits, stdin=stdin, workspace=workspace)


def test_an_honest_program(box: Sandbox) -> None:
    outcome = play(box, "import sys\nprint(input() * 2)\nprint('aside', file=sys.stderr)", stdin="ab\n")
    assert (outcome.status, outcome.exit, outcome.stdout, outcome.stderr) == ("ok", 0, "abab\n", "aside\n")
    failed = play(box, "import sys\nsys.exit(3)")
    assert (failed.status, failed.exit) == ("failed", 3)
    assert play(box, "import os\nos.kill(os.getpid(), 9)").exit == -9
    assert set(outcome.active) == set(CONFINEMENTS)


def test_the_folder_begins_empty_and_vanishes(box: Sandbox) -> None:
    code = "import os\nprint(os.listdir('.'))\nopen('left', 'w').write('x')"
    assert play(box, code).stdout == play(box, code).stdout == "['main.py']\n"


def test_a_fork_bomb(box: Sandbox) -> None:
    code = "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.01)"
    outcome = play(box, "bomb_mark = 1\n" + code, CommandLimits(wall_s=2, processes=8, memory_mib=128))
    assert outcome.status == "timeout"
    limit = play(
        box,
        "import os\nn = 0\ntry:\n  while os.fork():\n    n += 1\n  os.read(0, 1)\n  "
        "__import__('time').sleep(2)\nexcept OSError as e:\n  print(n, e.errno)",
        CommandLimits(processes=8),
    )
    assert limit.stdout.split()[1] == "11" and int(limit.stdout.split()[0]) <= 10


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/shadow", "/proc/1/environ", __file__])
def test_the_hosts_files_are_out_of_sight(box: Sandbox, path: str) -> None:
    outcome = play(box, f"print(open({path!r}).read())")
    assert outcome.status == "failed" and outcome.stdout == ""
    assert "FileNotFoundError" in outcome.stderr or "PermissionError" in outcome.stderr


def test_the_host_cannot_be_written_to(box: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    code = (
        f"import os, sys\nfor path in ({str(tmp_path / 'x')!r}, '/usr/x', os.path.dirname(os.__file__) + '/x'):\n"
        "    try:\n        open(path, 'w')\n        print('wrote', path)\n    except OSError:\n        pass"
    )
    assert play(box, code).stdout == "" and not list(tmp_path.iterdir())


def test_no_socket_reaches_anything(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        outcome = play(box, code)
        assert outcome.status == "failed"
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert play(box, "import socket\na, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))").stdout == "b'x'\n"


def test_memory(box: Sandbox) -> None:
    outcome = play(box, "data = []\nwhile True:\n    data.append(bytearray(2**24))")
    assert outcome.status == "failed" and "MemoryError" in outcome.stderr
    hidden = play(box, "import os\nfd = os.memfd_create('x')\nwhile True:\n    os.write(fd, bytes(2**20))")
    assert hidden.status == "failed"


def test_disk(box: Sandbox) -> None:
    one = play(box, "with open('big', 'wb') as out:\n    while True:\n        out.write(bytes(2**20))")
    assert one.status == "failed"
    many = play(
        box,
        "for i in range(10**6):\n    with open(f'f{i}', 'wb') as out:\n        out.write(bytes(2**20))\n",
    )
    assert many.status in ("failed", "disk")


def test_an_endless_loop(box: Sandbox) -> None:
    start = time.monotonic()
    assert play(box, "while True: pass", CommandLimits(wall_s=1)).status == "timeout"
    assert play(box, "while True: pass", CommandLimits(wall_s=200, cpu_s=1)).status == "timeout"
    assert time.monotonic() - start < 100


def test_gigabytes_of_output(box: Sandbox) -> None:
    outcome = play(box, "while True: print('x' * 10**6)")
    assert outcome.status == "output" and len(outcome.stdout) <= 64 * 1024


def test_it_cannot_kill_what_started_it(box: Sandbox) -> None:
    code = (
        f"import os, signal\nfor pid in (os.getppid(), {os.getpid()}, {os.getppid()}, -1):\n"
        "    if pid == -1:\n        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    try:\n        os.kill(pid, signal.SIGTERM)\n    except OSError:\n        pass\nprint('still here')"
    )
    received = []
    previous = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        play(box, code)
        assert play(box, "print('next')").stdout == "next\n"
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not received


def test_killing_its_own_surroundings_is_no_success(box: Sandbox) -> None:
    mark = f"child_{os.getpid()}_{time.monotonic_ns()}"
    code = (
        "import os, sys, time\nif os.fork() == 0:\n"
        f"    os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])\n"
        "time.sleep(0.3)\nos.kill(os.getppid(), 9)\ntime.sleep(0.5)"
    )
    outcome = play(box, code)
    assert (outcome.status == "ok") == (outcome.exit == 0) and outcome.status in ("ok", "failed")
    assert not running(mark)


def test_daemons_do_not_outlive_it(box: Sandbox) -> None:
    mark = f"daemon_{os.getpid()}_{time.monotonic_ns()}"
    code = (
        "import os, subprocess, sys, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            for fd in range(3): os.close(fd)\n"
        f"            os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])\n"
        "        os._exit(0)\n"
        "time.sleep(0.3)\nprint('done')"
    )
    outcome = play(box, code)
    assert outcome.stdout == "done\n" and not running(mark)


def test_daemons_of_one_that_is_stopped_die_too(box: Sandbox) -> None:
    mark = f"daemon_{os.getpid()}_{time.monotonic_ns()}"
    code = (
        "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n"
        f"    os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])\n"
        "time.sleep(600)"
    )
    assert play(box, code, CommandLimits(wall_s=1.5)).status == "timeout"
    assert not running(mark)


def test_no_way_out_through_namespaces_or_tracing(box: Sandbox) -> None:
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print([libc.unshare(0x10000000), libc.ptrace(16, os.getppid(), 0, 0), "
        "libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0)])"
    )
    assert play(box, code).stdout == "[-1, -1, -1]\n"


def test_the_host_dies_and_nothing_stays(tmp_path: Path) -> None:
    mark = f"orphan_{os.getpid()}_{time.monotonic_ns()}"
    script = (
        "from skyrl_mega.envs.sandbox import Sandbox, CommandLimits\nfrom skyrl_mega.envs.sandbox.run import python\n"
        "Sandbox(CommandLimits(wall_s=100), without=('files', 'processes', 'network')).run("
        f"[*python('-c')[:-1], '-c', 'import time; time.sleep(100)', {mark!r}])"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed host leaves its temporary folder behind
    host = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3], env=env)
    assert wait_until(lambda: any("sleep(100)" in line and "run(" not in line for line in running(mark)), 180)
    host.kill()
    host.wait()
    assert wait_until(lambda: not running(mark))


def test_a_workspace_is_kept_between_commands_and_bounded(box: Sandbox) -> None:
    workspace = box.workspace()
    (workspace.folder / "given").write_text("from the host")
    assert play(box, "open('made', 'w').write(open('given').read())", workspace=workspace).status == "ok"
    assert play(box, "print(open('made').read())", workspace=workspace).stdout == "from the host\n"
    assert (workspace.folder / "made").read_text() == "from the host"
    grown = play(
        box,
        "import time\nfor i in range(40):\n    open(f'f{i}', 'wb').write(bytes(2**20))\ntime.sleep(30)",
        workspace=workspace,
    )
    assert grown.status in ("disk", "failed") and workspace.used().bytes <= 2 * SMALL.disk_mib * 2**20
    place = Path(workspace.place)
    workspace.close()
    workspace.close()
    assert not place.exists() and not place.parent.exists()


def test_many_at_once() -> None:
    outcomes: list[SandboxResult] = []
    threads = [
        threading.Thread(target=lambda i=i: outcomes.append(play(Sandbox(SMALL), f"print({i})"))) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(o.stdout for o in outcomes) == [f"{i}\n" for i in range(6)]


def test_it_refuses_where_the_machine_gives_too_little() -> None:
    bare = ("namespaces", "landlock", "seccomp")
    assert "files" not in confinements(bare) and "network" not in confinements(bare)
    box = Sandbox(SMALL, disabled=bare)
    with pytest.raises(UserError, match=r"environment\.options\.python\.sandbox: .* files, network") as caught:
        box.check("environment.options.python.sandbox")
    assert 'sandbox.without=["files"' in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot confine"):
        box.run(python(), files={"main.py": "print('ran')"})
    open_box = Sandbox(SMALL, without=tuple(CONFINEMENTS), disabled=bare)
    if shutil.which(SYSTEM):
        assert open_box.run([SYSTEM, "-c", "print('ran')"]).stdout == "ran\n"


@pytest.mark.parametrize(
    "options, said",
    [
        (
            {"memory": 3},
            r"sandbox\.memory: there is no such option; did you mean memory_mib\? allowed is a mapping of w",
        ),
        ({"wall_s": 0}, r"sandbox\.wall_s = 0: allowed is a number above 0"),
        ({"cpu_s": "3"}, "allowed is a whole number from 1"),
        ({"without": ["file"]}, r"\[file\]: allowed is a list of files, network, processes, limits"),
    ],
)
def test_wrong_settings(options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Sandbox.from_options(options, "sandbox")


def test_a_command_that_cannot_start_is_said_so() -> None:
    with pytest.raises(RuntimeError, match=r"cannot start .*/no/such"):
        Sandbox(SMALL).run(["/no/such"])


def test_an_environment_behind_a_link_works_and_keeps_its_settings_to_itself(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "home" / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", real], check=True)
    (real / "pip.conf").write_text("password")
    link.parent.mkdir()
    link.symlink_to(real)
    script = (
        "import sys\nfrom skyrl_mega.envs.sandbox import Sandbox\nfrom skyrl_mega.envs.sandbox.run import python\n"
        "Sandbox().check()\n"
        "code = 'import os, sys; print(sys.prefix, *[os.path.exists(p + \"/pip.conf\") for p in sys.argv[1:]])'\n"
        "outcome = Sandbox().run(python('main.py', *sys.argv[1:]), files={'main.py': code})\n"
        "print(outcome.stdout, outcome.stderr)"
    )
    packages = [Path(__file__).parents[3], Path(yaml.__file__).parents[1]]
    run = subprocess.run(
        [link / "bin" / "python", "-c", script, link, real],
        env={**os.environ, "PYTHONPATH": ":".join(map(str, packages))},
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == [str(link), "False", "False"], run.stderr


def test_what_runs_inside_lets_the_trainer_go_first(box: Sandbox) -> None:
    outcome = play(box, "import os\nprint(os.nice(0))")
    assert int(outcome.stdout) == min(19, os.nice(0) + 10)


@pytest.mark.parametrize("handed_on", [True, False], ids=["below a group that hands memory on", "elsewhere"])
def test_a_group_bounds_memory_where_one_can_be_made(tmp_path: Path, handed_on: bool) -> None:
    """Uses a copy of the files shown by a kernel in /sys/fs/cgroup."""
    parent = tmp_path / "job"
    step_group = parent / "step"
    step_group.mkdir(parents=True)
    (parent / "cgroup.subtree_control").write_text("cpu memory\n" if handed_on else "cpu\n")
    (step_group / "cgroup.subtree_control").write_text("")
    (stale := parent / f"{folders.PREFIX}999999999-1-x").mkdir()
    (tmp_path / "own").write_text("4:memory:/old\n0::/job/step\n")
    budget = Budget(100, tmp_path, tmp_path / "own")
    if not handed_on:
        assert budget.group is None and stale.exists()
        return
    assert budget.group is not None and budget.group.parent == parent and not stale.exists()
    assert (budget.group / "memory.max").read_text() == str(100 * 2**20)
    assert budget.group.name.startswith(f"{folders.PREFIX}{os.getpid()}-") and folders.alive(budget.group.name)


HOARDS = "data = bytearray(150 * 2**20)\nimport time\ntime.sleep(8)"


def test_what_is_ended_for_memory_is_counted() -> None:
    small, limits = Sandbox(name="counted"), CommandLimits(total_mib=100)
    assert play(small, "pass", limits).status == "ok"
    before = sandbox_budget.ended()
    assert before is not None and play(small, HOARDS, limits).status == "memory"
    assert play(small, "import sys\nsys.exit(3)", limits).status == "failed"
    assert sandbox_budget.ended() == before + 1


@pytest.mark.parametrize(
    ("code", "rises", "status"),
    [
        ("import os\nos.kill(os.getpid(), 9)", True, "memory"),
        ("import sys\nsys.exit(137)", True, "memory"),  # a shell's message about its child
        ("import os\nos.kill(os.getpid(), 9)", False, "failed"),
        ("import sys\nsys.exit(1)", True, "failed"),  # another process was killed
        ("pass", True, "ok"),
    ],
)
def test_what_the_kernel_ends_in_a_group(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, rises: bool, status: str
) -> None:
    shared = Budget(10_000, tmp_path, tmp_path / "none")
    kills = iter((4, 4 + rises))
    monkeypatch.setattr(shared, "killed", lambda: next(kills))
    monkeypatch.setattr(sandbox_budget, "shared", lambda *_: shared)
    assert play(box, code).status == status
    assert shared.ended == (status == "memory")


def test_how_many_the_kernel_has_ended(tmp_path: Path) -> None:
    budget = Budget(100, tmp_path, tmp_path / "none")
    assert budget.killed() == 0
    budget.group = tmp_path
    assert budget.killed() == 0
    (tmp_path / "memory.events").write_text("low 0\nhigh 2\nmax 7\noom 3\noom_kill 5\noom_group_kill 1\n")
    assert budget.killed() == 5


@pytest.mark.parametrize(
    ("node_gib", "mib"), [(1, 8192), (24, 8192), (64, 8192), (128, 16384), (200, 25600), (256, 32768), (2000, 32768)]
)
def test_the_usual_sum_follows_the_node(node_gib: float, mib: int, tmp_path: Path) -> None:
    assert default_total_mib(node_gib * 1024) == mib
    (limit := tmp_path / "memory.max").write_text("max\n")
    whole = machine_mib(limit)
    assert whole == machine_mib(tmp_path / "none") > 0
    limit.write_text(f"{2**28}\n")
    assert machine_mib(limit) == 256
    assert CommandLimits().total_mib == default_total_mib(machine_mib())


def test_the_largest_of_too_many_ends(tmp_path: Path) -> None:
    budget = Budget(100, tmp_path, tmp_path / "none")
    assert [budget.note("a", 60 * 2**20), budget.note("b", 30 * 2**20), budget.note("b", 50 * 2**20)] == [False] * 3
    assert budget.note("a", 60 * 2**20)
    budget.forget("a")
    assert not budget.note("b", 99 * 2**20)
