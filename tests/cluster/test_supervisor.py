"""A command under its supervisor, through all ends of the command and of the supervisor."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = """
import os, signal, subprocess, sys, time
from pathlib import Path
from skyrl_mega.cluster import channel, driver
from skyrl_mega.cluster.channel import StopRequest
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
driver.start("the same command goes on")
folder = Path(sys.argv[1])
"""
LEAVES = """
(folder / "partial").mkdir()
with channel.removed_after_crash(folder / "partial"):
    from multiprocessing.shared_memory import SharedMemory
    from multiprocessing import resource_tracker
    held = SharedMemory("skyrl-test" + str(folder).replace("/", "-"), create=True, size=4096)
    resource_tracker.unregister(held._name, "shared_memory")
    if os.fork() == 0:  # a daemon, as thorough as they come, that no signal ends
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(600)
    os.wait()
    time.sleep(600)
"""
"""A program with typical remains of a killed process: a process, shared memory, a folder."""
HEEDS = """
with channel.polling_for_stop():
    print("ready", flush=True)
    while channel.asked() is StopRequest.NOTHING:
        time.sleep(0.01)
    print(channel.asked().name, flush=True)
"""


PATIENT = START.replace(
    "driver.start(", "from skyrl_mega.cluster import supervisor\nsupervisor.GRACE_S = 600.0\ndriver.start("
)
"""A program with a grace period of ten minutes for a driver with signal checks."""


def start(folder: Path, program: str, beginning: str = START) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", beginning + program, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "SKYRL_MEGA_TEST": str(folder)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, errors


def living(folder: Path) -> list[int]:
    mark = f"SKYRL_MEGA_TEST={folder}".encode()
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                processes.append(int(process.name))
        except OSError:
            continue
    return processes


def driver_of(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_a_signal_ends_all_with_75_and_one_line(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, LEAVES)
    process.send_signal(number)
    assert end(process) == (75, "", f"stopped by {number.name}; the same command goes on\n")
    assert living(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert not Path("/dev/shm/skyrl-test" + str(tmp_path).replace("/", "-")).exists()


def test_the_drivers_death_is_a_fault_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, LEAVES)
    driver = driver_of(process)
    os.kill(driver, signal.SIGKILL)
    code, _, errors = end(process)
    line = f"fault: the driver (process {driver}) was ended by SIGKILL, perhaps by the kernel, out of memory; the same"
    assert code == 1 and errors == f"{line} command goes on\n"
    assert living(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_the_supervisors_death_is_the_drivers(tmp_path: Path) -> None:
    process = start(tmp_path, 'print("ready", flush=True)\ntime.sleep(600)')
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while living(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert living(tmp_path) == []


@pytest.mark.parametrize("code", [0, 1, 2])
def test_without_a_signal_the_exit_code_is_the_drivers(tmp_path: Path, code: int) -> None:
    assert end(start(tmp_path, f'print("ready", flush=True)\ndriver.run(lambda: {code})')) == (code, "", "")


@pytest.mark.parametrize(
    ("ends", "where"),
    [
        ("os._exit(0)", ""),
        ("channel.at_step(7); os._exit(0)", ", in step 7"),
        (
            "held = channel.running_environment('slow'); held.__enter__(); os._exit(3)",
            ", while it ran environment slow",
        ),
        ("channel.at_step(2); ctypes.CDLL(None).exit(0)", ", in step 2"),
    ],
)
def test_a_driver_that_ends_before_it_has_said_so_is_a_fault_with_the_step(
    tmp_path: Path, ends: str, where: str
) -> None:
    """Ends the driver early, with any exit status and from any thread."""
    program = f"""
import ctypes, threading
def command():
    threading.Thread(target=lambda: exec({ends!r}, globals())).start()
    time.sleep(600)
print("ready", flush=True)
driver.run(command)
"""
    code, _, errors = end(start(tmp_path, program))
    (line,) = errors.splitlines()
    assert code == 1 and re.match(
        rf"fault: the driver \(process \d+\) ended with exit status [03] before it had finished{where}: an env", line
    )
    assert line.endswith("; the same command goes on")


def test_a_user_without_an_entry_in_the_system_has_a_name_and_a_home(tmp_path: Path) -> None:
    """Runs as with `docker --user`: libraries ask for a user name and a home folder."""
    unknown = """
import pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME"):
    os.environ.pop(name, None)
driver.start("""
    program = """
import getpass
from skyrl_mega.cluster.actor_process import compile_cache
print("ready", flush=True)
assert getpass.getuser() in compile_cache() and Path.home().is_dir()
driver.run(lambda: 0)
"""
    assert end(start(tmp_path, program, START.replace("driver.start(", unknown.lstrip()))) == (0, "", "")


def test_a_driver_that_has_said_done_and_fails_then_is_a_fault(tmp_path: Path) -> None:
    program = 'import atexit\natexit.register(os._exit, 3)\nprint("ready", flush=True)\ndriver.run(lambda: 0)'
    code, _, errors = end(start(tmp_path, program))
    assert code == 1 and "had finished with exit code 0 and then ended with exit status 3" in errors


def test_a_driver_that_looks_may_finish_in_order_and_is_not_interrupted(tmp_path: Path) -> None:
    for number, asked, ends in ((signal.SIGUSR1, "SOON", 75), (signal.SIGTERM, "NOW", 0), (signal.SIGUSR1, "SOON", 0)):
        process = start(
            tmp_path, f"{HEEDS}\nassert channel.stop_signal() == '{number.name}'\ndriver.run(lambda: {ends})"
        )
        process.send_signal(number)
        line = f"stopped by {number.name}; the same command goes on\n"
        finished = number == signal.SIGUSR1 and ends == 0
        assert end(process) == ((0, "SOON\n", "") if finished else (75, f"{asked}\n", line))


def test_a_second_signal_hastens(tmp_path: Path) -> None:
    """Sends a second signal: a driver gets time after the first signal and ends at once after the second."""
    for first in (signal.SIGUSR1, signal.SIGTERM):
        process = start(tmp_path, f"{HEEDS}\n    time.sleep(600)", PATIENT)
        process.send_signal(first)
        assert process.stdout is not None
        assert process.stdout.readline() in ("SOON\n", "NOW\n")
        process.send_signal(signal.SIGINT)
        if first == signal.SIGUSR1:
            time.sleep(0.5)
            assert process.poll() is None, "it has been told twice that it is to end, and once that at once"
            process.send_signal(signal.SIGINT)
        code, _, errors = end(process)
        assert code == 75 and len(errors.splitlines()) == 1


def test_a_scheduler_that_tells_twice_does_not_hasten(tmp_path: Path) -> None:
    """Sends several signals, like a scheduler to every process of a job: the driver still finishes."""
    process = start(tmp_path, f"{HEEDS}\n    time.sleep(0.5)\n    print(channel.asked().name)\ndriver.run(lambda: 75)")
    for _ in range(3):
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert end(process) == (75, "SOON\nSOON\n", "stopped by SIGUSR1; the same command goes on\n")


HOLDS = """
import ctypes, socket, threading
listening = socket.create_server(("127.0.0.1", 0))
(folder / "port").write_text(str(listening.getsockname()[1]))
threading.Thread(target=time.sleep, args=(600,)).start()
if os.fork():
    channel.finish(0)
    os._exit(0)
threading.Thread(target=lambda: (print("ready", flush=True), time.sleep(600))).start()
ctypes.CDLL(None).pthread_exit(None)  # its first thread is a zombie, and it lives on
"""


def test_what_looks_dead_and_holds_a_port_is_ended(tmp_path: Path) -> None:
    """Ends a process shown as a zombie: the first thread ended, other threads continue."""
    process = start(tmp_path, HOLDS)
    code, _, _ = end(process)
    assert code == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int((tmp_path / "port").read_text())))


def test_a_semaphore_whose_keeper_is_killed_too_is_removed(tmp_path: Path) -> None:
    program = """
import multiprocessing
lock = multiprocessing.get_context("spawn").Lock()
(folder / "name").write_text(lock._semlock.name)
print("ready", flush=True)
time.sleep(600)
"""
    process = start(tmp_path, program)
    semaphore = Path("/dev/shm") / f"sem.{(tmp_path / 'name').read_text().removeprefix('/')}"
    assert semaphore.exists()
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 75 and not semaphore.exists()


def test_a_file_in_shared_memory_that_was_there_before_stays(tmp_path: Path) -> None:
    mine = Path("/dev/shm") / f"skyrl-test-mine-{os.getpid()}"
    mine.write_bytes(bytes(4096))
    try:
        program = f"""
import mmap
with open({str(mine)!r}, "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
held[0] = 1
print("ready", flush=True)
time.sleep(600)
"""
        process = start(tmp_path, program)
        process.send_signal(signal.SIGTERM)
        assert end(process)[0] == 75 and mine.read_bytes()[0] == 1
    finally:
        mine.unlink(missing_ok=True)


def test_in_a_terminal_a_debugger_reads(tmp_path: Path) -> None:
    """Reads in a debugger: the driver runs in the background and gets the foreground while reading."""
    program = """
print("tty", sys.stdout.isatty(), os.getpgrp() == os.getpid(), flush=True)
breakpoint()
print("went on", flush=True)
time.sleep(600)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ.pop("PYTHONBREAKPOINT", None)  # set by Ray, if Ray ran in this process
        os.execv(sys.executable, [sys.executable, "-c", START + program, str(tmp_path)])
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            if not select.select([terminal], [], [], 120)[0]:
                pytest.fail(f"no {text!r} within 120 s of {seen!r}")
            seen += os.read(terminal, 4096).decode()

    until("(Pdb) ")
    assert "tty True True" in seen
    os.write(terminal, b"p 6 * 7\n")
    until("42")
    os.write(terminal, b"q\n")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 1 and "BdbQuit" in seen + os.read(terminal, 65536).decode()


def test_ctrl_c_in_a_terminal_reaches_the_supervisor(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", START + 'print("ready", flush=True)\ntime.sleep(600)', "."])
    seen = ""
    while "ready" not in seen:
        seen += os.read(terminal, 4096).decode()
    os.write(terminal, b"\x03")
    while "goes on" not in seen:
        seen += os.read(terminal, 4096).decode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    plain = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", seen).replace("\r", "")
    assert plain.endswith("stopped by SIGINT; the same command goes on\n") and "\x1b[?25h" in seen


CLEANS = """
cleaner = '''
import subprocess, sys
open("/proc/self/comm", "w").write("skyrl-cleaner")
print("named", flush=True)
sys.stdin.read()
subprocess.run(["sh", "-c", "sleep 1; touch removed"], check=True)
'''
process = subprocess.Popen(
    [sys.executable, "-c", cleaner], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
)
process.stdout.readline()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("whom", ["supervisor", "driver"])
def test_a_cleaner_ends_its_work_after_a_signal(tmp_path: Path, whom: str) -> None:
    process = start(tmp_path, LEAVES.replace('print("ready", flush=True)', "pass").split("    os.wait()")[0] + CLEANS)
    if whom == "supervisor":
        process.terminate()
    else:
        os.kill(int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]), signal.SIGKILL)
    code, _, errors = end(process)
    assert code == (75 if whom == "supervisor" else 1)
    assert "removing containers, for at most 60 s" in errors
    assert (tmp_path / "removed").exists() and living(tmp_path) == []
