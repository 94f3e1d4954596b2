"""An actor on every node: it looks at its own node, and every call of it is bounded."""

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
    """What all nodes are asked."""

    run: Path
    """The run's folder."""
    model: Path | None
    """None where the run builds it."""
    token: str
    """Names this preflight's files."""
    device: str
    timeout_s: float
    """For one call of a probe."""


class Probe:
    """One node's."""

    def __init__(self, ask: Ask, name: str, address: str) -> None:
        self.ask, self.name, self.address = ask, name, address
        self._door: network.Door | None = None
        self._listening: socket.socket | None = None

    def look(self) -> dict[str, Any]:
        """Facts by kind. A kind that does not come in time is a TimeoutError: a dead mount must not hide the rest."""
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
        """Nodes whose file in the run's folder this one does not see."""
        return paths.unseen(self.ask.run, self.ask.token, names)

    def open_door(self) -> network.Bell:
        """Opens a door at this node's address."""
        self._door = network.Door(self.address)
        return self._door.bell

    def knock(self, bells: Mapping[str, network.Bell]) -> dict[str, str]:
        """Nodes whose door this one does not reach, and why."""
        return network.knock(bells)

    def listen(self) -> int:
        """Port of the exchange that this node leads next."""
        self._listening = network.listen(self.address)
        return int(self._listening.getsockname()[1])

    def exchange(self, leads: bool, place: tuple[str, int], mib: int, timeout_s: float) -> float:
        """GB/s of a pair of nodes."""
        listening = self._listening if leads else None
        return network.exchange(place, self.address, self.ask.device, mib, timeout_s, listening)


def bounded(jobs: Mapping[str, Callable[[], Any]], timeout_s: float) -> dict[str, Any]:
    """Each job's answer, its exception, or a TimeoutError; a thread that hangs is left alone."""
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
