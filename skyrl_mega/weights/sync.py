"""Weight sync, every step, as the driver sees it: who is brought together, when, and what follows from a fault.

Each engine worker's shard comes straight from the policy ranks that hold it; `connection` has the two ends of that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup, Call, Outcomes, cause_of, describe, gather, settle
from skyrl_mega.cluster.place import RunPlacement, actual, differences, place
from skyrl_mega.config.schema import Config
from skyrl_mega.weights.connection import Connection
from skyrl_mega.weights.exchange.executor import Report
from skyrl_mega.weights.plan.cost import cost
from skyrl_mega.weights.plan.plan import Plan
from skyrl_mega.weights.plan.sync_plan import SyncInputs, sync_plan
from skyrl_mega.weights.transports.group import TransportError, call_off, host_store

log = logging.getLogger(__name__)

PARTS = ("quantise", "pack", "wire", "load", "checksum")
"""What a transfer's time is spent on; they overlap between processes, and each is the slowest process's."""
PLAN_S = 20.0
"""How long a process may take for a plan that it does not find made."""
MARGIN_S = 15.0
"""The driver waits so much longer than the transports do: their errors name rank and tensor."""
SETTLE_S = 10.0
"""After a first failure: how long the other ends may take to notice it."""
PROBE_S = 10.0
"""How long an engine may take to show that all its workers are alive."""
BLAMELESS = 3
"""Transfers that may fail one after the other without a cause that can be found."""


@dataclass(frozen=True)
class Compared:
    """What one engine worker computes with, beside what the policy holds."""

    engine: int
    worker: int
    parameters: int
    """Parameters of the worker that were compared, bit for bit, as its kernels read them."""
    bytes: int
    different: list[str]
    """Names of those that differ."""


class WeightSync:
    """Brings the policy's weights to the engines.

    Args:
        policy: Actors with `connect_weights(info)`, `send_weights(checksums) -> Report`, `disconnect_weights()`.
        fleet: The engines.
        hf: config.json.
        config: The run's settings, the device decided.
        plans: Folder where transfer plans are kept.
        say: Takes lines for people.
    """

    def __init__(
        self,
        policy: ActorGroup,
        fleet: Fleet,
        hf: dict[str, Any],
        config: Config,
        *,
        plans: Path,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.policy, self.fleet = policy, fleet
        self.hf, self.config, self.plans, self.say = hf, config, plans, say
        self.placement: RunPlacement | None = None
        """Where policy and engines are."""
        self.digest = ""
        """The present plan's."""
        self.store: TCPStore | None = None
        self.members: list[int] = []
        """Engines that are connected."""
        self.meetings = 0
        self.transfers = 0
        self.failures = 0
        """Transfers that have failed, over the whole run."""

    @property
    def meeting(self) -> str:
        """What the present group is called."""
        return f"weights-{self.meetings}"

    def sync(self, version: int) -> dict[str, float]:
        """One sync, after which the engines compute with the policy's present weights, as `version`.

        An engine that dies or stalls is taken out of service and started again; the others are brought up to date and
        the run goes on. Engines that have come back since the last sync are part of this one.

        Returns:
            Metrics: `time/sync/*` in seconds and `sync/*`.

        Raises:
            ActorFailed: A policy rank failed, or no engine could be brought up to date: the root cause.
        """
        blameless = 0
        while True:
            start = time.perf_counter()
            members = self.fleet.present()
            try:
                if members != self.members:
                    self._connect(members)
                connected = time.perf_counter()
                metrics = self._transfer(version)
            except _Failed as failed:
                self.failures += 1
                blamed = self._blame(failed, members)
                self._part(members, blamed)
                for engine, cause in blamed.items():
                    self.fleet.retire(engine, cause)
                blameless = 0 if blamed else blameless + 1
                if blameless == BLAMELESS:
                    failed.outcomes.raise_first()
                continue
            serving = [e for e in members if e in self.members]
            self.fleet.serve(serving)
            return metrics | {
                "time/sync/plan": connected - start,
                "sync/engines": float(len(serving)),
                "sync/failures": float(self.failures),
            }

    def _connect(self, members: list[int]) -> None:
        """Brings the policy and these engines together, in a group that replaces any former one.

        Raises:
            _Failed: Somebody did not come.
        """
        import ray

        config = self.config
        self.members = []
        if self.store is None:  # it lives as long as the run: nobody else listens at its port
            self.store = host_store(ray.util.get_node_ip_address(), config.cluster.start_timeout_s)
        self.meetings += 1
        inputs = replace(SyncInputs.of(config, self.hf, self._placed()), members=tuple(members))
        connection = Connection(
            host=self.store.host,
            port=self.store.port,
            meeting=self.meeting,
            inputs=asdict(inputs),
            bucket_bytes=int(config.weights.bucket_mib * 2**20),
            timeout_s=config.weights.timeout_s,
            plans=str(self.plans),
        )
        made = self._plan(connection)  # kept on disk, where the others find it
        self.ideal, self.nic = max(made.bytes_in), cost(made)
        info = asdict(connection)
        calls = self.policy.submit_all("connect_weights", info)
        for number, engine in enumerate(members):
            calls.append(self.fleet.group.submit(engine, "connect_weights", {"connection": info, "place": number}))
        self._settled(calls, config.weights.timeout_s + PLAN_S + MARGIN_S)
        self.members = members

    def _placed(self) -> RunPlacement:
        """Where policy and engines are; says where that is not what was planned."""
        placement, planned = actual(self.config, self.policy.where, self.fleet.group.where), place(self.config)
        if placement not in (planned, self.placement):
            self.say(f"placed otherwise than planned: {differences(planned, placement)}")
        self.placement = placement
        return placement

    def _plan(self, connection: Connection) -> Plan:
        """The plan of these engines, which is the dry run's where all are in it and sit as planned."""
        whole = len(connection.plan_inputs.members) == self.config.rollout.engines
        expected = None
        if whole and not self.digest and self.placement == place(self.config):
            expected = sync_plan(self.config, self.hf)
        made = connection.plan(expected)
        if made.digest != self.digest:
            self.digest = made.digest
            self.say(f"transfer plan {made.digest}: an engine worker gets {max(made.bytes_in):,} bytes at most")
        return made

    def _transfer(self, version: int) -> dict[str, float]:
        every, limit = self.config.weights.checksum_every, self.config.weights.timeout_s + MARGIN_S
        checksums = every > 0 and (self.transfers % every == 0)
        self.transfers += 1
        start = time.perf_counter()
        self._settled(self.fleet.submit(self.members, "begin_update"), limit)
        paused = time.perf_counter()
        sends = self.policy.submit_all("send_weights", checksums)
        receives = self.fleet.submit(self.members, "update_weights", checksums)
        sent: list[Report] = self._settled([*sends, *receives], limit)[: len(sends)]
        moved = time.perf_counter()
        ended = self._settled(self.fleet.submit(self.members, "end_update", version), limit)
        received = [Report(**report) for workers in ended for report in workers]
        both = [*sent, *received]
        return {
            "time/sync/pause": paused - start + time.perf_counter() - moved,
            "time/sync/transfer": moved - paused,
            **{f"time/sync/{part}": max(getattr(r, f"{part}_s") for r in both) for part in PARTS},
            "sync/bytes_out_max": float(max(r.sent + r.local for r in sent)),
            "sync/bytes_in_max": float(max(r.received + r.local for r in received)),
            "sync/bytes_in_ideal": float(self.ideal),
            "sync/bytes_nic_max": float(max(self.nic.nic_in.max(), self.nic.nic_out.max())),
            "sync/extra_bytes_max": float(max(r.extra_bytes for r in both)),
            "sync/checksums": float(checksums),
        }

    def check(self) -> list[Compared]:
        """Sends the policy's weights once more and compares them with what the engines compute with.

        Nothing that an engine computes with is changed. Needs memory for a layer's weights in every worker.

        Raises:
            ActorFailed: Somebody failed; the root cause.
        """
        limit = self.config.weights.timeout_s + MARGIN_S
        sends = self.policy.submit_all("send_weights", True)
        compares = self.fleet.submit(self.members, "check_weights")
        answers = gather([*sends, *compares], limit)[len(sends) :]
        return [
            Compared(engine, worker, **found)
            for engine, workers in zip(self.members, answers, strict=True)
            for worker, found in enumerate(workers)
        ]

    def _settled(self, calls: list[Call], limit: float) -> list[Any]:
        def failed(error: BaseException) -> None:
            if self.store is not None:
                call_off(self.store, self.meeting, describe(error))

        outcomes = settle(calls, limit, SETTLE_S, failed)
        late = [call for call in outcomes.silent if call.actor.startswith(f"{self.policy.name}-")]
        if outcomes.failures and late:  # no policy rank can be done without, and their own waits are bounded
            more = settle(late, limit, limit)
            outcomes.answers.update(more.answers)
            outcomes.failures.extend(more.failures)
            outcomes.silent[:] = [call for call in outcomes.silent if call not in late] + more.silent
        if outcomes.failures or outcomes.silent:
            raise _Failed(outcomes)
        return [outcomes.answers[call] for call in calls]

    def _blame(self, failed: _Failed, members: list[int]) -> dict[int, str]:
        """Engines that are the cause of a failure, each with why.

        The policy's ranks complain of the engine that they waited for, and others of them; whoever still answers in
        all its workers is none of the causes.

        Raises:
            ActorFailed: A policy rank is the cause.
        """
        outcomes, policy = failed.outcomes, f"{self.policy.name}-"
        for call, error in outcomes.failures:
            if call.actor.startswith(policy) and not isinstance(cause_of(error), TransportError):
                outcomes.raise_first()
        if any(call.actor.startswith(policy) for call in outcomes.silent):
            outcomes.raise_first()
        first = next((str(cause_of(e)) for _, e in outcomes.failures if isinstance(cause_of(e), TransportError)), "")
        probes = settle(self.fleet.submit(members, "probe"), PROBE_S, after_failure=PROBE_S)
        blamed = {c.rank: describe(error) for c, error in probes.failures}
        blamed |= {c.rank: f"no answer within {PROBE_S:g} s" for c in probes.silent}
        return {engine: f"{cause} ({first})" if first else cause for engine, cause in blamed.items()}

    def _part(self, members: list[int], blamed: Collection[int]) -> None:
        """Ends the group and the update at those who are well; what they received so far is never served.

        An engine that fails here fails again in the next attempt, and is blamed then.

        Raises:
            ActorFailed: A policy rank did not answer.
        """
        self.members = []
        leaving = self.policy.submit_all("disconnect_weights")
        leaving += self.fleet.submit([e for e in members if e not in blamed], "abandon_update")
        outcomes = settle(leaving, PROBE_S + MARGIN_S, after_failure=PROBE_S)
        if any(call.actor.startswith(f"{self.policy.name}-") and call not in outcomes.answers for call in leaving):
            outcomes.raise_first()


class _Failed(Exception):
    """A part of a sync that did not come to its end everywhere."""

    def __init__(self, outcomes: Outcomes) -> None:
        super().__init__("a weight sync failed")
        self.outcomes = outcomes
