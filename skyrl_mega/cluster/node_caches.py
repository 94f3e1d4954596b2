"""Folders of compiled code on a node's own disk, for jobs whose home folder lies on a shared file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

FOLDER_VARIABLE = "SKYRL_MEGA_CACHE"
"""Environment variable with the parent folder of all caches."""
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "nvidia",
}
"""Variables of libraries that write compiled code, and the subfolder of each."""


def cache_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that move the caches of compiled code to a folder on this node
    (`SKYRL_MEGA_CACHE`, else below /tmp), and creates the folder. Sets no variable.

    The names are the keys of `CACHES`. The folder outlasts the job, because the next job on the node needs the same
    code. Variables already set are left out; if all are set, returns {} and creates nothing. Standard library only.

    Args:
        env: The process's environment.

    Raises:
        OSError: The folder cannot be created, belongs to another user, or is open to other users. Code in it would run
            as this user.
    """
    variables = {name: part for name, part in CACHES.items() if name not in env}
    if not variables:
        return {}
    folder = Path(env.get(FOLDER_VARIABLE) or f"/tmp/skyrl-cache-{os.getuid()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: must be a folder of this user that others cannot write to")
    return {name: str(folder / part) for name, part in variables.items()}
