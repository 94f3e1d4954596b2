"""Attacks of a hostile program in a single run inside the sandbox: stdin names the targets, stdout reports the
outcomes.

Every attack is a function that raises OSError, or returns a negative number, if refused. The host detects successful
attacks by comparing the targets before and after.
"""

# ruff: noqa: SIM115  (an attack is over once its call is refused)
from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
Attack = tuple[str, str, Callable[[], Any]]
BUFFER = ctypes.create_string_buffer(4096)


def call(number: int, *arguments: Any) -> int:
    """Makes a system call by its x86-64 number; other architectures skip the call."""
    if not X86:
        raise OSError(errno.ENOSYS, "not tried here")
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if libc.syscall(ctypes.c_long(number), *given) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return 0


def processes(pid: int, uid: int) -> Iterator[Attack]:
    pair = (ctypes.c_ulong * 2)(0, 0)
    one = (ctypes.c_ulong * 1)(1)
    priority = ctypes.c_int(0)
    attributes = ctypes.create_string_buffer(48)
    attributes[0:4] = (48).to_bytes(4, "little")
    attributes[4:8] = (3).to_bytes(4, "little")  # SCHED_BATCH
    info = ctypes.create_string_buffer(128)
    info[8:12] = (-1 & 0xFFFFFFFF).to_bytes(4, "little")
    address, length = ctypes.addressof(BUFFER), ctypes.c_ulong(64)
    vector = (ctypes.c_ulong * 2)(address, 64)
    remote = (ctypes.c_ulong * 2)(0x400000, 64)

    def signalled_by_pipe() -> None:
        import fcntl

        reading, writing = os.pipe()
        fcntl.fcntl(reading, fcntl.F_SETOWN, pid)
        fcntl.fcntl(reading, 10, signal.SIGKILL)  # F_SETSIG
        fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(writing, b"x")

    for name, attack in {
        "prlimit CPU": lambda: call(302, pid, 0, pair, 0),
        "prlimit files": lambda: call(302, pid, 7, pair, 0),
        "prlimit reads": lambda: call(302, pid, 0, 0, pair),
        "setpriority": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "setpriority of its group": lambda: os.setpriority(os.PRIO_PGRP, pid, 19),
        "setpriority of a user": lambda: os.setpriority(os.PRIO_USER, uid, 19),
        "sched_setaffinity": lambda: call(203, pid, 8, one),
        "sched_setscheduler": lambda: call(144, pid, 3, ctypes.byref(priority)),
        "sched_setparam": lambda: call(142, pid, ctypes.byref(priority)),
        "sched_setattr": lambda: call(314, pid, attributes, 0),
        "ioprio_set": lambda: call(251, 1, pid, 3 << 13),
        "ioprio_set of a user": lambda: call(251, 3, uid, 3 << 13),
        "kill": lambda: os.kill(pid, signal.SIGTERM),
        "kill its group": lambda: os.killpg(pid, signal.SIGTERM),
        "tgkill": lambda: call(234, pid, pid, 15),
        "tkill": lambda: call(200, pid, 15),
        "rt_sigqueueinfo": lambda: call(129, pid, 15, info),
        "pidfd": lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGTERM),
        "a pipe's owner": signalled_by_pipe,
        "ptrace": lambda: call(101, 16, pid, 0, 0),
        "ptrace seize": lambda: call(101, 0x4206, pid, 0, 0),
        "process_vm_readv": lambda: call(310, pid, vector, 1, remote, 1, 0),
        "process_vm_writev": lambda: call(311, pid, vector, 1, remote, 1, 0),
        "process_madvise": lambda: call(440, pid, vector, 1, 21, 0),
        "migrate_pages": lambda: call(256, pid, 64, one, one),
        "move_pages": lambda: call(279, pid, 1, vector, 0, BUFFER, 0),
        "get_robust_list": lambda: call(274, pid, ctypes.byref(length), ctypes.byref(length)),
        "kcmp": lambda: call(312, pid, os.getpid(), 1, 0, 0),
        "environment": lambda: open(f"/proc/{pid}/environ").read(),
        "memory": lambda: open(f"/proc/{pid}/mem", "r+b").read(1),
        "descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
        "its root": lambda: os.listdir(f"/proc/{pid}/root"),
        "oom score": lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("1000"),
        "setpgid": lambda: os.setpgid(pid, pid),
    }.items():
        yield "processes", name, attack


def files(folder: str) -> Iterator[Attack]:
    secret, inner = f"{folder}/secret".encode(), f"{folder}/inner".encode()
    times = (ctypes.c_long * 4)(1, 0, 1, 0)
    folder_fd, name = -100, b"user.x"  # AT_FDCWD
    attribute = (ctypes.c_ulong * 2)(ctypes.addressof(BUFFER), 1)

    def through_a_link() -> None:
        os.symlink(secret, "link")
        open("link", "w").write("x")

    def by_descriptor(act: Callable[[int], Any], path: bytes = secret) -> Callable[[], Any]:
        return lambda: act(os.open(path, os.O_PATH))

    def by_chdir() -> None:
        os.chdir(folder)
        try:
            open("secret").read()
        finally:
            os.chdir(os.environ["HOME"])

    def by_handle() -> None:
        call(303, folder_fd, secret, BUFFER, ctypes.byref(ctypes.c_int(0)), 0)
        call(304, folder_fd, BUFFER, 0)

    def inotify() -> None:
        fd = libc.inotify_init1(0)
        if fd < 0 or libc.inotify_add_watch(fd, folder.encode(), 0xFFF) < 0:
            raise OSError(ctypes.get_errno(), "refused")

    for title, attack in {
        "read": lambda: open(secret).read(),
        "write": lambda: open(secret, "w"),
        "append": lambda: open(secret, "a"),
        "truncate by open": lambda: os.open(secret, os.O_RDONLY | os.O_TRUNC),
        "truncate": lambda: os.truncate(secret, 0),
        "list": lambda: os.listdir(folder),
        "create": lambda: open(f"{folder}/new", "x"),
        "create in public": lambda: open(f"{folder}/public/new", "x"),
        "a nameless file": lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600),
        "mkdir": lambda: os.mkdir(f"{folder}/new"),
        "mkfifo": lambda: os.mkfifo(f"{folder}/new"),
        "mknod": lambda: os.mknod(f"{folder}/new"),
        "symlink": lambda: os.symlink("x", f"{folder}/new"),
        "unlink": lambda: os.unlink(secret),
        "rmdir": lambda: os.rmdir(inner),
        "rename": lambda: os.rename(secret, f"{folder}/new"),
        "rename in": lambda: os.rename(secret, "mine"),
        "link in": lambda: os.link(secret, "mine"),
        "through a link": through_a_link,
        "chdir": by_chdir,
        "chmod": lambda: os.chmod(secret, 0o666),
        "chmod a folder": lambda: os.chmod(folder, 0),
        "fchmodat": lambda: call(268, folder_fd, secret, 0o666),
        "fchmodat2": lambda: call(452, folder_fd, secret, 0o666, 0),
        "fchmod": by_descriptor(lambda fd: os.fchmod(fd, 0o666)),
        "chown": lambda: os.chown(secret, -1, os.getgid()),
        "lchown": lambda: os.lchown(secret, -1, os.getgid()),
        "fchownat": lambda: call(260, folder_fd, secret, -1, os.getgid(), 0),
        "fchownat of a descriptor": by_descriptor(lambda fd: call(260, fd, b"", -1, os.getgid(), 0x1000)),
        "utime": lambda: call(132, secret, times),
        "utimes": lambda: call(235, secret, times),
        "futimesat": lambda: call(261, folder_fd, secret, times),
        "utimensat": lambda: call(280, folder_fd, secret, times, 0),
        "utimensat of a folder": lambda: call(280, folder_fd, folder.encode(), 0, 0),
        "utimensat of a descriptor": by_descriptor(lambda fd: call(280, fd, b"", times, 0x1000)),
        "setxattr": lambda: os.setxattr(secret, "user.x", b"x"),
        "setxattr of a folder": lambda: os.setxattr(folder, "user.x", b"x"),
        "lsetxattr": lambda: os.setxattr(secret, "user.x", b"x", follow_symlinks=False),
        "removexattr": lambda: os.removexattr(secret, "user.kept"),
        "setxattrat": lambda: call(463, folder_fd, secret, 0, name, attribute, 16),
        "removexattrat": lambda: call(466, folder_fd, secret, 0, b"user.kept"),
        "file_setattr": lambda: call(469, folder_fd, secret, BUFFER, 24, 0),
        "inotify": inotify,
        "fanotify": lambda: call(300, 0x200, 0),
        "handle": by_handle,
        "/proc/self/root": lambda: open(f"/proc/self/root{folder}/secret").read(),
        "/proc/self/cwd": lambda: open(f"/proc/self/cwd/../../../../../..{folder}/secret").read(),
        "dots": lambda: open(f"../../../../../../../..{folder}/secret").read(),
        "/proc/1": lambda: os.listdir("/proc/1/root"),
        "/etc/passwd": lambda: open("/etc/passwd").read(),
        "home": lambda: os.listdir("/root"),
        "disk": lambda: os.open("/dev/vda", os.O_RDONLY),
        "kernel log": lambda: open("/dev/kmsg").read(1),
        "/tmp": lambda: open("/tmp/probe", "w"),
        "/dev/shm": lambda: open("/dev/shm/probe", "w"),
        "/sys": lambda: os.listdir("/sys"),
        "the system": lambda: open("/usr/probe", "w"),
        "chroot": lambda: os.chroot("."),
    }.items():
        yield "files", title, attack


def readable(path: str) -> Iterator[Attack]:
    """Yields attacks on a file passed in as readable."""

    def opened(act: Callable[[int], Any]) -> Callable[[], Any]:
        return lambda: act(os.open(path, os.O_RDONLY))

    for title, attack in {
        "write": lambda: open(path, "a"),
        "fchmod": opened(lambda fd: os.fchmod(fd, 0)),
        "chmod": lambda: os.chmod(path, 0),
        "fchown": opened(lambda fd: os.fchown(fd, -1, os.getgid())),
        "fsetxattr": opened(lambda fd: os.setxattr(fd, "user.x", b"x")),
        "utimensat": lambda: call(280, -100, path.encode(), 0, 0),
        "ftruncate": opened(lambda fd: os.ftruncate(fd, 0)),
        "unlink": lambda: os.unlink(path),
        "reopen": opened(lambda fd: open(f"/proc/self/fd/{fd}", "w")),
    }.items():
        yield "files", f"given to read: {title}", attack


def network(port: int, path: str) -> Iterator[Attack]:
    def families() -> None:
        for family in range(1, 47):
            for kind in (1, 2, 3, 5):
                with contextlib.suppress(OSError), socket.socket(family, kind):
                    raise AssertionError(f"family {family}")
        raise OSError(errno.EPERM, "all refused")

    def unix(address: str) -> None:
        with socket.socket(socket.AF_UNIX) as unix_socket:
            unix_socket.connect(address)

    for title, attack in {
        "every family": families,
        "loopback": lambda: socket.create_connection(("127.0.0.1", port), 1),
        "listen": lambda: socket.create_server(("127.0.0.1", 0)),
        "a datagram": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port)),
        "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
        "unix": lambda: unix(path),
        "abstract": lambda: unix("\0probe"),
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
        "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0),
        "vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
        "io_uring": lambda: call(425, 8, BUFFER),
        "x32": lambda: call(0x40000000 + 41, 2, 1, 0),
    }.items():
        yield "network", title, attack


def ipc(shm: int, queue: int, semaphore: int) -> Iterator[Attack]:
    message = ctypes.create_string_buffer(b"\1" + bytes(7) + b"x", 16)
    operation = ctypes.create_string_buffer(b"\0\0\1\0\0\0", 6)

    def overwrite() -> None:
        libc.shmat.restype = ctypes.c_void_p
        where = libc.shmat(shm, None, 0)
        if where in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "refused")
        ctypes.memset(where, 0x78, 16)

    for title, attack in {
        "shmat": overwrite,
        "shmget": lambda: call(29, 0, 4096, 0o1600),
        "shmctl remove": lambda: call(31, shm, 0, 0),
        "shmctl lock": lambda: call(31, shm, 11, 0),
        "shmctl stat": lambda: call(31, shm, 2, BUFFER),
        "msgget": lambda: call(68, 0, 0o1600),
        "msgsnd": lambda: call(69, queue, message, 1, 0x800),
        "msgrcv": lambda: call(70, queue, message, 1, 0, 0x800),
        "msgctl remove": lambda: call(71, queue, 0, 0),
        "semget": lambda: call(64, 0, 1, 0o1600),
        "semop": lambda: call(65, semaphore, operation, 1),
        "semtimedop": lambda: call(220, semaphore, operation, 1, 0),
        "semctl remove": lambda: call(66, semaphore, 0, 0, 0),
        "mq_open": lambda: call(240, b"probe", 0o102, 0o600, 0),
        "mq_unlink": lambda: call(241, b"probe"),
        "memfd_create": lambda: call(319, b"x", 0),
    }.items():
        yield "ipc", title, attack


def kernel() -> Iterator[Attack]:
    flags = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000}
    flags |= {"pid": 0x20000000, "net": 0x40000000}
    for name, flag in flags.items():
        yield "kernel", f"unshare {name}", lambda flag=flag: call(272, flag)
        yield "kernel", f"clone {name}", lambda flag=flag: call(56, flag | 17, 0, 0, 0, 0)
    numbers = {
        "clone3": 435, "setns": 308, "mount": 165, "umount": 166, "pivot_root": 155, "fsopen": 430, "fsmount": 432,
        "open_tree": 428, "move_mount": 429, "mount_setattr": 442, "open_tree_attr": 467, "bpf": 321,
        "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249,
        "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
        "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179, "quotactl_fd": 443, "syslog": 103,
        "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "sethostname": 170, "setdomainname": 171,
        "iopl": 172, "ioperm": 173, "vhangup": 153, "pidfd_getfd": 438, "memfd_secret": 447, "io_uring_enter": 426,
        "lookup_dcookie": 212, "landlock off": 446, "a call of the future": 600,
        "inotify_init": 253, "inotify_init1": 294,
    }  # fmt: skip
    for name, number in numbers.items():
        first = 3 if name in ("syslog", "iopl") else 0
        yield "kernel", name, lambda number=number, first=first: call(number, first, 0, 0, 0, 0, 0)
    yield "kernel", "modify_ldt", lambda: call(154, 0, BUFFER, 16)
    yield "kernel", "personality", lambda: call(135, 0x0400000)
    for name, attack in {
        "become root": lambda: os.setresuid(0, 0, 0) if os.getuid() else call(9999),
        "groups": lambda: os.setgroups([0]),
        "raised limit": lambda: __import__("resource").setrlimit(7, (10**6, 10**6)),
        "higher priority": lambda: os.nice(-5),
    }.items():
        yield "kernel", name, attack


def main() -> None:
    given = json.load(sys.stdin)
    results: dict[str, dict[str, str]] = {}
    for family, name, attack in [
        *processes(given["pid"], given["uid"]),
        *files(given["folder"]),
        *readable(given["readable"]),
        *network(given["port"], given["socket"]),
        *ipc(given["shm"], given["queue"], given["semaphore"]),
        *kernel(),
    ]:
        try:
            done = attack()
            verdict = "refused" if isinstance(done, int) and not isinstance(done, bool) and done < 0 else "done"
        except OSError as error:
            verdict = "refused: " + errno.errorcode.get(error.errno or 0, str(error))
        except ValueError as error:
            verdict = f"refused: {error}"
        except Exception as error:
            verdict = f"done: {type(error).__name__}: {error}"
        results.setdefault(family, {})[name] = verdict
    print(json.dumps(results))


if __name__ == "__main__":
    main()
