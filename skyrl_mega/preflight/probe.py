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
class Ask:
    """Parameters of a preflight, equal on all nodes."""

    run: Path
    """The run's folder."""
    model: Path | None
    """The model's folder; None if the run builds the model."""
    token: str
    """Identifier in the names of this preflight's files."""
    device: str
    timeout_s: float
    """Time limit of a single call of a probe."""


class Probe:
    """Actor for checking a node."""

    def __init__(self, ask: Ask, name: str, address: str) -> None:
        self.ask, self.name, self.address = ask, name, address
        self._door: network.Door | None = None
        self._listening: socket.socket | None = None

    def look(self) -> dict[str, Any]:
        """Returns the node's facts by kind. A kind that takes too long becomes a TimeoutError, so a dead mount does not
        hide the rest."""
        ask = self.ask
        jobs: dict[str, Callable[[], Any]] = {
            "versions": versions.gather,
            "paths": lambda: paths.gather(ask.run, ask.token, self.name),
        }
        if (path := ask.model) is not None:
            jobs["model"] = lambda: model.gather(path)
        if ask.device == "cuda":
            jobs |= {"gpus": gpus.gather, "fabric": fabric.gather}
        return bounded(jobs, ask.timeout_s)

    def unseen(self, names: Sequence[str]) -> list[str]:
        """Returns the nodes whose file in the run's folder is not visible here."""
        return paths.unseen(self.ask.run, self.ask.token, names)

    def open_door(self) -> network.Bell:
        """Starts a listener at this node's address and returns its address and answer."""
        self._door = network.Door(self.address)
        return self._door.bell

    def knock(self, bells: Mapping[str, network.Bell]) -> dict[str, str]:
        """Returns the nodes unreachable from this node, with the reason."""
        return network.knock(bells)

    def listen(self) -> int:
        """Opens a listening socket for the next exchange led by this node and returns the port."""
        self._listening = network.listen(self.address)
        return int(self._listening.getsockname()[1])

    def exchange(self, leads: bool, place: tuple[str, int], mib: int, timeout_s: float) -> float:
        """Returns the GB/s between this node and its partner."""
        listening = self._listening if leads else None
        return network.exchange(place, self.address, self.ask.device, mib, timeout_s, listening)


def bounded(jobs: Mapping[str, Callable[[], Any]], timeout_s: float) -> dict[str, Any]:
    """Runs the jobs in threads and returns each answer, exception, or a TimeoutError; hanging threads are abandoned."""
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
