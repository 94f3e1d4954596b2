"""Memory of all programs that run at once for one environment: by a cgroup where one can be made, else by adding up.

A cgroup (v2) is tried below this process's own and beside it, where memory is already handed on to children; no group
that exists is changed. Elsewhere every jail says what its processes have in memory (`watch.py`), and when the sum
is too large the largest command is ended.
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
OWN = Path("/proc/self/cgroup")


class Budget:
    """What the commands of one environment may have together.

    Args:
        total_mib: MiB.
        root: Where cgroups are mounted.
        own: The file that says which is this process's.
    """

    def __init__(self, total_mib: float, root: Path = ROOT, own: Path = OWN) -> None:
        self.total = int(total_mib * MIB)
        self.group = _group(self.total, root, own)
        """The cgroup's folder; None where there is none, and `note` does it."""
        self.ended = 0
        """Commands that were ended for it."""
        self._used: dict[object, int] = {}
        self._lock = threading.Lock()

    def note(self, who: object, used: int) -> bool:
        """Hears how much memory a command has now; True where it must end, as the largest of too many."""
        with self._lock:
            self._used[who] = used
            return sum(self._used.values()) > self.total and used == max(self._used.values())

    def forget(self, who: object) -> None:
        """Hears that a command has ended."""
        with self._lock:
            self._used.pop(who, None)

    def count(self) -> None:
        """Hears that a command was ended as one of too many."""
        with self._lock:
            self.ended += 1

    def killed(self) -> int:
        """Processes that the kernel has ended in the cgroup, as their sum was too large; 0 without one."""
        if self.group is None:
            return 0
        with contextlib.suppress(OSError):
            for line in (self.group / "memory.events").read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def close(self) -> None:
        """Removes the cgroup."""
        if self.group is not None:
            with contextlib.suppress(OSError):  # somebody is still in it: the next start removes it
                self.group.rmdir()


def of(name: str, total_mib: float) -> Budget:
    """The one of this process for an environment; every sandbox of that name shares it, and `divide` says with how many
    processes."""
    with _making:
        key = (os.getpid(), name, total_mib)
        if key not in _budgets:
            _budgets[key] = Budget(total_mib / _among)
            atexit.register(_budgets[key].close)
        return _budgets[key]


def divide(among: int) -> None:
    """Before the first sandbox: so many processes of this node have them, and share what an environment may have."""
    global _among
    _among = among


def hear(programs: int) -> None:
    """So many commands were ended for a budget in another process of the run."""
    global _elsewhere
    with _making:
        _elsewhere = (_elsewhere or 0) + programs


def ended() -> int | None:
    """Commands of this process's sandboxes, and of those of which it has heard, that were ended for a budget so far;
    None where nothing ran in one."""
    with _making:
        own = [budget.ended for (pid, *_), budget in _budgets.items() if pid == os.getpid()]
        return sum(own) + (_elsewhere or 0) if own or _elsewhere is not None else None


def told(count: float) -> str:
    """What to say of commands that were ended for a budget."""
    return (
        f"sandboxed programs ended for memory: {count:.0f}; all that ran at once had more than total_mib, and the "
        "largest end first, honest ones too; raise total_mib of the environment's sandbox, or lower its memory_mib"
    )


_budgets: dict[tuple[int, str, float], Budget] = {}
_making = threading.Lock()
_among = 1
"""Processes of this node that share what an environment may have."""
_elsewhere: int | None = None
"""Commands of other processes that were ended for it; None where there are no such processes."""


def _group(total: int, root: Path, own: Path) -> Path | None:
    for parent in _parents(root, own):
        group = parent / f"{folders.PREFIX}{folders.owner()}-{secrets.token_hex(4)}"
        try:
            for left in parent.glob(f"{folders.PREFIX}*"):
                if not folders.alive(left.name):
                    left.rmdir()
            group.mkdir()
        except OSError:  # not ours to make, or somebody lives on in what is left
            continue
        try:
            (group / "memory.max").write_text(str(total))
            with contextlib.suppress(FileNotFoundError):  # a kernel that counts no swap
                (group / "memory.swap.max").write_text("0")
            with open(group / "cgroup.procs", "a"):
                return group
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
    return None


def _parents(root: Path, own: Path) -> list[Path]:
    """Groups whose children have memory of their own: this process's, and the one that this is in."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    mine = root / path.strip("/")
    found = []
    for group in [mine] if mine == root else [mine, mine.parent]:
        with contextlib.suppress(OSError):
            if "memory" in (group / "cgroup.subtree_control").read_text().split():
                found.append(group)
    return found
