"""Every attack in one setting: run as the user of the attacked trainer, with or without `namespaces`.

    python attacks.py SOURCE WORK [namespaces]      prints {family: {attack: outcome}} as JSON

SOURCE is added to the path, for a user without access to the project; WORK is a private folder. Needs only the standard
library and the sandbox itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PYTHON = "/usr/bin/python3"
Results = dict[str, dict[str, str]]
UNREACHED = ("setpriority of a user", "ioprio_set of a user", "a pipe's owner")
"""Attacks permitted as long as no process is reached; the victim's state decides."""
SHARED = 0o666

TREES = {
    "1200 folders deep": "i=0; while [ $i -lt 1200 ]; do mkdir d; cd d; i=$((i+1)); done",
    "deeper than a path": "n=$(printf '%0200d' 0); i=0; while [ $i -lt 40 ]; do mkdir $n; cd $n; i=$((i+1)); done",
    "locked": "mkdir -m 0 a; mkdir b; >b/c; mkdir b/d; >b/d/e; chmod 0 b/d b/c b; chmod 0 .",
    "locked from birth": "umask 777; mkdir a; >f; mkdir tests/x",
    "names": "touch \"$(printf 'a\\nb')\" \"$(printf '\\377')\" -- -rf '*' ' ' '$HOME'; mkdir \"$(printf 'd\\n')\"",
    "links": "ln -s . self; ln -s / root; ln -s loop loop; ln -s ../../.. up; mkdir t; ln -s ../t t/t; ln -s /etc etc",
    "wide": "i=0; while [ $i -lt 1500 ]; do >$i; i=$((i+1)); done",
    "pipes": "mkfifo p tests/p; rm -rf tests/test_a.py; mkfifo tests/test_a.py",
    "tests are a link": "rm -rf tests; ln -s /tmp tests",
    "tests are a file": "rm -rf tests; >tests",
    "tests deep": "cd tests; i=0; while [ $i -lt 1200 ]; do mkdir d; cd d; i=$((i+1)); done",
    "a test is a folder": "rm tests/test_a.py; mkdir tests/test_a.py; >tests/test_a.py/x",
    "tests locked": "chmod 0 tests/test_a.py tests; chmod 500 .",
    "no room": "head -c 4000000 /dev/zero >a; cp a b; cp a c; i=0; while >e$i && [ $i -lt 3000 ]; do i=$((i+1)); done",
    "the folder itself": "rmdir . ; rm -rf \"$HOME\"; mv \"$HOME\" ../x; ls",
}  # fmt: skip
"""Shell commands of a session with awkward files for `changes`, `write` and `close`."""


def main(source: str, work: str, *disabled: str) -> None:
    sys.path[:0] = [source, str(HERE)]
    tempfile.tempdir = work
    from skyrl_mega.envs.sandbox import confinements

    families = [probes, disk, trees, memory, killed]
    with ThreadPoolExecutor(3) as pool:
        results: Results = {}
        for results_of_family in pool.map(lambda family: family(Path(work), disabled), families):
            results |= results_of_family
    left = sorted(path.name for path in Path(work).glob("skyrl-sandbox-*/*") if path.name != "lock")
    results["cleaning up"]["nothing is left when all ended"] = "contained" if not left else f"left: {left}"
    bare = confinements((*disabled, "seccomp"))
    print(json.dumps({"active": confinements(disabled), "without_filter": bare, "results": results}))


class Outside:
    """Targets of attacks: a process, files, segments of shared memory, and their state for comparison."""

    def __init__(self, work: Path) -> None:
        self.folder = work / "outside"
        (self.folder / "inner").mkdir(parents=True)
        (self.folder / "public").mkdir()
        (self.folder / "public").chmod(0o777)
        self.secret, self.given = self.folder / "secret", work / "given"
        for file in (self.secret, self.given):
            file.write_text("secret")
        os.setxattr(self.secret, "user.kept", b"x")
        self.victim = subprocess.Popen([PYTHON, "-c", "import time; time.sleep(60)"], start_new_session=True)
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.shm = self.libc.shmget(0, 4096, 0o1000 | SHARED)
        self.queue = self.libc.msgget(0, 0o1000 | SHARED)
        self.semaphore = self.libc.semget(0, 1, 0o1000 | SHARED)
        self.libc.shmat.restype = ctypes.c_void_p
        self.memory = self.libc.shmat(self.shm, None, 0)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(work / "socket"))
        (work / "socket").chmod(0o777)
        self.unix.listen()

    def state(self) -> dict[str, Any]:
        pid = self.victim.pid
        buffer = ctypes.create_string_buffer(256)
        alive = self.victim.poll() is None
        return {
            "alive": alive,
            "process": alive
            and (
                os.getpriority(os.PRIO_PROCESS, pid),
                sorted(os.sched_getaffinity(pid)),
                os.sched_getscheduler(pid),
                [resource.prlimit(pid, what) for what in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE)],
                self.libc.syscall(252, 1, pid) if os.uname().machine == "x86_64" else 0,
                Path(f"/proc/{pid}/oom_score_adj").read_text(),
            ),
            "files": [self._file(path) for path in (self.folder, *sorted(self.folder.rglob("*")))],
            "given": self._file(self.given),
            "ipc": (
                ctypes.string_at(self.memory, 16),
                self.libc.shmctl(self.shm, 2, buffer),
                self.libc.msgctl(self.queue, 2, buffer),
                buffer.raw[80:88],
                self.libc.semctl(self.semaphore, 0, 12),
            ),
        }

    def _file(self, path: Path) -> Any:
        info = path.lstat()
        return (str(path), info.st_mode, info.st_uid, info.st_gid, info.st_ctime_ns, info.st_nlink, os.listxattr(path))

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for remove in (self.libc.shmctl, self.libc.msgctl):
            remove(self.shm if remove is self.libc.shmctl else self.queue, 0, 0)
        self.libc.semctl(self.semaphore, 0, 0, 0)
        self.server.close()
        self.unix.close()


def probes(work: Path, disabled: tuple[str, ...]) -> Results:
    """Runs the attacks of `probes.py` and checks the state outside."""
    from skyrl_mega.envs.sandbox import CommandLimits, Sandbox

    outside = Outside(work)
    try:
        before = outside.state()
        given = {
            "pid": outside.victim.pid,
            "uid": os.geteuid(),
            "folder": str(outside.folder),
            "readable": str(outside.given),
            "port": outside.server.getsockname()[1],
            "socket": str(work / "socket"),
            "shm": outside.shm,
            "queue": outside.queue,
            "semaphore": outside.semaphore,
        }
        box = Sandbox(CommandLimits(wall_s=60, cpu_s=60), read=(str(outside.given),), disabled=disabled)
        program = {"main.py": (HERE / "probes.py").read_text()}
        outcome = box.run([PYTHON, "-I", "main.py"], files=program, stdin=json.dumps(given))
        if outcome.status != "ok":
            raise RuntimeError(f"{outcome.status} {outcome.exit}: {outcome.stdout[-500:]} {outcome.stderr[-2000:]}")
        after = outside.state()
    finally:
        outside.close()
    results: Results = {}
    for family, tried in json.loads(outcome.stdout).items():
        for name, verdict in tried.items():
            held = verdict.startswith("refused") or (name in UNREACHED and before["process"] == after["process"])
            results.setdefault(family, {})[name] = "contained" if held else verdict
    for name, family in (("alive", "processes"), ("process", "processes"), ("files", "files"), ("ipc", "ipc")):
        same = before[name] == after[name]
        results[family][f"outside, {name} unchanged"] = "contained" if same else f"{before[name]} → {after[name]}"
    return results


def disk(work: Path, disabled: tuple[str, ...]) -> Results:
    """Runs the disk hoards in a workspace."""
    from hoards import HOARDS, LIMIT_MIB

    from skyrl_mega.envs.sandbox import CommandLimits, Sandbox

    program = {"main.py": (HERE / "hoards.py").read_text()}
    box = Sandbox(CommandLimits(wall_s=20, disk_mib=LIMIT_MIB, file_mib=LIMIT_MIB, memory_mib=256), disabled=disabled)

    def play(name: str) -> str:
        workspace = box.workspace()
        outcome = box.run([PYTHON, "-I", "main.py", name], files=program, workspace=workspace)
        held = [int(line.split()[1]) for line in outcome.stdout.splitlines() if line.startswith("held ")]
        workspace.close()
        if os.path.lexists(os.path.dirname(workspace.place)):
            return f"left: {workspace.place}"
        return "contained" if max(held, default=0) <= 2 * LIMIT_MIB else f"{outcome.status}, held {held}"

    with ThreadPoolExecutor(4) as pool:
        return {"disk": dict(zip(HOARDS, pool.map(play, HOARDS), strict=True))}


def trees(work: Path, disabled: tuple[str, ...]) -> Results:
    """Runs a session's commands, then `changes`, `write` and `close` on the remains."""
    from skyrl_mega.envs.swe.session import File, LocalSession, UnfitError

    task = work / "task"
    (task / "repo" / "tests").mkdir(parents=True)
    for file in ("a.py", "tests/test_a.py"):
        (task / "repo" / file).write_text("pass\n")

    def play(name: str) -> str:
        session, clean = (LocalSession(task, {"disk_mib": 8, "file_mib": 4}) for _ in range(2))
        homes = []
        try:
            for each in (session, clean):
                each.box = replace(each.box, disabled=disabled)
                each.open(5)
                assert each.workspace is not None
                homes.append(os.path.dirname(each.workspace.place))
            session.run(TREES[name], 10)
            try:
                clean.write(session.changes(5), 5)
                clean.write({f"tests/test_{test}.py": File(b"pass\n") for test in "ab"}, 5)
            except UnfitError:
                whole = True
            else:
                ran = clean.run("cat tests/test_a.py tests/test_b.py", 5)
                whole = ran.status != "ok" or ran.output == "pass\npass\n"
            session.close(5)
            clean.close(5)
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"
        left = [home for home in homes if os.path.lexists(home)]
        return f"left: {left}" if left else "contained" if whole else "other tests"

    with ThreadPoolExecutor(4) as pool:
        return {"folders": dict(zip(TREES, pool.map(play, TREES), strict=True))}


def memory(work: Path, disabled: tuple[str, ...]) -> Results:
    """Runs programs that exceed sums of memory, within one command and across several commands."""
    from skyrl_mega.envs.sandbox import CommandLimits, Sandbox

    limits = CommandLimits(wall_s=30, memory_mib=300, total_mib=200, processes=12)
    take = "data = bytearray(b'x') * (%d << 20)\n"
    hold = "time.sleep(12)\nprint('held')"
    # On a busy machine a process may take its memory late: the first one waits for the others (or their end).
    start = "import os, time\nready, done = os.pipe()\nfirst = os.getpid()\n"
    wait = "if os.getpid() == first:\n    os.close(done)\n    while os.read(ready, 1):\n        pass\n"
    wait += "else:\n    os.close(done)\n"
    alone = {
        "children": start + "[os.fork() for _ in range(2)]\n" + take % 100 + wait + hold,
        "daemons": start
        + "if os.fork() == 0:\n    os.setsid()\n    os.fork() and os.fork()\n    "
        + take % 100
        + wait
        + hold,
        "one": "import time\n" + take % 250 + hold,
    }

    def play(name: str, code: str) -> str:
        box = Sandbox(limits, disabled=disabled, name=name)
        outcome = box.run([PYTHON, "-I", "main.py"], files={"main.py": code})
        return "contained" if outcome.status in ("memory", "failed") else f"{outcome.status}: {outcome.stdout}"

    results = {name: play(name, code) for name, code in alone.items()}
    box = Sandbox(limits, disabled=disabled, name="several")
    with ThreadPoolExecutor(4) as pool:
        code = {"main.py": "import time\n" + take % 90 + hold}
        outcomes = list(pool.map(lambda _: box.run([PYTHON, "-I", "main.py"], files=code).status, range(4)))
    results["several at once"] = "contained" if outcomes.count("ok") <= 2 else str(outcomes)
    return {"memory": results}


def killed(work: Path, disabled: tuple[str, ...]) -> Results:
    """Kills a driver and checks the next start: the killed driver's remains are removed, and nothing else."""
    from skyrl_mega.envs.sandbox import CommandLimits, Sandbox, folders

    script = (
        f"import sys, tempfile, time\nsys.path.insert(0, {sys.path[0]!r})\ntempfile.tempdir = {str(work)!r}\n"
        "from skyrl_mega.envs.sandbox import CommandLimits, Sandbox\n"
        f"box = Sandbox(CommandLimits(wall_s=30), disabled={disabled!r})\nworkspace = box.workspace()\n"
        "(workspace.folder / 'x').write_text('x')\nprint(workspace.place, flush=True)\n"
        f"box.run(['/bin/sleep', '31.{os.getpid()}'], workspace=workspace)\n"
    )
    new_workspace = Sandbox(CommandLimits(), disabled=disabled).workspace()
    driver = subprocess.Popen([PYTHON, "-I", "-c", script], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    home = Path(driver.stdout.readline().strip()).parents[1]
    present = home.is_dir()
    folders.sweep(str(work))
    kept = home.is_dir()
    time.sleep(0.3)
    driver.kill()
    driver.wait()

    def gone(look: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 10
        while look() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not look()

    ended = gone(lambda: any(_mentions(f"31.{os.getpid()}", pid) for pid in filter(str.isdigit, os.listdir("/proc"))))
    folders.sweep(str(work))
    mine = os.path.isdir(new_workspace.place)
    new_workspace.close()
    outcomes = {
        "a living driver keeps its folders": present and kept and mine,
        "a dead driver's processes end": ended,
        "a dead driver's folders go": not home.exists(),
    }
    return {"cleaning up": {name: "contained" if held else "no" for name, held in outcomes.items()}}


def _mentions(mark: str, pid: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and int(pid) != os.getpid()
    except OSError:
        return False


if __name__ == "__main__":
    signal.alarm(280)
    main(*sys.argv[1:])
