"""Ray: a private cluster on this machine, or the one that RAY_ADDRESS names."""

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
from skyrl_mega.cluster.actor_process import CACHE, compiled, start_guard
from skyrl_mega.cluster.errors import ActorFailed, ClusterError, NodeLost, NodesMissing
from skyrl_mega.cluster.leftovers import temporary_folder
from skyrl_mega.cluster.nodes import Gone, Node, gone_since, looked
from skyrl_mega.config.errors import UserError

PREFIX = "skyrl-ray-"
LONGEST_TMP = 20
"""Characters of a folder that Ray's can be put into: a socket's path below has 86 more, and 107 are allowed."""
OBJECT_STORE_BYTES = 256 * 2**20
"""Of a local cluster on CPU: tokens and metrics pass through it, never weights."""
NOTICE_S = 75.0
"""How long Ray may take to notice that a node has died: it gives it up when five checks in a row, three seconds apart,
have had no answer for ten seconds each."""
TRY_S = 20.0
"""A start of Ray that failed after that time has failed at one of Ray's own limits, 30 s, which no setting moves: a
slow machine is given another try."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray would start bare workers ahead of time. Ours come with an environment of their own, so those would stay idle.
    "RAY_prestart_worker_first_driver": "0",
    # The thread that collects Ray's metrics of a worker has been seen to crash it (Ray 2.60, in OpenTelemetry's
    # buildMetrics). The first of these alone would have OpenCensus collect them.
    "RAY_enable_open_telemetry": "0",
    "RAY_enable_metrics_collection": "0",
}
"""Settings of Ray for its drivers and for every node that we start."""


def _to_stderr(text: str) -> None:
    """Standard output may be for a program."""
    print(text, file=sys.stderr)


@contextlib.contextmanager
def session(
    *,
    actors: int,
    gpus: int = 0,
    nodes: int = 1,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = _to_stderr,
    log_level: int = logging.ERROR,
) -> Iterator[None]:
    """Connects to Ray for the length of a `with` block.

    With RAY_ADDRESS in the environment that cluster is joined, with its token where it wants one (RAY_AUTH_MODE=token
    and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH). Otherwise a private one starts on the loopback interface, without
    dashboard, in a temporary folder of its own that no other user may enter, and ends with the block. It dies with this
    process, whatever ends it.

    Args:
        actors: How many actors the private cluster must hold. They share the cores, so it is no claim on hardware.
        gpus: GPUs of the private cluster.
        nodes: A cluster that is joined is waited for until it has so many, with GPUs where there are any to be; and
            where there are actors, until all that it lists answer, for `NOTICE_S` after one fell silent at most.
        timeout_s: Seconds until it does; for the private cluster, after which no further try to start it is begun.
        say: Tells a person who is waited for.
        log_level: Of Ray's own messages on this terminal.

    Raises:
        UserError: No response from RAY_ADDRESS, or the cluster wants another token.
        ClusterError: Ray did not start or did not let us in.
        NodesMissing: Nodes did not come.
        NodeLost: In the place of a fault inside the block, where a node of the cluster that was joined is gone.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _answering(address)
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    import ray

    common = {"logging_level": log_level, "log_to_driver": False, "namespace": f"skyrl-mega-{os.getpid()}"}
    if ray.is_initialized():
        raise ClusterError("this process is connected to Ray already")
    with contextlib.ExitStack() as stack:
        if address:
            stack.callback(ray.shutdown)
            _join(address, common)
            notice_s = NOTICE_S if actors else 0.0
            before = _wait_for_nodes(nodes, timeout_s, say, gpus=bool(gpus), notice_s=notice_s)
            stack.enter_context(_of_a_node(before))
        else:
            folder = stack.enter_context(_guarded_folder())
            stack.callback(ray.shutdown)
            _start(folder, common, actors=actors, gpus=gpus, timeout_s=timeout_s, say=say)
        yield


def _join(address: str, common: Mapping[str, Any]) -> None:
    """Connects to the cluster at `address`; `common` is what `ray.init` is told of either cluster."""
    import ray

    try:
        with _own_signals():
            ray.init(address=address, **common)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        # Somebody listens there. Ray says no more than this of a token that is refused.
        raise UserError(
            f"RAY_ADDRESS={address}: whoever answers there does not let us in ({_first_line(error)}); is it a "
            "Ray cluster? Give its token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise ClusterError(f"RAY_ADDRESS={address}: {_first_line(error)}") from error


def _start(
    folder: Path,
    common: Mapping[str, Any],
    *,
    actors: int,
    gpus: int,
    timeout_s: float,
    say: Callable[[str], None] = _to_stderr,
) -> None:
    """Starts a private cluster in `folder` and connects to it.

    Raises:
        ClusterError: It did not start, and Ray said why at once; or not within `timeout_s`.
    """
    import ray

    begun = time.monotonic()
    while True:
        tried = time.monotonic()
        try:
            with _own_signals(), _temporary_files_in(folder):
                ray.init(
                    address="local",
                    num_cpus=actors,
                    num_gpus=gpus,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES if gpus == 0 else None,
                    _temp_dir=str(folder / "r"),  # Ray opens it to everybody
                    _node_ip_address="127.0.0.1",
                    **common,
                )
            break
        except Exception as error:  # Ray raises it by this very name where its node is late
            why, now = _first_line(error), time.monotonic()
            if now - tried < TRY_S:
                raise ClusterError(f"Ray did not start on this machine: {why}") from error
            if now - begun > timeout_s:
                raise ClusterError(
                    f"Ray did not start on this machine within cluster.start_timeout_s = {timeout_s:g}: {why}"
                ) from error
            say(f"Ray did not start ({why}); trying again")
            reaper.end_cluster(str(folder / "r"), os.getpid())
    if ray.util.get_node_ip_address() != "127.0.0.1":
        raise ClusterError("Ray would listen beyond this machine: import skyrl_mega.cluster before ray")


def gpus_joined(nodes: int, timeout_s: float) -> float:
    """GPUs of the cluster that RAY_ADDRESS names. Raises, and waits for its nodes, as `session` does."""
    with session(actors=0, nodes=nodes, timeout_s=timeout_s):
        import ray

        return float(ray.cluster_resources().get("GPU", 0))


@contextlib.contextmanager
def _guarded_folder() -> Iterator[Path]:
    """A private cluster's folder; at the end of the block, or of this process, whatever lives in it is ended."""
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
    """Processes that are started inside the block, and theirs, have their temporary files in the folder."""
    kept = {name: os.environ.get(name) for name in ("TMPDIR", CACHE)}
    os.environ.setdefault(CACHE, compiled())
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
def _own_signals() -> Iterator[None]:
    """Ray puts its handlers over the program's: its own exit code, and a stack dump. Then the program's are back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _answering(address: str) -> None:
    """Refuses a host:port at which nobody listens; Ray would abort this process there, without an exception."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `auto`, or a form of Ray's that it checks itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"RAY_ADDRESS={address}: no response ({error.strerror or error}); "
            "give the host:port of a running Ray cluster, or unset it to run on this machine"
        ) from error


def _wait_for_nodes(
    count: int, timeout_s: float, say: Callable[[str], None], *, gpus: bool, notice_s: float = 0.0
) -> Gone:
    """Returns when so many nodes that can hold actors are there and answer; with those that are not there.

    Args:
        count: Nodes.
        timeout_s: Until they are there.
        say: Tells a person who is waited for.
        gpus: Those with GPUs count.
        notice_s: A node that has died is listed until Ray has noticed, and whatever is placed on it fails; so one that
            is silent is waited for so long. One that Ray still keeps then is Ray's to judge.

    Raises:
        NodesMissing: They did not come in time.
        ClusterError: Ray does not say which are there.
    """
    told, begun, silent_since = None, time.monotonic(), dict[str, float]()
    kind = "nodes with GPUs" if gpus else "nodes"
    while True:
        seen, now = looked(), time.monotonic()
        if seen is None:
            if now - begun > timeout_s:
                raise ClusterError(f"the Ray cluster does not say within {timeout_s:g} s which nodes it has")
            time.sleep(0.5)
            continue
        nodes, gone = seen
        silent_since = {node.id: silent_since.get(node.id, now) for node in gone.silent}
        there = [node for node in nodes if node.gpus or not gpus]
        without = [node for node in nodes if gpus and not node.gpus]
        present = f"{len(there)} of {count} {kind} of the Ray cluster are there"
        named = (("", there), ("without GPUs: ", without), ("listed, but without an answer: ", gone.silent))
        if parts := [f"{words}{_addresses(of)}" for words, of in named if of]:
            present += f": {'; '.join(parts)}"
        late, noticed = now - begun > timeout_s, all(now - since > notice_s for since in silent_since.values())
        if len(there) >= count and (late or noticed):
            if gone.silent:
                say(f"{present}; Ray keeps what is silent, and the run goes on")
            return gone
        if late:
            raise NodesMissing(f"{present}; the others did not come within {timeout_s:g} s")
        if present != told:
            told = present
            say(f"{present}; waiting for {'the others' if len(there) < count else 'Ray to notice'}")
        time.sleep(0.5)


def _addresses(nodes: Sequence[Node]) -> str:
    return ", ".join(node.address for node in nodes)


@contextlib.contextmanager
def _of_a_node(before: Gone) -> Iterator[None]:
    """A fault inside the block is a node's where one is gone that was there before: what was seen of it is told first,
    as it may be another's."""
    try:
        yield
    except (ActorFailed, ClusterError) as error:
        if (gone := gone_since(before)) is not None and (text := gone.text()):
            raise NodeLost(f"{error}; of the Ray cluster's nodes: {text}") from error
        raise


def _short_tmp() -> Path:
    tmp = tempfile.gettempdir()
    return Path(tmp if len(tmp) <= LONGEST_TMP else "/tmp")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
