"""Linux interfaces for confining a process, through ctypes: namespaces and mounts, Landlock, capabilities.

Imports only the standard library and nothing of the project: the jail is a plain script starting in milliseconds. Every
function raises OSError if the kernel, or a container around this process, refuses. x86-64 and arm64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
ST_RELATIME, MS_NOATIME, MS_NODIRATIME, MS_RELATIME = 4096, 1024, 2048, 1 << 21

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

INSIDE_UID = 1000
"""User ID of a plain user inside its own user namespace."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Arch(NamedTuple):
    pivot_root: int
    capset: int
    setns: int


_ARCHS = {"x86_64": _Arch(155, 126, 308), "aarch64": _Arch(41, 91, 268)}


def prctl(option: int, value: int = 0) -> None:
    """Calls prctl(2) with the option and a single value; raises OSError if the kernel refuses."""
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def unshare(flags: int) -> None:
    """Moves this process to new namespaces of the kinds in `flags` (CLONE_NEW…); a new PID namespace begins with the
    next child. Raises OSError if the kernel refuses."""
    _checked(_libc.unshare(flags))


def join(namespace: int, kind: int) -> None:
    """Moves this process to an existing namespace, given by its descriptor; `kind` is a CLONE_NEW flag.

    Raises:
        OSError: The kernel refuses.
    """
    _checked(_libc.syscall(_arch().setns, namespace, kind), "setns")


def unshare_as_any_user(flags: int) -> None:
    """Moves this process to new namespaces of the kinds in `flags`, as `unshare` does. The process of a plain user also
    moves to a new user namespace, in which the user has the ID `INSIDE_UID` and no other user exists. A user namespace
    would not help root: the kernel does not count root's processes there either.

    Raises:
        OSError: The kernel refuses.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        unshare(flags)
        return
    unshare(flags | CLONE_NEWUSER)
    own = (("setgroups", "deny"), ("uid_map", f"{INSIDE_UID} {uid} 1"), ("gid_map", f"{INSIDE_UID} {gid} 1"))
    for file, text in own:
        with open(f"/proc/self/{file}", "w") as out:
            out.write(text)


def drop_capabilities() -> None:
    """Drops every capability of this process permanently; raises OSError if the kernel refuses."""
    header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _checked(_libc.syscall(_arch().capset, header, data))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Calls mount(2) with these arguments; `kind` is the type of the file system, `data` its options as text.

    Raises:
        OSError: The kernel refuses.
    """
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), data.encode()
    )
    _checked(done, f"mount {target}")


def read_only(target: str) -> None:
    """Makes the mount at `target` read-only; existing flags are kept, since a user namespace may not drop them. Raises
    OSError if the kernel refuses."""
    present = os.statvfs(target).f_flag
    keep = present & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    if present & ST_RELATIME:
        keep |= MS_RELATIME
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | keep)


def pivot(root: str) -> None:
    """Makes `root`, a mount, the root and the working folder of this mount namespace; the old root is detached.
    Raises OSError if the kernel refuses."""
    os.chdir(root)
    _checked(_libc.syscall(_arch().pivot_root, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def landlock_version() -> int:
    """Returns the kernel's Landlock ABI; raises OSError without Landlock."""
    return _checked(_libc.syscall(444, None, ctypes.c_size_t(0), 1), "Landlock")


def landlock(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Confines this process permanently to some files; returns the kernel's Landlock ABI.

    From ABI 6 on, signals and abstract Unix sockets are also confined to this process and its descendants. The process
    needs no_new_privs.

    Args:
        readable: Files and folders allowed for reading and executing; missing paths are skipped.
        writable: Folders with everything allowed, new device nodes included (the kernel asks for CAP_MKNOD), and files
            allowed for reading, writing and executing; missing paths are skipped.

    Raises:
        OSError: The kernel has no Landlock, or refuses.
    """
    version = landlock_version()
    bits = 13 + (version >= 2) + (version >= 3)  # REFER and TRUNCATE came later
    everything = (1 << bits) - 1
    if version >= 5:
        everything |= 1 << 15  # ioctl on devices
    rules = struct.pack("QQQ", everything, 0, 3 if version >= 6 else 0)
    ruleset = _checked(_libc.syscall(444, rules, ctypes.c_size_t(24 if version >= 6 else 8), 0), "Landlock")
    try:
        for paths, folder, file in ((readable, 0b1101, 0b101), (writable, everything, 0b111 | (everything & 1 << 14))):
            for path in paths:
                try:
                    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
                except (FileNotFoundError, PermissionError):  # unreachable for this user, hence unreadable too
                    continue
                rule = struct.pack("=Qi", folder if os.path.isdir(path) else file, handle)
                try:
                    _checked(_libc.syscall(445, ruleset, 1, rule, 0), f"Landlock {path}")
                finally:
                    os.close(handle)
        _checked(_libc.syscall(446, ruleset, 0), "Landlock")
    finally:
        os.close(ruleset)
    return version


def _arch() -> _Arch:
    arch = _ARCHS.get(os.uname().machine)
    if arch is None:
        raise OSError(errno.ENOSYS, f"no table of system calls for {os.uname().machine}")
    return arch


def _checked(result: int, call: str = "") -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}" if call else os.strerror(number))
    return int(result)
