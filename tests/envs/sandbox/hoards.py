"""Programs that exceed the disk limit in different ways; run inside the sandbox by name.

A program prints `held N` for N MiB unless ended or refused earlier. The limit works if N never exceeds the limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

LIMIT_MIB, GREED_MIB, STEP_MIB = 8, 24, 4
MIB = 2**20
libc = ctypes.CDLL(None, use_errno=True)
total = 0
kept: list[object] = []


def fill(take: Callable[[int], object], step: int = STEP_MIB) -> None:
    """Takes `step` MiB at a time until refused or done."""
    global total
    with contextlib.suppress(OSError):
        while total < GREED_MIB:
            take(total)
            total += step


def fork() -> int:
    """Forks as soon as possible: without namespaces, other processes of the user count too."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return os.fork()
        time.sleep(0.05)


def hold() -> None:
    """Waits to be ended if too much is held."""
    time.sleep(8.0 if total > LIMIT_MIB else 0.0)
    print("held", total, flush=True)


def made(name: str, folder: int | None = None) -> int:
    fd = os.open(name, os.O_CREAT | os.O_RDWR, 0o600, dir_fd=folder)
    os.posix_fallocate(fd, 0, STEP_MIB * MIB)
    return fd


def nameless() -> int:
    fd = made("d")
    os.unlink("d")
    return fd


def keep_nameless() -> None:
    fill(lambda n: kept.append(nameless()))


def one_file() -> None:
    fd = os.open("f", os.O_CREAT | os.O_RDWR)
    fill(lambda n: os.posix_fallocate(fd, n * MIB, STEP_MIB * MIB))


def many_files() -> None:
    fill(lambda n: os.close(made(f"f{n}")))


def beyond_their_ends() -> None:
    def take(n: int) -> None:
        fd = os.open(f"f{n}", os.O_CREAT | os.O_RDWR)
        if libc.fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(STEP_MIB * MIB)):  # FALLOC_FL_KEEP_SIZE
            raise OSError

    fill(take)


def never_named() -> None:
    def take(n: int) -> None:
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR)
        os.posix_fallocate(fd, 0, STEP_MIB * MIB)
        kept.append(fd)

    fill(take)


def unlinked_and_mapped() -> None:
    def take(n: int) -> None:
        fd = nameless()
        kept.append(mmap.mmap(fd, 4096))
        os.close(fd)

    fill(take)


def in_flight_between_sockets() -> None:
    one, other = socket.socketpair()
    kept.append(other)

    def take(n: int) -> None:
        fd = nameless()
        socket.send_fds(one, [b"x"], [fd])
        os.close(fd)

    fill(take)


def held_by_children() -> None:
    def take(n: int) -> None:
        fds = [nameless() for _ in range(3)]
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        for fd in fds:
            os.close(fd)

    fill(take, 3 * STEP_MIB)


def held_by_a_daemon() -> None:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            keep_nameless()
            hold()
        os._exit(0)
    os.close(writing)
    os.read(reading, 1)  # until the daemon ended


def held_by_a_thread_of_a_dead_leader() -> None:
    def run() -> None:
        time.sleep(0.1)
        keep_nameless()
        hold()
        os._exit(0)

    threading.Thread(target=run).start()
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)


def hidden_by_prctl() -> None:
    libc.prctl(4, 0, 0, 0, 0)
    keep_nameless()


def hidden_by_a_program_that_nobody_reads() -> None:
    if len(sys.argv) == 2:
        _run_as_a_program_that_nobody_reads()
    keep_nameless()


def hidden_by_one_process_after_another() -> None:
    """Hides the disk space by successive processes, each too young for suspicion; the visible first process waits."""
    global total
    if len(sys.argv) == 2:
        if fork() == 0:
            _run_as_a_program_that_nobody_reads()
        time.sleep(6.0)
        with open("held") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < 1.5:  # written by a live process
                total = int(file.read())
        return
    keep_nameless()
    end = time.monotonic() + 7
    while time.monotonic() < end:
        with open("held", "w") as says:
            says.write(str(total))
        time.sleep(0.8)
        if fork():
            os._exit(0)
    os._exit(0)


def _run_as_a_program_that_nobody_reads() -> None:
    program = os.open("p", os.O_CREAT | os.O_WRONLY, 0o111)
    with open(os.path.realpath(sys.executable), "rb") as python:
        os.sendfile(program, python.fileno(), 0, 64 * MIB)
    os.close(program)
    os.execve("p", ["p", "-I", *sys.argv, "again"], {**os.environ, "PYTHONHOME": sys.prefix})


def a_folder_that_nobody_lists() -> None:
    os.mkdir("x", 0o300)
    fill(lambda n: os.close(made(f"x/f{n}")))


def folders_that_nobody_enters() -> None:
    os.makedirs("x/y")

    def take(n: int) -> None:
        os.chmod("x", 0o700)
        os.close(made(f"x/y/f{n}"))
        os.chmod("x", 0)

    fill(take)


def _nested(name: str, depth: int) -> None:
    for _ in range(depth):
        os.mkdir(name)
        os.chdir(name)
    fill(lambda n: os.close(made(f"f{n}")))


def below_a_path_that_is_too_long() -> None:
    _nested("n" * 200, 30)


def below_a_thousand_folders() -> None:
    _nested("d", 1000)


def links_that_are_long() -> None:
    fill(lambda n: [os.symlink("t" * 4000, f"l{n}_{i}") for i in range(256)], 1)


def links_to_folders() -> None:
    os.mkdir("d")
    fill(lambda n: [os.symlink("../" * 1300 + "d", f"l{n}_{i}") for i in range(256)], 1)


def empty_folders() -> None:
    fill(lambda n: [os.mkdir(f"d{n}_{i}") for i in range(256)], 1)


def empty_files() -> None:
    fill(lambda n: [os.close(os.open(f"e{n}_{i}", os.O_CREAT)) for i in range(1024)], 1)


def long_names() -> None:
    fill(lambda n: [os.mkdir("n" * 240 + f"{n}_{i}") for i in range(256)], 1)


def many_names_of_one_file() -> None:
    os.close(made("f"))
    fill(lambda n: [os.link("f", f"h{n}_{i}") for i in range(1024)], 1)


def attributes() -> None:
    def take(n: int) -> None:
        for i in range(256):
            os.close(os.open(f"a{n}_{i}", os.O_CREAT | os.O_WRONLY))
            os.setxattr(f"a{n}_{i}", "user.x", bytes(3900))

    fill(take, 1)


def moved_about() -> None:
    os.mkdir("a")
    os.mkdir("b")
    folders = [os.open(name, os.O_RDONLY) for name in "ab"]
    if os.fork() == 0:
        end = time.monotonic() + 9
        while time.monotonic() < end:
            for old, new in ("ac", "ba", "cb"):
                os.rename(old, new)
        os._exit(0)
    fill(lambda n: os.close(made(f"f{n}", folders[n // STEP_MIB % 2])))


HOARDS: dict[str, Callable[[], None]] = {
    act.__name__.replace("_", " "): act
    for act in (
        one_file,
        many_files,
        beyond_their_ends,
        keep_nameless,
        never_named,
        unlinked_and_mapped,
        in_flight_between_sockets,
        held_by_children,
        held_by_a_daemon,
        held_by_a_thread_of_a_dead_leader,
        hidden_by_prctl,
        hidden_by_a_program_that_nobody_reads,
        hidden_by_one_process_after_another,
        a_folder_that_nobody_lists,
        folders_that_nobody_enters,
        below_a_path_that_is_too_long,
        below_a_thousand_folders,
        links_that_are_long,
        links_to_folders,
        empty_folders,
        empty_files,
        long_names,
        many_names_of_one_file,
        attributes,
        moved_about,
    )
}

if __name__ == "__main__":
    HOARDS[sys.argv[1]]()
    hold()
