"""Actor for checking a node, with a time limit on every call."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.preflight import fabric, gpus, model, network, paths, versions


@dataclass(frozen=True)
class ProbeSettings:
    """Parameters of a preflight, equal on all nodes."""

    run: Path
    """The run's folder."""
    model: Path | None
    """The model's folder; None if the run builds the model."""
    token: str
    """Identifier in the names of this preflight's files."""
    device: str
    """`cpu` or `cuda`."""
    timeout_s: float
    """Time limit of a single call of a probe."""


class Probe:
    """Ray actor for checking a node. An instance runs on every node during a preflight.

    Args:
        settings: Parameters of the preflight.
        name: Name of the node in the report.
        address: Address of the node.
    """

    def __init__(self, settings: ProbeSettings, name: str, address: str) -> None:
        self.settings, self.name, self.address = settings, name, address
        self._listener: network.Listener | None = None
        self._exchange_socket: socket.socket | None = None

    def gather(self) -> dict[str, Any]:
        """Returns kind → the node's facts: versions, paths and, if they apply, model, gpus and fabric. Also writes this
        node's file into the run's folder (`paths.gather`).

        The value of a failed kind is the exception, and after `timeout_s` of the settings a TimeoutError: a dead mount
        does not hide the other facts.
        """
        settings = self.settings
        jobs: dict[str, Callable[[], Any]] = {
            "versions": versions.gather,
            "paths": lambda: paths.gather(settings.run, settings.token, self.name),
        }
        if (path := settings.model) is not None:
            jobs["model"] = lambda: model.gather(path)
        if settings.device == "cuda":
            jobs |= {"gpus": gpus.gather, "fabric": fabric.gather}
        return bounded(jobs, settings.timeout_s)

    def unseen(self, names: Sequence[str]) -> list[str]:
        """Returns the nodes among `names` whose file in the run's folder is not visible on this node after 5 seconds;
        [] if all are visible."""
        return paths.unseen(self.settings.run, self.settings.token, names)

    def start_listener(self) -> network.NodeAddress:
        """Starts a listener on a free port of this node and returns its address, port and answer. Raises OSError if the
        address is not of this node."""
        self._listener = network.Listener(self.address)
        return self._listener.endpoint

    def connect(self, endpoints: Mapping[str, network.NodeAddress]) -> dict[str, str]:
        """Returns node → reason, for the nodes whose listener this node does not reach; {} if it reaches all.

        Args:
            endpoints: Node → its listener.
        """
        return network.connect(endpoints)

    def open_exchange(self) -> int:
        """Opens a listening socket for the next exchange led by this node and returns the port. Raises OSError if the
        address is not of this node."""
        self._exchange_socket = network.exchange_socket(self.address)
        return int(self._exchange_socket.getsockname()[1])

    def exchange(self, is_leader: bool, leader: tuple[str, int], mib: int, timeout_s: float) -> float:
        """Returns the rate between this node and its partner, in 10⁹ bytes per second in each direction.

        Args:
            is_leader: True on the node of the pair whose `open_exchange` was called, before each exchange.
            leader: Address of that node, and the port returned by its `open_exchange`; the same on both nodes.
            mib: Size of a message in MiB.
            timeout_s: Time limit in seconds.

        Raises:
            TimeoutError: The exchange took longer than `timeout_s`.
            RuntimeError: The exchange failed.
        """
        leader_socket = self._exchange_socket if is_leader else None
        return network.exchange(leader, self.address, self.settings.device, mib, timeout_s, leader_socket)


def bounded(jobs: Mapping[str, Callable[[], Any]], timeout_s: float) -> dict[str, Any]:
    """Runs all jobs at the same time in threads; returns name → result, or the job's exception, which is not raised.

    After `timeout_s` the value of an unfinished job is a TimeoutError; the job's thread is abandoned.
    """
    answers: dict[str, Any] = {}

    def run(name: str, job: Callable[[], Any]) -> None:
        try:
            answers[name] = job()
        except Exception as error:
            answers[name] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in jobs.items()]
    for thread in threads:
        thread.start()
    until = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = TimeoutError(f"no answer within {timeout_s:g} s")
    return {name: answers.get(name, late) for name in jobs}
