"""The jail: a script that confines itself, runs one command inside, and lets no process survive the command.

    launcher ── reads the order from stdin; when stdin ends, everything inside is killed
      └ init ── PID 1 of its own namespace if the machine allows; confines itself permanently, then
          └ command ── with resource limits; when the command ends, all its processes are killed

Started as `python -I -S jail.py REPORT_FD`. The order is 8 bytes of length and JSON. The report is lines of JSON:
`memory` while running, and the result once no process is left alive. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any, TextIO

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import confine
import kernel
import listen
from watch import Watch, descendants

NICE = 10
"""Niceness of jailed processes: the trainer, the main user of the machine, comes first."""
OOM_SCORE = "1000"
"""OOM score: when memory runs out, the kernel kills the jailed processes first."""
REPORT_EVERY_S, MIB = 0.5, 2**20
"""Seconds between reports of memory to the host, and the change in bytes reported at once."""


def main() -> None:
    """Reads an order of `run.Sandbox` from standard input, executes the order, and writes the result, a line of JSON,
    to the descriptor in `sys.argv[1]`. Raises EOFError if the order is incomplete."""
    report = int(sys.argv[1])
    os.set_inheritable(report, False)
    signal.set_wakeup_fd(-1)
    length = struct.unpack("Q", _read(0, 8))[0]
    request = json.loads(_read(0, length))
    with os.fdopen(report, "w") as out:
        _write_report(out, launch(request, out))


def launch(request: dict[str, Any], report: TextIO) -> dict[str, Any]:
    """Executes an order of `run.Sandbox`; returns once none of its processes is alive. Ends the command early when
    standard input ends.

    Args:
        request: The order: command, files, limits and confinements.
        report: Receives lines of JSON with the memory use while the command runs.

    Returns:
        Exit status and use of resources, and the confinements gained and absent.
    """
    result: dict[str, Any] = {"active": {}, "absent": {}, "stopped": None}
    namespaces = confine.enter_namespaces(request, result)
    if request["channel"] is not None:
        _send_listener(request["channel"], namespaces, result)
    if not namespaces:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    status, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(status)
        _init(request, result, namespaces, writing)
    os.close(writing)
    reported = _watch(request, child, status, result, report)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)  # with a PID namespace, returns when all processes inside are gone
    if not namespaces:
        _kill_descendants()
    result.update(reported)
    return result


def _send_listener(channel: int, namespaces: bool, result: dict[str, Any]) -> None:
    """Sends the host a socket that listens in this network namespace; without the socket, the confinement of the
    network counts as missing, because the command could not reach its endpoint."""
    try:
        if not namespaces:
            os.close(channel)
            raise OSError("no network namespace")
        listen.send_listener(channel)
    except OSError as error:
        result["absent"]["loopback"] = str(error)
        result["active"].pop("network", None)


def _watch(request: dict[str, Any], child: int, status: int, result: dict[str, Any], report: TextIO) -> dict[str, Any]:
    """Waits until init is done, the host closes stdin, or the folder grows too large; reports memory meanwhile."""
    reported: dict[str, Any] = {}
    watch, noted, next_report, partial = None, 0, 0.0, b""
    while True:
        ready, _, _ = select.select([0, status], [], [], watch.pause_s if watch else None)
        if status in ready:
            piece = os.read(status, 65536)
            if not piece:
                return reported
            *lines, partial = (partial + piece).split(b"\n")
            for line in lines:
                reported.update(json.loads(line))
            if watch is None:
                watch = _watcher(request, child, reported.pop("counted", False))
        elif 0 in ready:
            result["stopped"] = "host"
            return reported
        elif watch is not None:
            stop, used = watch.look()
            if stop is not None:
                result["stopped"] = stop
                return reported
            if (
                abs(used - noted) >= MIB or time.monotonic() >= next_report
            ):  # also periodically: another command may be growing
                noted, next_report = used, time.monotonic() + REPORT_EVERY_S
                _write_report(report, {"memory": used})


def _watcher(request: dict[str, Any], init: int, counted: bool) -> Watch:
    limits = request["limits"]
    folder = (request["folder"] or request["scratch"]) if counted else None
    memory = request["confined"] and request["group"] is None
    return Watch(folder, limits["disk"], limits["inodes"], limits["file"], init, memory)


def _init(request: dict[str, Any], result: dict[str, Any], namespaces: bool, status: int) -> None:
    """Runs init; never returns. Writes every message to `status`, a line of JSON each."""
    try:
        _yield_to_trainer(request["group"])
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        os.setsid()
        stdin = os.memfd_create("stdin")
        os.write(stdin, request["stdin"].encode(errors="surrogateescape"))
        os.lseek(stdin, 0, os.SEEK_SET)
        if not namespaces and os.geteuid() != 0:
            request["limits"]["processes"] += _threads_of(os.geteuid())  # the kernel counts all threads of the user
        counted = confine.confine(request, result, namespaces)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        _send_status(status, {"active": result["active"], "absent": result["absent"], "counted": counted})
        missing = [name for name in request["need"] if name not in result["active"]]
        if missing:
            _send_status(status, {"missing": missing})
            os._exit(0)
        if request["argv"]:
            _send_status(status, _run(request, stdin, status))
    except BaseException as error:
        _send_status(status, {"broken": f"{type(error).__name__}: {error}"})
    os._exit(0)


def _yield_to_trainer(group: str | None) -> None:
    """Gives the trainer priority in CPU time and memory."""
    if group is not None:
        with open(group, "w") as procs:
            procs.write("0")
    os.nice(NICE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # a read-only /proc
        score.write(OOM_SCORE)


def _run(request: dict[str, Any], stdin: int, status: int) -> dict[str, Any]:
    """Runs the command as a child, reaping all dead processes until the command ends; returns exit code and times."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(stdin, 0)
            if request["confined"]:
                _limit(request["limits"])
            else:
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing else ties it to a killed launcher
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            os.set_inheritable(status, False)
            os.execve(request["argv"][0], request["argv"], request["env"])
        except BaseException as error:
            _send_status(status, {"broken": f"{request['argv'][0]}: {error}"})
        finally:
            os._exit(127)
    while True:
        pid, code, usage = os.wait4(-1, 0)
        if pid == child:
            return {
                "exit": os.waitstatus_to_exitcode(code),
                "seconds": time.monotonic() - start,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
            }


def _limit(limits: dict[str, int]) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_NPROC, limits["processes"] + 2),  # plus the jail's own two
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        margin = 1 if kind == resource.RLIMIT_CPU and value != hard else 0  # SIGXCPU comes first and shows the reason
        resource.setrlimit(kind, (value, value + margin))


def _threads_of(uid: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _kill_descendants() -> None:
    """Kills all descendants without a PID namespace: orphans become children of this process, the subreaper."""
    while True:
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _write_report(report: TextIO, line: dict[str, Any]) -> None:
    report.write(json.dumps(line) + "\n")
    report.flush()


def _send_status(status: int, line: dict[str, Any]) -> None:
    os.write(status, json.dumps(line).encode() + b"\n")


def _read(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(fd, count - len(data))
        if not piece:
            raise EOFError("the order ended early")
        data += piece
    return data


if __name__ == "__main__":
    main()
