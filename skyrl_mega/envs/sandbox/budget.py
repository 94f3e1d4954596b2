"""Shared memory limit of all programs that run at once for an environment: a cgroup if possible, else a sum of reports.

A cgroup (v2) is tried as a child and as a sibling of this process's own group, if memory control is already delegated
to children; no existing group is changed. Otherwise every jail reports the memory of its processes (`watch.py`), and
the largest command is ended when the sum is too large.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
from pathlib import Path

from skyrl_mega.envs.sandbox import folders

MIB = 2**20
ROOT = Path("/sys/fs/cgroup")
"""Mount point of cgroups."""
CGROUP_FILE = Path("/proc/self/cgroup")
"""File naming this process's cgroup."""


class Budget:
    """Shared memory limit of an environment's commands.

    Args:
        total_mib: Limit in MiB.
        root: Mount point of cgroups.
        cgroup_file: File naming this process's cgroup.
    """

    def __init__(self, total_mib: float, root: Path = ROOT, cgroup_file: Path = CGROUP_FILE) -> None:
        self.total = int(total_mib * MIB)
        self.group = _group(self.total, root, cgroup_file)
        """Folder of the cgroup; None without a cgroup, and then `note` enforces the limit."""
        self.ended = 0
        """Number of commands ended for exceeding the limit."""
        self._used: dict[object, int] = {}
        self._lock = threading.Lock()

    def note(self, command: object, used: int) -> bool:
        """Records a command's current memory.

        Args:
            command: Identifies the command.
            used: Memory in bytes.

        Returns:
            True if the sum over all commands exceeds the limit, and this command uses the most.
        """
        with self._lock:
            self._used[command] = used
            return sum(self._used.values()) > self.total and used == max(self._used.values())

    def forget(self, command: object) -> None:
        """Removes an ended command from the sum."""
        with self._lock:
            self._used.pop(command, None)

    def count(self) -> None:
        """Adds 1 to `ended`, the number of commands ended for exceeding the limit."""
        with self._lock:
            self.ended += 1

    def killed(self) -> int:
        """Returns the number of processes killed by the kernel for exceeding the cgroup's limit, since the creation of
        this budget; 0 without a cgroup."""
        if self.group is None:
            return 0
        with contextlib.suppress(OSError):
            for line in (self.group / "memory.events").read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def close(self) -> None:
        """Removes the cgroup, unless still in use; raises nothing."""
        if self.group is not None:
            with contextlib.suppress(OSError):  # still in use: the next start removes the group
                self.group.rmdir()


def shared(name: str, total_mib: float) -> Budget:
    """Returns this process's `Budget` for an environment, shared by all sandboxes of the same name and limit. The first
    call creates the budget, with a cgroup if possible, and removes the cgroup at the exit of this process.

    Args:
        name: Name of the environment.
        total_mib: Limit in MiB over all processes; `divide` sets the number of processes.
    """
    with _making:
        key = (os.getpid(), name, total_mib)
        if key not in _budgets:
            _budgets[key] = Budget(total_mib / _process_count)
            atexit.register(_budgets[key].close)
        return _budgets[key]


def divide(among: int) -> None:
    """Sets the number of processes on this node that share each environment's limit to `among`; call before any sandbox
    exists."""
    global _process_count
    _process_count = among


def add_ended(programs: int) -> None:
    """Adds `programs` to the result of `ended`: the number of commands that another process of the run has ended for
    exceeding the memory limit `total_mib`. After a call, even with 0, `ended` never returns None."""
    global _ended_in_other_processes
    with _making:
        _ended_in_other_processes = (_ended_in_other_processes or 0) + programs


def ended() -> int | None:
    """Returns the number of commands ended for exceeding the memory limit `total_mib`.

    Counts the commands of this process, and of other processes as reported to `add_ended`. Returns None if this process
    has not run a command in a sandbox and `add_ended` has not been called.
    """
    with _making:
        counts = [budget.ended for (pid, *_), budget in _budgets.items() if pid == os.getpid()]
        return (
            sum(counts) + (_ended_in_other_processes or 0) if counts or _ended_in_other_processes is not None else None
        )


def memory_warning(count: float) -> str:
    """Returns a warning that sandboxed commands were ended because all together exceeded the memory limit `total_mib`.

    Args:
        count: Number of ended commands.
    """
    return (
        f"sandboxed programs ended for memory: {count:.0f}, because all programs running at once used more than "
        "total_mib together (the largest is ended first, even an honest one); raise total_mib of the environment's "
        "sandbox, or lower its memory_mib"
    )


_budgets: dict[tuple[int, str, float], Budget] = {}
_making = threading.Lock()
_process_count = 1
"""Number of processes on this node that share each environment's limit."""
_ended_in_other_processes: int | None = None
"""Number of commands ended for exceeding a budget in other processes; None without other processes."""


def _group(total: int, root: Path, cgroup_file: Path) -> Path | None:
    for parent in _parents(root, cgroup_file):
        group = parent / f"{folders.PREFIX}{folders.owner()}-{secrets.token_hex(4)}"
        try:
            for leftover in parent.glob(f"{folders.PREFIX}*"):
                if not folders.alive(leftover.name):
                    leftover.rmdir()
            group.mkdir()
        except OSError:  # no permission, or a leftover group is still in use
            continue
        try:
            (group / "memory.max").write_text(str(total))
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap accounting
                (group / "memory.swap.max").write_text("0")
            with open(group / "cgroup.procs", "a"):
                return group
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
    return None


def _parents(root: Path, cgroup_file: Path) -> list[Path]:
    """Returns the groups that delegate memory control to children: this process's group, and its parent."""
    try:
        lines = cgroup_file.read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    own_group = root / path.strip("/")
    delegating = []
    for group in [own_group] if own_group == root else [own_group, own_group.parent]:
        with contextlib.suppress(OSError):
            if "memory" in (group / "cgroup.subtree_control").read_text().split():
                delegating.append(group)
    return delegating
