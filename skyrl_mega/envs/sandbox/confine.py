"""Confinement of the jail: namespaces, a private root, a separate user, Landlock, seccomp. Standard library only.

`result` records the confinements in force and the mechanisms (`active`), and the machine's refusals (`absent`).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import kernel
import syscalls
import tree

SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
"""Host paths needed by programs to start."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
WORK_FOLDER = "/sandbox"
"""Working folder inside a mount namespace."""

TRUNCATE_ABI = 3
"""First Landlock ABI with control over truncating files."""


def enter_namespaces(request: dict[str, Any], result: dict[str, Any]) -> bool:
    """Moves this process out of the host's namespaces, into those of the workspace or into new ones. The new PID
    namespace begins with the next child.

    Args:
        request: The order of `run.Sandbox`, with the namespaces of the workspace if any.
        result: Receives the confinements gained, or the reason under `absent`.

    Returns:
        True once this process is in the namespaces; False if the machine refuses new namespaces.

    Raises:
        OSError: The namespaces of the workspace cannot be entered.
    """
    try:
        if "namespaces" in request["disabled"]:
            raise OSError("switched off")
        if request["namespaces"]:  # namespaces of the workspace
            for kind, flag in (("user", kernel.CLONE_NEWUSER), ("mnt", kernel.CLONE_NEWNS)):
                if kind in request["namespaces"]:
                    kernel.join(request["namespaces"][kind], flag)
                    os.close(request["namespaces"][kind])
            kernel.unshare(kernel.NAMESPACES)
        else:
            kernel.unshare_as_any_user(kernel.NAMESPACES)
    except OSError as error:
        if request["namespaces"]:
            raise
        result["absent"]["namespaces"] = str(error)
        return False
    result["active"] |= {"processes": ["PID namespace"], "network": ["network namespace"]}
    return True


def confine(request: dict[str, Any], result: dict[str, Any], namespaces: bool) -> bool:
    """Confines this process permanently to its working folder, limits and allowed system calls, and writes the files of
    the order into the folder, which becomes the current one. A process of root changes to the user of the order. With
    `confined` false in the order, only enters and fills the folder.

    Args:
        request: The order of `run.Sandbox`.
        result: Receives the confinements gained and absent.
        namespaces: True if the process is in namespaces of its own.

    Returns:
        True if disk use is bounded only by watching.

    Raises:
        OSError: The working folder cannot be entered or filled, or the user not changed. A refused confinement is no
            error: it is listed as absent.
    """
    active, absent = result["active"], result["absent"]
    outside = os.path.realpath(request["folder"] or request["scratch"])
    if not request["confined"]:
        os.chdir(outside)
        _add_paths(request, outside)
        _write(request["files"])
        return False
    os.close(tree.enter(outside))  # an earlier command may have locked the folder
    work, readable, writable = outside, [*SYSTEM_PATHS, *request["read"]], [outside, *DEVICES]
    owner = os.geteuid()
    if owner == 0:
        owner = request["uid"]
        _change_owner(outside, owner)
    counted = not request["namespaces"]
    if namespaces:
        try:
            _new_root(request, outside, owner)
            work, readable, writable = WORK_FOLDER, ["/"], [WORK_FOLDER, *DEVICES]
            active["files"] = ["mount namespace"]
            counted = counted and request["folder"] is not None
        except OSError as error:
            absent["mount namespace"] = str(error)
    os.chdir(work)
    request["env"] |= {"HOME": work, "TMPDIR": work}
    _add_paths(request, work)
    shared = not namespaces
    if owner != os.geteuid():
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
        active.setdefault("processes", []).append("user of its own")
        shared = False
    else:
        kernel.drop_capabilities()
    _write(request["files"])
    _restrict(request, result, (readable, writable), shared, counted)
    active["limits"] = ["rlimit"]
    return counted


def _add_paths(request: dict[str, Any], work: str) -> None:
    request["env"] |= {name: os.path.join(work, path) for name, path in request["paths"].items()}


def _write(files: dict[str, str]) -> None:
    for name, text in files.items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogateescape") as out:
            out.write(text)


def _restrict(
    request: dict[str, Any], result: dict[str, Any], paths: tuple[list[str], list[str]], shared: bool, counted: bool
) -> None:
    """Applies Landlock and seccomp. For a `shared` process, only both together confine files and processes."""
    active, absent = result["active"], result["absent"]
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    try:
        if "landlock" in request["disabled"]:
            raise OSError("switched off")
        version = kernel.landlock(*paths)
        if version >= TRUNCATE_ABI or not shared:
            active.setdefault("files", []).append("Landlock")
        if version >= 6:
            active.setdefault("processes", []).append("Landlock")
    except OSError as error:
        absent["Landlock"] = str(error)
    try:
        if "seccomp" in request["disabled"]:
            raise OSError("switched off")
        syscalls.confine(shared, counted, request["sockets"])
        if not request["sockets"]:
            active.setdefault("network", []).append("seccomp")
        if shared:
            for name in ("files", "processes"):
                if name in active:
                    active[name].append("seccomp")
    except OSError as error:
        absent["seccomp"] = str(error)
        if shared:
            active.pop("files", None)
            active.pop("processes", None)


def _new_root(request: dict[str, Any], outside: str, owner: int) -> None:
    """Builds a private root: read-only binds of the needed host paths, a working folder, nothing else of the host."""
    kernel.unshare(kernel.CLONE_NEWNS)  # the launcher keeps its root, to measure the folder
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = request["root"]
    keep = os.open(outside, os.O_PATH)  # the new root may hide it
    kernel.mount("sandbox", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path in [*SYSTEM_PATHS, *request["read"], *DEVICES]:
        _bind(path, root)
    work = root + WORK_FOLDER
    os.mkdir(work, 0o700)
    if request["folder"] is None:
        size = f"size={request['limits']['disk']},nr_inodes={request['limits']['inodes']},mode=700"
        kernel.mount("work", work, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
    else:
        kernel.mount(f"/proc/self/fd/{keep}", work, None, kernel.MS_BIND)
    os.close(keep)
    if owner != os.geteuid():
        os.chown(work, owner, owner)
    if request["sockets"]:
        _furnish(root)
    kernel.pivot(root)
    kernel.read_only("/")


def _furnish(root: str) -> None:
    """Adds what whole programs with a network, agents, expect: `/tmp`, and the name `localhost`."""
    if not os.path.lexists(root + "/tmp"):
        os.symlink(WORK_FOLDER, root + "/tmp")
    os.makedirs(root + "/etc", mode=0o755, exist_ok=True)
    for name, text in (("hosts", "127.0.0.1 localhost\n"), ("nsswitch.conf", "hosts: files\n")):
        with open(os.open(f"{root}/etc/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), "w") as file:
            file.write(text)


def _bind(path: str, root: str) -> None:
    if not os.path.lexists(path):
        return
    target = root + path
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.lexists(target):
        return  # inside an earlier bind
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target, 0o755)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(path, target, None, kernel.MS_BIND | kernel.MS_REC)
    if path not in DEVICES:
        kernel.read_only(target)


def _change_owner(folder: str, owner: int) -> None:
    if os.stat(folder).st_uid == owner:
        return
    for path in tree.folders(folder):
        for name in os.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                os.lchown(os.path.join(path, name), owner, owner)
    os.chown(folder, owner, owner)
