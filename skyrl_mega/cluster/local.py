"""Ray: a private cluster on this machine, or the one that RAY_ADDRESS names."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from skyrl_mega.cluster.errors import ClusterError

PREFIX = "skyrl-"
OBJECT_STORE_BYTES = 256 * 2**20
"""Of a local cluster on CPU: tokens and metrics pass through it, never weights."""


@contextlib.contextmanager
def session(*, actors: int, gpus: int = 0, log_level: int = logging.ERROR) -> Iterator[None]:
    """Connects to Ray for the length of a `with` block.

    With RAY_ADDRESS in the environment that cluster is joined. Otherwise a private one starts on the loopback
    interface, without dashboard, in a temporary folder of its own (its path is short: unix sockets allow 107 bytes),
    and ends with the block. It dies with this process, whatever ends it.

    Args:
        actors: How many actors the private cluster must hold. They share the cores, so it is no claim on hardware.
        gpus: GPUs of the private cluster.
        log_level: Of Ray's own messages on this terminal.

    Raises:
        ClusterError: Ray did not start or could not be reached.
    """
    for key, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        # Ray would start bare workers ahead of time. Ours come with an environment of their own, so those would stay
        # idle.
        "RAY_prestart_worker_first_driver": "0",
    }.items():
        os.environ.setdefault(key, value)
    import ray

    common = {"logging_level": log_level, "log_to_driver": False, "namespace": f"skyrl-mega-{os.getpid()}"}
    if ray.is_initialized():
        raise ClusterError("this process is connected to Ray already")
    folder: Path | None = None
    try:
        if address := os.environ.get("RAY_ADDRESS"):
            try:
                ray.init(address=address, **common)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ClusterError(
                    f"RAY_ADDRESS={address}: no Ray cluster answers there: {_first_line(error)}"
                ) from error
        else:
            _sweep()
            folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=_short_tmp()))
            try:
                ray.init(
                    address="local",
                    num_cpus=actors,
                    num_gpus=gpus,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES if gpus == 0 else None,
                    _temp_dir=str(folder),
                    _node_ip_address="127.0.0.1",
                    **common,
                )
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                raise ClusterError(f"Ray did not start on this machine: {_first_line(error)}") from error
            if ray.util.get_node_ip_address() != "127.0.0.1":
                raise ClusterError("Ray would listen beyond this machine: import skyrl_mega.cluster before ray")
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # Ray's last processes may still write a log line


def _short_tmp() -> str:
    tmp = tempfile.gettempdir()
    return tmp if len(tmp) <= 40 else "/tmp"


def _sweep() -> None:
    """Removes the folders of earlier private clusters whose driver was killed."""
    for folder in Path(_short_tmp()).glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
