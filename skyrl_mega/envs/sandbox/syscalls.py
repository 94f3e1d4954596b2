"""Seccomp filter of the system calls refused to a confined process. x86-64 and arm64, standard library only.

Three sets of calls, chosen by the other confinements:

- always: calls that no program here needs, or that reach past every other confinement;
- `shared`: for a process with neither a PID namespace nor a separate user. The kernel treats such a process like the
  trainer, and Landlock governs no call that changes other processes, or modes, owners, times and attributes of files;
- `counted`: for a process whose disk use is bounded only by watching. Calls able to hide files from the watcher are
  refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import NamedTuple

PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 22, 2
CLONE3 = 435
NAMESPACES = 0x7E020000
"""All flags of clone that create a namespace, CLONE_NEWUSER and CLONE_NEWCGROUP included."""
NEWEST = 462
"""Last system call in these tables (Linux 6.10). Later calls are absent inside, and C libraries do without."""

ALLOW, REFUSE, ABSENT = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
NO_FAMILY = 0x00050000 | errno.EAFNOSUPPORT
FAMILIES = (1, 2, 10)
"""Families of allowed sockets: AF_UNIX, AF_INET, AF_INET6. All three belong to a network namespace; others, such as
AF_VSOCK and AF_ALG, reach past it or reach rarely used code of the kernel."""
LOAD, EQUAL, AT_LEAST, BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH = 0, 4

Line = tuple[int, int, int, int]
"""An instruction of a filter: code, jump if true, jump if false, constant."""


class _SyscallNumbers(NamedTuple):
    audit: int
    socket: int
    clone: int
    prctl: int
    prlimit: int
    utimensat: int
    always: frozenset[int]
    shared: frozenset[int]
    counted: frozenset[int]


# Same numbers on x86-64 and arm64: io_uring, mounts, pidfd_getfd, mount_setattr, memfd_secret; then fchmodat2 and
# process_madvise, process_mrelease.
_ALWAYS = {*range(425, 428), *range(428, 434), 438, 442, 447}
_SHARED = {452, 440, 448}

_X86_64 = _SyscallNumbers(
    audit=0xC000003E,
    socket=41,
    clone=56,
    prctl=157,
    prlimit=302,
    utimensat=280,
    always=frozenset(
        _ALWAYS
        | {41, 101, 310, 311}  # socket, ptrace, process_vm_readv, process_vm_writev
        | {165, 166, 155, 161, 272, 308}  # mount, umount2, pivot_root, chroot, unshare, setns
        | {248, 249, 250, 321, 298, 323}  # add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd
        | {175, 176, 313, 246, 320, 169, 167, 168}  # modules, kexec, reboot, swapon, swapoff
        | {303, 304, 312, 135, 179, 163, 319}  # handles, kcmp, personality, quotactl, acct, memfd_create
        | {29, 30, 31, 64, 65, 66, 220, 68, 69, 70, 71, 240, 241}  # System V IPC, mq_open, mq_unlink
        | {300, 301, 253, 294, 254}  # fanotify, inotify: reveal other programs' use of system files
        | {154}  # modify_ldt
    ),
    shared=frozenset(
        _SHARED
        | {141, 142, 144, 203, 314, 251}  # setpriority, sched_set*, ioprio_set
        | {256, 279}  # migrate_pages, move_pages
        | {90, 91, 268, 92, 93, 94, 260}  # chmod, fchmod, fchmodat, chown, fchown, lchown, fchownat
        | {132, 235, 261}  # utime, utimes, futimesat
        | {188, 189, 190, 197, 198, 199}  # setxattr, removexattr and variants
    ),
    counted=frozenset({46, 307}),  # sendmsg, sendmmsg: a file in flight belongs to no process
)
_ARM64 = _SyscallNumbers(
    audit=0xC00000B7,
    socket=198,
    clone=220,
    prctl=167,
    prlimit=261,
    utimensat=88,
    always=frozenset(
        _ALWAYS
        | {198, 117, 270, 271}
        | {40, 39, 41, 51, 97, 268}
        | {217, 218, 219, 280, 241, 282}
        | {105, 106, 273, 104, 294, 142, 224, 225}
        | {264, 265, 272, 92, 60, 89, 279}
        | {194, 196, 195, 190, 193, 191, 192, 186, 189, 188, 187, 180, 181}
        | {262, 263, 26, 27}
    ),
    shared=frozenset(_SHARED | {140, 118, 119, 122, 274, 30} | {238, 239} | {52, 53, 54, 55} | {5, 6, 7, 14, 15, 16}),
    counted=frozenset({211, 269}),
)
_ARCHS = {"x86_64": _X86_64, "aarch64": _ARM64}

_libc = ctypes.CDLL(None, use_errno=True)


def confine(shared: bool, counted: bool, sockets: bool = False) -> None:
    """Installs the seccomp filter: this process and all descendants can never again make the refused calls.

    Needs no_new_privs. A refused call fails with EPERM; `clone3` and calls newer than `NEWEST` fail with ENOSYS.

    Args:
        shared: True to refuse also calls that reach other processes of the same user.
        counted: True to refuse also calls that escape the watching of disk use.
        sockets: True to allow sockets of `FAMILIES`.

    Raises:
        OSError: The kernel refuses the filter, or these tables lack the machine type.
    """
    arch = _ARCHS.get(os.uname().machine)
    if arch is None:
        raise OSError(errno.ENOSYS, f"no table of system calls for {os.uname().machine}")
    lines = program(arch, shared, counted, sockets)
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    filters = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(buffer))
    if _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filters, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def program(arch: _SyscallNumbers, shared: bool, counted: bool, sockets: bool = False) -> list[Line]:
    """Returns the instructions of the seccomp filter.

    Args:
        arch: Numbers of the system calls on the machine type.
        shared: True to refuse also calls that reach other processes of the same user.
        counted: True to refuse also calls that escape the watching of disk use.
        sockets: True to allow sockets of `FAMILIES`; False refuses every socket.
    """
    code: list[Line] = [
        (LOAD, 0, 0, ARCH),
        (EQUAL, 1, 0, arch.audit),
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, 0x40000000),  # x32: the same calls under other numbers
        (RETURN, 0, 0, REFUSE),
        (AT_LEAST, 0, 1, NEWEST + 1),
        (RETURN, 0, 0, ABSENT),
        (EQUAL, 0, 1, CLONE3),  # flags are unreadable here; the C library falls back to clone
        (RETURN, 0, 0, ABSENT),
    ]
    refused = arch.always - ({arch.socket} if sockets else set())
    for number in sorted(refused | (arch.shared if shared else set()) | (arch.counted if counted else set())):
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    code += _for_call(arch.clone, [(LOAD, 0, 0, _low_half(0)), (BITS, 0, 1, NAMESPACES), (RETURN, 0, 0, REFUSE)])
    if sockets:
        families = [(EQUAL, len(FAMILIES) - place, 0, family) for place, family in enumerate(FAMILIES)]
        code += _for_call(arch.socket, [(LOAD, 0, 0, _low_half(0)), *families, (RETURN, 0, 0, NO_FAMILY)])
    if shared:
        # prlimit only of itself (pid 0); utimensat only of open files (no path); prctl never hides from the watcher.
        code += _for_call(arch.prlimit, [(LOAD, 0, 0, _low_half(0)), (EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE)])
        no_path = [(LOAD, 0, 0, _low_half(1)), (EQUAL, 0, 2, 0), (LOAD, 0, 0, _low_half(1) + 4), (EQUAL, 1, 0, 0)]
        code += _for_call(arch.utimensat, [*no_path, (RETURN, 0, 0, REFUSE)])
        code += _for_call(
            arch.prctl, [(LOAD, 0, 0, _low_half(0)), (EQUAL, 0, 1, PR_SET_DUMPABLE), (RETURN, 0, 0, REFUSE)]
        )
    return [*code, (RETURN, 0, 0, ALLOW)]


def _for_call(number: int, lines: list[Line]) -> list[Line]:
    """Returns instructions that apply `lines` to a single call; at the end of `lines`, the call is allowed."""
    return [(EQUAL, 0, len(lines) + 1, number), *lines, (RETURN, 0, 0, ALLOW)]


def _low_half(argument: int) -> int:
    """Returns the offset of the lower half of an argument."""
    return 16 + 8 * argument
