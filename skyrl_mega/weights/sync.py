"""The driver's side of the weight sync of every step: connecting policy and engines, transferring, handling failures.

Each engine worker receives a shard directly from policy ranks; `connection` implements both ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from skyrl_mega.cluster.actor_process import Location
from skyrl_mega.cluster.calls import Outcomes, PendingCall, gather, settle
from skyrl_mega.cluster.errors import cause_of, describe
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.run_placement import RunPlacement, actual_placement, differences, plan_placement
from skyrl_mega.config.derived import engine_ranks
from skyrl_mega.config.schema import Config
from skyrl_mega.weights.connection import Connection
from skyrl_mega.weights.exchange.executor import ExchangeReport
from skyrl_mega.weights.files.driver import FileSync
from skyrl_mega.weights.members import DIRECTORY, FILES, GROUP
from skyrl_mega.weights.plan.cost import cost
from skyrl_mega.weights.plan.plan import Plan
from skyrl_mega.weights.plan.sync_plan import SyncInputs, sync_plan
from skyrl_mega.weights.transports.group import TransportError, call_off, host_store

log = logging.getLogger(__name__)

PARTS = ("quantise", "pack", "wire", "load", "checksum")
"""Parts of a transfer's time. Parts overlap between processes; each metric is the slowest process's time."""
PLAN_S = 20.0
"""Seconds allowed for computing a transfer plan missing from the cache."""
MARGIN_S = 15.0
"""Seconds added to the transports' timeout in the driver's waits, so transport errors, naming rank and tensor, arrive
first.
"""
SETTLE_S = 10.0
"""Seconds for the other processes to notice a failure after the first error."""
PROBE_S = 10.0
"""Seconds for an engine to show that all of its workers are alive."""
BLAMELESS = 3
"""Consecutive failed transfers without an identifiable cause before the sync raises."""


@dataclass(frozen=True)
class WeightComparison:
    """A comparison of an engine worker's weights with the policy's."""

    engine: int
    """Rank of the engine."""
    worker: int
    """Rank of the worker in the engine."""
    parameters: int
    """Parameters of the worker compared bit for bit, as read by the kernels."""
    bytes: int
    """Bytes of weights received by the worker for the comparison."""
    different: list[str]
    """Names of the differing parameters; [] if all are equal."""


class WeightSync:
    """The weight sync from the policy to the engines.

    Args:
        policy: Actors with `connect_weights(info)`, `send_weights(checksums) -> ExchangeReport`,
            `disconnect_weights()`, and for engines of kind `FILES` `publish_weights` (`files.driver`).
        fleet: The engines.
        hf: The model's config.json.
        config: The run's settings, with the device decided.
        plans: Folder of cached transfer plans, in the run's folder.
        say: Function for user-facing lines.
        directory: Function from a version to a Hugging Face directory with the policy's present weights, readable on
            every node, for engines of kind `DIRECTORY`; None without any.
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
        directory: Callable[[int], Path] | None = None,
    ) -> None:
        self.policy, self.fleet = policy, fleet
        self.hf, self.config, self.plans, self.say = hf, config, plans, say
        self.directory = directory
        self.files: FileSync | None = None
        """The publisher of weight files; None until an engine needs weight files."""
        self.placement: RunPlacement | None = None
        """Actual placement of policy and engines."""
        self.digest = ""
        """Digest of the present plan."""
        self.store: TCPStore | None = None
        self.members: list[int] = []
        """Connected engines of kind `GROUP`."""
        self.connected: list[Location] = []
        """The process of each connected engine."""
        self.fetchers: list[int] = []
        """Engines of the other kinds that have fetched the latest weights."""
        self.group_count = 0
        self.transfers = 0
        self.failures = 0
        """Failed transfers over the whole run."""
        self.verify: Callable[[list[int], int], list[int]] = lambda engines, version: engines
        """Receives the updated engines and the version; returns the engines that may serve."""

    @property
    def group_name(self) -> str:
        """Name of the present process group."""
        return f"weights-{self.group_count}"

    def sync(self, version: int) -> dict[str, float]:
        """Transfers the policy's present weights to all running engines, which afterwards serve the weights as
        `version`. Connects policy and engines first if the running engines have changed.

        A dead or stalled engine is retired, and the attempt is repeated with the remaining engines; the restarted
        engine takes part in a later attempt or sync. If no engine runs, waits for a restart first. Each stage of an
        attempt is bounded by `weights.timeout_s`.

        Args:
            version: Number of the weights, reported with every completion.

        Returns:
            Metrics of the successful transfer: `time/sync/*` in seconds and `sync/*`.

        Raises:
            ActorFailed: A policy rank failed; an engine failed and has no restart left (`rollout.restarts`), even if
                other engines run; no engine is left; or three attempts in a row (`BLAMELESS`) failed without an engine
                to blame. Carries the root cause.
            UserError: A process rejected the settings.
            OSError: The folder `plans` has another plan for the same settings, written by an older version of the code,
                and its file cannot be removed.
        """
        with self.fleet.updating:
            return self._sync(version)

    def _sync(self, version: int) -> dict[str, float]:
        blameless = 0
        while True:
            running = self.fleet.ensure_running()
            fetched = self._fetch(version, running)
            group = [engine for engine in running if self._kind(engine) == GROUP]
            members = sorted([*group, *self.fetchers])
            if not members:
                continue
            start = time.perf_counter()
            try:
                # A restarted engine has the rank of the former one, and is not connected.
                if group != self.members or self.connected != self._processes(group):
                    self._connect(group)
                connected = time.perf_counter()
                metrics = fetched | self._transfer(version)
            except _Failed as failed:
                self.failures += 1
                blamed = self._blame(failed, members) or self._newcomers(members)
                self._disconnect(members, blamed)
                for engine, cause in blamed.items():
                    self.fleet.retire(engine, cause)
                blameless = 0 if blamed else blameless + 1
                if blameless == BLAMELESS:
                    failed.outcomes.raise_first()
                continue
            updated = [e for e in members if e in (*self.members, *self.fetchers)]
            serving = self.verify(updated, version)
            self.fleet.serve(serving)
            return metrics | {
                "time/sync/plan": connected - start,
                "sync/engines": float(len(serving)),
                "sync/failures": float(self.failures),
                **self._changes(),
            }

    def _kind(self, engine: int) -> str:
        """Returns the kind of an engine (`members`)."""
        facts = self.fleet.facts[engine]
        return GROUP if facts is None else str(facts.weights)

    def _fetch(self, version: int, members: list[int]) -> dict[str, float]:
        """Lets the engines of kinds `FILES` and `DIRECTORY` fetch the policy's present weights, while all engines still
        serve, and returns metrics. An engine that cannot is retired; the others are in `fetchers` afterwards.

        Raises:
            ActorFailed: A policy rank failed, or the restart budget is used up.
        """
        by_kind = {kind: [e for e in members if self._kind(e) == kind] for kind in (FILES, DIRECTORY)}
        metrics: dict[str, float] = {}
        failed: dict[int, str] = {}
        if by_kind[FILES]:
            if self.files is None:
                self.files = FileSync(self.policy, self.fleet, self.config, self.plans.parent, self.say)
            inputs = SyncInputs.of(self.config, self.hf, plan_placement(self.config))
            failed, metrics = self.files.sync(version, by_kind[FILES], inputs)
        if by_kind[DIRECTORY]:
            assert self.directory is not None, "engines that read directories need the function `directory`"
            start = time.perf_counter()
            source = {"path": str(self.directory(version)), "timeout_s": self.config.weights.timeout_s}
            calls = self.fleet.submit(by_kind[DIRECTORY], "fetch_weights", source, version)
            limit = self.config.weights.timeout_s + MARGIN_S
            failed |= settle(calls, limit, after_failure=limit).causes
            metrics["time/sync/directory"] = time.perf_counter() - start
        self.fetchers = [e for kind in by_kind.values() for e in kind if e not in failed]
        for engine, cause in failed.items():
            self.fleet.retire(engine, f"fetch_weights: {cause}")
        return metrics

    def _changes(self) -> dict[str, float]:
        """Returns the numbers of engines that joined and left so far, for a run with `rollout.elastic.most`."""
        if not self.config.rollout.elastic.most:
            return {}
        return {"sync/engines_joined": float(self.fleet.joins), "sync/engines_left": float(len(self.fleet.left))}

    def _connect(self, members: list[int]) -> None:
        """Connects the policy and these engines in a new process group, replacing any former group.

        Raises:
            _Failed: A process did not join.
        """
        import ray

        config = self.config
        self.members, self.connected = [], []
        if not members:
            return
        if self.store is None:  # kept for the whole run: no other process may take its port
            self.store = host_store(ray.util.get_node_ip_address(), config.cluster.start_timeout_s)
        self.group_count += 1
        places = [*range(config.rollout.engines), *(rank for rank in members if rank >= config.rollout.engines)]
        inputs = SyncInputs.of(config, self.hf, self._current_placement(places))
        inputs = replace(inputs, members=tuple(map(places.index, members)))
        connection = Connection(
            host=self.store.host,
            port=self.store.port,
            group_name=self.group_name,
            inputs=asdict(inputs),
            bucket_bytes=int(config.weights.bucket_mib * 2**20),
            timeout_s=config.weights.timeout_s,
            plans=str(self.plans),
            engines=tuple(members),
        )
        plan = self._plan(connection)  # cached on disk for the other processes
        nic = cost(plan)
        self.planned = {
            "sync/bytes_in_ideal": float(max(plan.bytes_in)),
            "sync/bytes_nic_max": float(max(nic.nic_in.max(), nic.nic_out.max())),
        }
        info = asdict(connection)
        calls = self.policy.submit_all("connect_weights", info)
        for number, engine in enumerate(members):
            calls.append(
                self.fleet.group.submit(engine, "connect_weights", {"connection": info, "engine_index": number})
            )
        self._await_all(calls, config.weights.timeout_s + PLAN_S + MARGIN_S)
        self.members, self.connected = members, self._processes(members)

    def _processes(self, members: list[int]) -> list[Location]:
        """Returns the processes of these engines."""
        return [self.fleet.group.where[engine] for engine in members]

    def _current_placement(self, engines: list[int]) -> RunPlacement:
        """Returns the actual placement of the policy and of the engines with these ranks; reports differences from the
        planned placement."""
        where = [self._location(rank) for rank in engines]
        placement = actual_placement(self.config, self.policy.where, where)
        text = differences(plan_placement(self.config), placement)
        if text and placement != self.placement:
            self.say(f"the processes are not placed as planned: {text}")
        self.placement = placement
        return placement

    def _location(self, engine: int) -> Location:
        """Returns the location of an engine; a server outside of the run counts as a node of its own."""
        location = self.fleet.group.where[engine]
        if engine < self.config.rollout.engines or not self.fleet.facts[engine].foreign:
            return location
        return replace(
            location, node=f"server {engine}", gpus=tuple(map(str, range(engine_ranks(self.config.rollout))))
        )

    def _plan(self, connection: Connection) -> Plan:
        """Returns the transfer plan of the connected engines.

        For the first sync with all engines placed as planned, a cached plan other than the dry run's is replaced.
        """
        whole = connection.plan_inputs.members == tuple(range(self.config.rollout.engines))
        expected = None
        if whole and not self.digest and self.placement == plan_placement(self.config):
            expected = sync_plan(self.config, self.hf)
        plan = connection.plan(expected)
        if plan.digest != self.digest:
            self.digest = plan.digest
            self.say(f"transfer plan {plan.digest}: an engine worker receives at most {max(plan.bytes_in):,} bytes")
        return plan

    def _transfer(self, version: int) -> dict[str, float]:
        every, limit = self.config.weights.checksum_every, self.config.weights.timeout_s + MARGIN_S
        checksums = every > 0 and (self.transfers % every == 0)
        self.transfers += 1
        start, members = time.perf_counter(), [*self.members, *self.fetchers]
        self._await_all(self.fleet.submit(members, "begin_update"), limit)
        paused = time.perf_counter()
        sends = self.policy.submit_all("send_weights", checksums) if self.members else []
        receives = self.fleet.submit(members, "update_weights", checksums)
        sent: list[ExchangeReport] = self._await_all([*sends, *receives], limit)[: len(sends)]
        moved = time.perf_counter()
        worker_reports = self._await_all(self.fleet.submit(members, "end_update", version), limit)
        received = [ExchangeReport(**report) for workers in worker_reports for report in workers]
        reports = [*sent, *received]
        return {
            "time/sync/pause": paused - start + time.perf_counter() - moved,
            "time/sync/transfer": moved - paused,
            **{f"time/sync/{part}": max((getattr(r, f"{part}_s") for r in reports), default=0.0) for part in PARTS},
            "sync/bytes_out_max": float(max((r.sent + r.local for r in sent), default=0)),
            "sync/bytes_in_max": float(max((r.received + r.local for r in received), default=0)),
            "sync/extra_bytes_max": float(max((r.extra_bytes for r in reports), default=0)),
            "sync/checksums": float(checksums),
        } | (self.planned if self.members else {})

    def check(self) -> list[WeightComparison]:
        """Sends the policy's present weights to the engines of the last `sync`, which must have succeeded; compares
        them there with the weights in use, and returns a comparison per engine worker. Call before further training,
        which makes the weights differ.

        Changes no engine weights; a difference raises nothing. Every worker needs memory for a layer's weights.

        Raises:
            ActorFailed: A policy rank or an engine failed; carries the root cause. No engine is retired or restarted;
                the next `sync` does so.
        """
        limit = self.config.weights.timeout_s + MARGIN_S
        members = [*self.members, *self.fetchers]
        sends = self.policy.submit_all("send_weights", True) if self.members else []
        compares = self.fleet.submit(members, "check_weights")
        answers = gather([*sends, *compares], limit)[len(sends) :]
        return [
            WeightComparison(engine, worker, **comparison)
            for engine, workers in zip(members, answers, strict=True)
            for worker, comparison in enumerate(workers)
        ]

    def _await_all(self, calls: list[PendingCall], limit: float) -> list[Any]:
        def failed(error: BaseException) -> None:
            if self.store is not None:
                call_off(self.store, self.group_name, describe(error))

        outcomes = settle(calls, limit, SETTLE_S, failed)
        late = [call for call in outcomes.silent if call.group == self.policy.name]
        if outcomes.failures and late:  # every policy rank is needed, and its own waits are bounded
            settled_later = settle(late, limit, limit)
            outcomes.answers.update(settled_later.answers)
            outcomes.failures.extend(settled_later.failures)
            outcomes.silent[:] = [call for call in outcomes.silent if call not in late] + settled_later.silent
        if outcomes.failures or outcomes.silent:
            raise _Failed(outcomes)
        return [outcomes.answers[call] for call in calls]

    def _blame(self, failed: _Failed, members: list[int]) -> dict[int, str]:
        """Returns the engines to blame for a failure, each with the reason.

        Policy ranks complain about the engine waited for, or about each other. An engine with all workers answering a
        probe is not a cause.

        Raises:
            ActorFailed: A policy rank is the cause.
        """
        outcomes, policy = failed.outcomes, self.policy.name
        for call, error in outcomes.failures:
            if call.group == policy and not isinstance(cause_of(error), TransportError):
                outcomes.raise_first()
        if any(call.group == policy for call in outcomes.silent):
            outcomes.raise_first()
        first = next((str(cause_of(e)) for _, e in outcomes.failures if isinstance(cause_of(e), TransportError)), "")
        probes = settle(self.fleet.submit(members, "probe"), PROBE_S, after_failure=PROBE_S)
        blamed = probes.causes
        blamed |= {c.rank: describe(e) for c, e in outcomes.failures if c.group != policy and self._alone(c)}
        return {engine: f"{cause} ({first})" if first else cause for engine, cause in blamed.items()}

    def _alone(self, call: PendingCall) -> bool:
        """Returns True if no peer can be the cause of a failed call to an engine: the engine reads its own image, or is
        a server outside of the run that received everything, and answered nonsense at the end."""
        foreign = getattr(self.fleet.facts[call.rank], "foreign", False)
        return call.rank in self.fetchers or (foreign and call.method == "end_update")

    def _newcomers(self, members: list[int]) -> dict[int, str]:
        """Returns the joined engines without a successful sync, each with the reason for leaving them out: a new engine
        that the policy cannot reach must not end the run."""
        cause = "a weight sync failed without another cause, and this engine has never been in a successful one"
        return {rank: cause for rank in members if self.fleet.is_new(rank)}

    def _disconnect(self, members: list[int], blamed: Collection[int]) -> None:
        """Disconnects the policy and abandons the update at healthy engines; data received so far is never served.

        An engine failing here fails again in the next attempt, and is blamed then.

        Raises:
            ActorFailed: A policy rank did not answer.
        """
        self.members = []
        leaving = self.policy.submit_all("disconnect_weights")
        leaving += self.fleet.submit([e for e in members if e not in blamed], "abandon_update")
        outcomes = settle(leaving, PROBE_S + MARGIN_S, after_failure=PROBE_S)
        if any(call.group == self.policy.name and call not in outcomes.answers for call in leaving):
            outcomes.raise_first()


class _Failed(Exception):
    """An incomplete phase of a sync."""

    def __init__(self, outcomes: Outcomes) -> None:
        super().__init__("a weight sync failed")
        self.outcomes = outcomes
