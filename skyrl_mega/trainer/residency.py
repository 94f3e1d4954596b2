"""What of a run is on its devices: one ledger, which moves parts as phases begin (`config/residency.py`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import Call, gather
from skyrl_mega.config.residency import CRITIC, ENGINE, NEEDS, POLICY, resident
from skyrl_mega.config.schema import Config
from skyrl_mega.megatron.group import TrainGroup


class Residency:
    """Policy, critic and engines take turns in their devices' memory. With `keep` None nothing ever moves.

    Args:
        keep: `residency.keep`.
        policy, critic: Their ranks.
        fleet: The engines.
        timeout_s: How long a move of a model's parts may take.
    """

    def __init__(
        self,
        keep: list[str] | None = None,
        *,
        policy: TrainGroup | None = None,
        critic: TrainGroup | None = None,
        fleet: Fleet | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self.keep, self.fleet, self.timeout_s = keep, fleet, timeout_s
        self.models = [(model, parts) for model, parts in ((policy, POLICY), (critic, CRITIC)) if model]
        self.parts = frozenset(ENGINE if fleet else ()).union(*(parts for _, parts in self.models))
        self.phase: str | None = None
        """The one that was entered last."""
        self._there: frozenset[str] | None = None
        """Parts on the devices. None: not known, as at the start and in a move, and everybody is told."""
        self._starting = threading.Lock()

    @classmethod
    def of(cls, config: Config, policy: TrainGroup, critic: TrainGroup | None, fleet: Fleet) -> Residency:
        """That of a run's actors; an engine that is started again gets its memory from it."""
        made = cls(
            config.residency.keep,
            policy=policy,
            critic=critic,
            fleet=fleet,
            timeout_s=config.cluster.call_timeout_s,
        )
        if made.keep is not None:
            fleet.make_room = made.room
        return made

    def enter(self, phase: str) -> dict[str, float]:
        """Moves what is not as the phase needs it: first what leaves, then what comes, each side by side.

        A phase that the table does not name finds things as they are.

        Returns:
            Metrics: seconds, and the bytes that a rank copied at most, off its device and onto it. Empty where nothing
            moves.

        Raises:
            ActorFailed: A rank failed, or an engine and none comes back.
        """
        if self.keep is None or phase not in NEEDS:
            return {}
        wanted, there = resident(phase, self.keep) & self.parts, self._there
        if there == wanted:
            self.phase = phase
            return {}
        start, self._there = time.perf_counter(), None
        leaving, coming = (self.parts - wanted, wanted) if there is None else (there - wanted, wanted - there)
        out = self._offload(leaving)
        self.phase = phase  # an engine that starts while others fall asleep is still in the phase before
        back = self._onload(coming)
        self._there = wanted
        return {"time/residency": time.perf_counter() - start, "residency/bytes_out": out, "residency/bytes_in": back}

    @contextmanager
    def room(self, engine: int) -> Iterator[None]:
        """An engine can be started again inside, which takes all of its memory (`Fleet.make_room`).

        In a phase in which engines are whole, theirs is free. In any other the loop waits for this one, so that what
        the policy has on them may leave. It comes back also where the start fails.
        """
        there = self.parts - {*ENGINE} if self.phase is None else resident(self.phase, self.keep)
        leaves = there - resident("generate", self.keep) - {*CRITIC}  # a critic has devices of its own
        moving = leaves if not there.issuperset(ENGINE) else frozenset()
        with self._starting:
            try:
                self._settled(self._begin("offload", moving, every=True))
                yield
            except BaseException as error:
                self._come_back(moving, error)
                raise
            self._settled(self._begin("onload", moving))

    def _come_back(self, parts: Collection[str], cause: BaseException) -> None:
        """After a fault, whose cause remains the one that is told."""
        try:
            self._settled(self._begin("onload", parts))
        except ActorFailed as error:
            cause.add_note(f"and then: {error}")

    def _offload(self, parts: Collection[str]) -> float:
        calls = self._begin("offload", parts, every=True)  # what torch keeps for later is given back, too
        if self.fleet and (asleep := [part for part in ENGINE if part in parts]):
            self.fleet.sleep(asleep)
        return self._settled(calls)

    def _onload(self, parts: Collection[str]) -> float:
        calls = self._begin("onload", parts)
        if self.fleet and (awake := [part for part in ENGINE if part in parts]):
            self.fleet.wake(awake)
        return self._settled(calls)

    def _begin(self, method: str, parts: Collection[str], *, every: bool = False) -> list[Call]:
        """A call at each rank of the models that parts are of, or of `every` one."""
        calls: list[Call] = []
        for model, own in self.models:
            mine = [part for part in own if part in parts]
            if mine or every:
                calls += model.offload(mine) if method == "offload" else model.onload(mine)
        return calls

    def _settled(self, calls: list[Call]) -> float:
        return float(max(gather(calls, self.timeout_s), default=0))
