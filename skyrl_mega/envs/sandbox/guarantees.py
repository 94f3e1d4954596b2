"""Confinements of the sandbox: guarantees, mechanisms and requirements."""

from __future__ import annotations

import json
from collections.abc import Iterable

CONFINEMENTS = {
    "files": "reads and writes its own folder, reads the system's programs (mount namespace, or Landlock; with seccomp "
    "where it has no user of its own)",
    "network": "opens no socket (network namespace or seccomp); with an endpoint, reaches nothing else (network "
    "namespace)",
    "processes": "neither sees, signals nor slows other processes (PID namespace, a user of its own, or Landlock 6 "
    "with seccomp)",
    "limits": "CPU, memory, processes, file size, open files (setrlimit)",
}
"""Confinement → guarantee and possible mechanisms. Untrusted code needs all that no setting waives."""

NEEDS = {
    "files": "Linux 5.13 with Landlock, or user namespaces (sysctl kernel.unprivileged_userns_clone=1, or a container "
    "with --cap-add SYS_ADMIN)",
    "network": "user namespaces, or a kernel with seccomp on x86-64 or arm64",
    "processes": "user namespaces, or run as root, or Linux 6.12 with Landlock and seccomp",
    "limits": "Linux",
}
"""Confinement → requirements of the machine."""


def missing_text(missing: Iterable[str], key: str) -> str:
    """Returns the error text for confinements that this machine lacks.

    Args:
        missing: Names of the confinements.
        key: Setting of the sandbox.
    """
    names = list(missing)
    needs = "; or ".join(dict.fromkeys(NEEDS[name] for name in names))
    return (
        f"{key}: this machine cannot confine untrusted code in {', '.join(names)}; needed: {needs}; "
        f"to run without: {key}.without={json.dumps(names)}"
    )
