"""Ray sessions: a private cluster on this machine, or the cluster named by RAY_ADDRESS."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_mega.cluster import reaper
from skyrl_mega.cluster.actor_process import CACHE, compile_cache, start_guard
from skyrl_mega.cluster.errors import ActorFailed, ClusterError, NodeLost, NodesMissing
from skyrl_mega.cluster.nodes import Node, UnavailableNodes, lost_since, missing_kind, try_probe
from skyrl_mega.cluster.temporary_files import temporary_folder
from skyrl_mega.common.errors import UserError

PREFIX = "skyrl-ray-"
LONGEST_TMP = 20
"""Longest usable temporary folder in characters: Ray's socket paths below add 86, and 107 are allowed."""
OBJECT_STORE_BYTES = 256 * 2**20
"""Object store of a local CPU cluster, for tokens and metrics but never weights."""
NOTICE_S = 75.0
"""Seconds until Ray notices a node's death: five checks, three seconds apart, each with a time limit of ten seconds."""
TRY_S = 20.0
"""Seconds after which a failed start of Ray is retried: the cause is then a fixed 30 s limit of Ray on a slow
machine."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray would prestart plain workers, which stay idle because our actors use a different environment.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's metrics thread can crash its worker (Ray 2.60, in OpenTelemetry's buildMetrics). The first variable alone
    # would make OpenCensus collect the metrics.
    "RAY_enable_open_telemetry": "0",
    "RAY_enable_metrics_collection": "0",
}
"""Environment variables for Ray, for drivers and for every node started by us."""


def _to_stderr(text: str) -> None:
    """Prints to stderr, because a program may read standard output."""
    print(text, file=sys.stderr)


@contextlib.contextmanager
def session(
    *,
    actors: int,
    gpus: int = 0,
    nodes: int = 1,
    pool: tuple[str, str, int] | None = None,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = _to_stderr,
    log_level: int = logging.ERROR,
) -> Iterator[None]:
    """Connects to Ray for the duration of a `with` block. Ray's variables in `ENVIRONMENT` stay set in this process.

    With RAY_ADDRESS in the environment this joins the cluster there, with a token if required (RAY_AUTH_MODE=token and
    RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH). Otherwise a private cluster starts on the loopback interface, without
    dashboard, in a temporary folder closed to other users. The private cluster ends with the block, or with this
    process, whatever the cause of death.

    Args:
        actors: Number of actors for the private cluster. All share the cores, so this claims no hardware.
        gpus: GPUs of the private cluster.
        nodes: Number of nodes of a joined cluster to wait for; only nodes with GPUs count if `gpus` is set. With
            `actors`, also waits until every listed node answers, at most `NOTICE_S` after a node became silent.
        pool: Key and value of a label and the number of nodes, among `nodes`, that must have it; None if all nodes are
            of one kind.
        timeout_s: Time limit of this wait in seconds; for the private cluster, time limit for another attempt to start.
        say: Prints the nodes still missing, and further attempts to start.
        log_level: Level of Ray's own messages on this terminal.

    Raises:
        UserError: No response from RAY_ADDRESS, or the cluster requires another token.
        ClusterError: Ray did not start, refused the connection or does not list its nodes, or this process is connected
            already.
        NodesMissing: Nodes did not join within `timeout_s`.
        NodeLost: Replaces an `ActorFailed` or a `ClusterError` inside the block if a node of the joined cluster is
            gone.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _check_address(address)
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    import ray

    common = {"logging_level": log_level, "log_to_driver": False, "namespace": f"skyrl-mega-{os.getpid()}"}
    if ray.is_initialized():
        raise ClusterError("this process is connected to Ray already; call ray.shutdown() before")
    with contextlib.ExitStack() as stack:
        if address:
            stack.callback(ray.shutdown)
            _join(address, common)
            notice_s = NOTICE_S if actors else 0.0
            before = _wait_for_nodes(nodes, timeout_s, say, gpus=bool(gpus), pool=pool, notice_s=notice_s)
            stack.enter_context(_naming_lost_nodes(before))
        else:
            folder = stack.enter_context(_guarded_folder())
            stack.callback(ray.shutdown)
            _start(folder, common, actors=actors, gpus=gpus, timeout_s=timeout_s, say=say)
        yield


def _join(address: str, common: Mapping[str, Any]) -> None:
    """Connects to the cluster at `address`; `common` holds the arguments of `ray.init` for both kinds of cluster."""
    import ray

    try:
        with _keeping_signal_handlers():
            ray.init(address=address, **common)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        # A server responds, but Ray gives no more detail about a rejected token.
        raise UserError(
            f"the server there refuses the connection ({_first_line(error)}); if it is a Ray "
            "cluster with a token, give the token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH",
            key="RAY_ADDRESS",
            value=address,
        ) from error
    except (RuntimeError, ValueError) as error:
        raise ClusterError(f"cannot join the Ray cluster at RAY_ADDRESS={address}: {_first_line(error)}") from error


def _start(
    folder: Path,
    common: Mapping[str, Any],
    *,
    actors: int,
    gpus: int,
    timeout_s: float,
    say: Callable[[str], None] = _to_stderr,
) -> None:
    """Starts a private cluster in `folder` and connects.

    Raises:
        ClusterError: Ray failed at once with a reason, or did not start within `timeout_s`.
    """
    import ray

    started = time.monotonic()
    while True:
        tried = time.monotonic()
        try:
            with _keeping_signal_handlers(), _temporary_files_in(folder):
                ray.init(
                    address="local",
                    num_cpus=actors,
                    num_gpus=gpus,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES if gpus == 0 else None,
                    _temp_dir=str(folder / "r"),  # Ray opens this folder to all users
                    _node_ip_address="127.0.0.1",
                    **common,
                )
            break
        except Exception as error:  # Ray raises a bare Exception if its node is late
            why, now = _first_line(error), time.monotonic()
            if now - tried < TRY_S:
                raise ClusterError(f"Ray did not start on this machine: {why}") from error
            if now - started > timeout_s:
                raise ClusterError(
                    f"Ray did not start on this machine within cluster.start_timeout_s = {timeout_s:g}: {why}"
                ) from error
            say(f"Ray did not start ({why}); trying again")
            reaper.end_cluster(str(folder / "r"), os.getpid())
    if ray.util.get_node_ip_address() != "127.0.0.1":
        raise ClusterError("Ray would accept connections from other machines; import skyrl_mega.cluster before ray")


def gpus_joined(nodes: int, timeout_s: float) -> float:
    """Connects to the cluster at RAY_ADDRESS, waits for its nodes, and returns the cluster's number of GPUs, in use or
    free. Disconnects again. Call only with RAY_ADDRESS set: otherwise a private cluster starts, and the result is 0.

    Args:
        nodes: Number of nodes to wait for.
        timeout_s: Time limit of this wait in seconds.

    Raises:
        UserError: No response from RAY_ADDRESS, or the cluster requires another token.
        ClusterError: Ray refused the connection or does not list its nodes, or this process is connected already.
        NodesMissing: Nodes did not join within `timeout_s`.
    """
    with session(actors=0, nodes=nodes, timeout_s=timeout_s):
        import ray

        return float(ray.cluster_resources().get("GPU", 0))


@contextlib.contextmanager
def _guarded_folder() -> Iterator[Path]:
    """Yields the folder of a private cluster. All processes in the folder end with the block, or when this process
    dies."""
    with temporary_folder(_short_tmp(), PREFIX) as folder:
        guard = start_guard("cluster", str(folder))
        try:
            yield folder
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait()


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Sets the folder for temporary files of processes started inside the block, and of all descendants."""
    kept = {name: os.environ.get(name) for name in ("TMPDIR", CACHE)}
    os.environ.setdefault(CACHE, compile_cache())
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _keeping_signal_handlers() -> Iterator[None]:
    """Restores the program's signal handlers after the block: Ray's handlers use another exit code and print a stack
    dump."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _check_address(address: str) -> None:
    """Raises UserError if no process listens at this host:port; Ray would abort this process without an exception."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `auto`, or another form that Ray checks itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"no response ({error.strerror or error})",
            key="RAY_ADDRESS",
            value=address,
            fix="give the host:port of a running Ray cluster, or unset it to run on this machine",
        ) from error


def _wait_for_nodes(
    count: int,
    timeout_s: float,
    say: Callable[[str], None],
    *,
    gpus: bool,
    pool: tuple[str, str, int] | None = None,
    notice_s: float = 0.0,
) -> UnavailableNodes:
    """Waits until `count` nodes for actors respond, with those of `pool`; returns the unavailable nodes.

    Args:
        count: Number of nodes.
        timeout_s: Time limit in seconds.
        say: Prints the nodes still missing.
        gpus: Only nodes with GPUs count.
        pool: As of `session`.
        notice_s: Seconds to wait for a silent node: Ray lists a dead node for a while, and placements there fail. After
            this time the decision is left to Ray.

    Raises:
        NodesMissing: Too few nodes joined in time.
        ClusterError: Ray does not list the nodes.
    """
    last_message, started, silent_since = None, time.monotonic(), dict[str, float]()
    kind = "nodes with GPUs" if gpus else "nodes"
    while True:
        probed, now = try_probe(), time.monotonic()
        if probed is None:
            if now - started > timeout_s:
                raise ClusterError(
                    f"Ray did not list the nodes of its cluster within {timeout_s:g} s; does its head node run?"
                )
            time.sleep(0.5)
            continue
        nodes, missing = probed
        silent_since = {node.id: silent_since.get(node.id, now) for node in missing.silent}
        usable = [node for node in nodes if node.gpus or not gpus]
        without = [node for node in nodes if gpus and not node.gpus]
        present = f"{len(usable)} of {count} {kind} of the Ray cluster have joined"
        named = (("", usable), ("without GPUs: ", without), ("listed, but without an answer: ", missing.silent))
        if parts := [f"{words}{_addresses(group)}" for words, group in named if group]:
            present += f": {'; '.join(parts)}"
        if lacking := missing_kind([node.labels for node in usable], count, pool):
            present += f"; {lacking}"
        enough = len(usable) >= count and not lacking
        late, noticed = now - started > timeout_s, all(now - since > notice_s for since in silent_since.values())
        if enough and (late or noticed):
            if missing.silent:
                say(f"{present}; Ray still lists the silent nodes, and the run starts without waiting for them")
            return missing
        if late:
            raise NodesMissing(f"{present}; the others did not join within {timeout_s:g} s")
        if present != last_message:
            last_message = present
            say(f"{present}; waiting for {'Ray to drop the silent nodes' if enough else 'the others'}")
        time.sleep(0.5)


def _addresses(nodes: Sequence[Node]) -> str:
    return ", ".join(node.address for node in nodes)


@contextlib.contextmanager
def _naming_lost_nodes(before: UnavailableNodes) -> Iterator[None]:
    """Turns an error inside the block into NodeLost if a node is gone since `before`.

    The message starts with the original error, because the lost node may not be the cause.
    """
    try:
        yield
    except (ActorFailed, ClusterError) as error:
        if (lost := lost_since(before)) is not None and (text := lost.text()):
            raise NodeLost(f"{error}; lost nodes of the Ray cluster: {text}") from error
        raise


def _short_tmp() -> Path:
    tmp = tempfile.gettempdir()
    return Path(tmp if len(tmp) <= LONGEST_TMP else "/tmp")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
