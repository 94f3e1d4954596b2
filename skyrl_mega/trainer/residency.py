"""The ledger of model parts on the devices; moves parts at the beginning of phases (`config/residency.py`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from skyrl_mega.cluster.calls import PendingCall, gather
from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.config.residency import CRITIC, ENGINE, NEEDS, POLICY, resident
from skyrl_mega.config.schema import Config
from skyrl_mega.megatron.group import TrainGroup


class Residency:
    """Shares the devices' memory between policy, critic and engines over time. With `keep` None no part ever moves.

    Args:
        keep: `residency.keep`.
        policy, critic: The model's ranks.
        fleet: The engines.
        timeout_s: Time limit for moving a model's parts.
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
        """The phase entered last."""
        self._on_devices: frozenset[str] | None = None
        """Parts on the devices. None if unknown, as at the start and during a move: then every actor gets the call."""
        self._starting = threading.Lock()

    @classmethod
    def of(cls, config: Config, policy: TrainGroup, critic: TrainGroup | None, fleet: Fleet) -> Residency:
        """Returns the residency of a run's actors; `critic` is None for a run without a critic. With `residency.keep`
        set, also sets `fleet.make_room` to `free_for_engine`, for memory of a restarting engine."""
        residency = cls(
            config.residency.keep,
            policy=policy,
            critic=critic,
            fleet=fleet,
            timeout_s=config.cluster.call_timeout_s,
        )
        if residency.keep is not None:
            fleet.make_room = residency.free_for_engine
        return residency

    def enter(self, phase: str) -> dict[str, float]:
        """Moves parts for a phase and waits for the end: first all parts leaving a device, then all arriving, each set
        in parallel. After an error the next call moves all parts again.

        Args:
            phase: Name of a phase in `config.residency.NEEDS`, such as `generate` or `train`. Any other phase moves
                nothing.

        Returns:
            `time/residency` in seconds; `residency/bytes_out` and `residency/bytes_in`, the largest number of bytes
            copied by a rank off and onto the device. {} if nothing moved.

        Raises:
            ActorFailed: A rank failed or did not answer within `timeout_s`, or an engine failed and none restarts.
        """
        if self.keep is None or phase not in NEEDS:
            return {}
        wanted, on_devices = resident(phase, self.keep) & self.parts, self._on_devices
        if on_devices == wanted:
            self.phase = phase
            return {}
        start, self._on_devices = time.perf_counter(), None
        leaving, coming = (
            (self.parts - wanted, wanted) if on_devices is None else (on_devices - wanted, wanted - on_devices)
        )
        out = self._offload(leaving)
        self.phase = phase  # until here a restarting engine belongs to the previous phase
        back = self._onload(coming)
        self._on_devices = wanted
        return {"time/residency": time.perf_counter() - start, "residency/bytes_out": out, "residency/bytes_in": back}

    @contextmanager
    def free_for_engine(self, engine: int) -> Iterator[None]:
        """Frees GPU memory for the restart of the engine with this rank inside the `with` block (`Fleet.make_room`).
        One engine at a time: a second call waits for the first block.

        In phases with whole engines the memory is free already. In any other phase the training loop waits for this
        engine, so the policy's parts may be offloaded. The parts return afterwards, also if the start fails.

        Raises:
            ActorFailed: A rank failed to move its parts.
        """
        on_devices = self.parts - {*ENGINE} if self.phase is None else resident(self.phase, self.keep)
        leaves = on_devices - resident("generate", self.keep) - {*CRITIC}  # the critic uses separate devices
        moving = leaves if not on_devices.issuperset(ENGINE) else frozenset()
        with self._starting:
            try:
                self._wait_all(self._begin("offload", moving, every=True))
                yield
            except BaseException as error:
                self._reload(moving, error)
                raise
            self._wait_all(self._begin("onload", moving))

    def _reload(self, parts: Collection[str], cause: BaseException) -> None:
        """Reloads parts after a failure; `cause` stays the reported error."""
        try:
            self._wait_all(self._begin("onload", parts))
        except ActorFailed as error:
            cause.add_note(f"and then: {error}")

    def _offload(self, parts: Collection[str]) -> float:
        calls = self._begin("offload", parts, every=True)  # on all ranks, to release torch's cached memory as well
        if self.fleet and (asleep := [part for part in ENGINE if part in parts]):
            self.fleet.sleep(asleep)
        return self._wait_all(calls)

    def _onload(self, parts: Collection[str]) -> float:
        calls = self._begin("onload", parts)
        if self.fleet and (awake := [part for part in ENGINE if part in parts]):
            self.fleet.wake(awake)
        return self._wait_all(calls)

    def _begin(self, method: str, parts: Collection[str], *, every: bool = False) -> list[PendingCall]:
        """Calls `method` on each rank of the models owning these parts; with `every`, on all ranks."""
        calls: list[PendingCall] = []
        for model, model_parts in self.models:
            moved = [part for part in model_parts if part in parts]
            if moved or every:
                calls += model.offload(moved) if method == "offload" else model.onload(moved)
        return calls

    def _wait_all(self, calls: list[PendingCall]) -> float:
        return float(max(gather(calls, self.timeout_s), default=0))
