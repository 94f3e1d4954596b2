"""The agreement between all processes of a weight sync, and how a process joins.

Policy ranks and engine workers receive the same `Connection`, compute the same transfer plan, and meet at a store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from skyrl_mega.weights.exchange.exchange import Exchange
from skyrl_mega.weights.fp8.scales import largest_of_all
from skyrl_mega.weights.plan.cache import cached_plan
from skyrl_mega.weights.plan.plan import Plan
from skyrl_mega.weights.plan.sync_plan import SyncInputs
from skyrl_mega.weights.transports.group import join
from skyrl_mega.weights.transports.ipc import device_owners


@dataclass(frozen=True)
class Connection:
    """Settings shared by every process of a weight sync. Contains only plain values, as JSON does."""

    host: str
    """Address of the store where all processes meet."""
    port: int
    """Port of the store at `host` where all processes meet."""
    group_name: str
    """Name of this process group, unique at the store."""
    inputs: dict[str, Any]
    """Fields of `SyncInputs`: everything the plan depends on."""
    bucket_bytes: int
    """Maximum size of a message in bytes."""
    timeout_s: float
    """Time limit in seconds for joining, and for a whole transfer."""
    plans: str
    """Folder of cached transfer plans."""
    engines: tuple[int, ...] = ()
    """Rank of each participating engine in the fleet, for messages; empty takes the numbers of the plan."""

    @property
    def plan_inputs(self) -> SyncInputs:
        """The plan's inputs as `SyncInputs`."""
        return SyncInputs(**self.inputs)

    @property
    def workers(self) -> int:
        """Number of workers per engine."""
        return self.plan_inputs.workers

    @property
    def size(self) -> int:
        """Number of processes: policy ranks first, then the workers of each participating engine."""
        return self.plan_inputs.ranks + len(self.plan_inputs.members) * self.workers

    def plan(self, expected: Plan | None = None) -> Plan:
        """Returns the transfer plan from policy to engines: read from the folder `plans`, or else computed and written
        there for all processes and later runs.

        Args:
            expected: The plan of these inputs, if known; a cached file with another plan is replaced. None: the cached
                file counts.

        Raises:
            UserError: The model cannot be split into a layout.
            OSError: A cached file with another plan cannot be removed. A plan that cannot be written is only logged.
        """
        folder = Path(self.plans)
        if expected is None:
            return cached_plan(folder, self.inputs, self.plan_inputs.plan)
        return cached_plan(folder, self.inputs, lambda: expected, expected.digest)

    def join(self, device: torch.device, *, source: int | None = None, target: int | None = None) -> Exchange:
        """Joins the process group as policy rank `source`, or as engine worker `target` (counted over the participating
        engines), and returns the exchange for this process. Exactly one of the two is set. The caller closes the
        exchange.

        Returns after all processes joined, `timeout_s` at most. `device` is the device of this process's parameters.

        Raises:
            TransportError: A process did not join within `timeout_s`, or the group was called off; names the missing
                ranks or the cause.
            UserError: The model cannot be split into a layout.
        """
        inputs = self.plan_inputs
        ranks = inputs.ranks
        if source is not None:
            rank, name = source, f"policy rank {source}"
        else:
            assert target is not None
            names = self.engines or inputs.members
            engine, worker = names[target // inputs.workers], target % inputs.workers
            rank, name = ranks + target, f"engine {engine} worker {worker}"
        ends, wire = inputs.endpoints()
        plan = self.plan()  # before the meeting, so that no process waits there for planning
        owners = device_owners(plan.topology, ranks)
        device_peers = {peer for peer, host in owners.items() if peer != host}
        transport = join(
            (self.host, self.port),
            rank,
            self.size,
            name,
            device=device,
            timeout_s=self.timeout_s,
            group=self.group_name,
            device_peers=device_peers,
        )
        return Exchange(
            plan,
            transport,
            wire,
            source=source,
            source_layout=ends.policy,
            target=target,
            target_layout=ends.engines,
            bucket_bytes=self.bucket_bytes,
            target_base=ranks,
            agree=largest_of_all if source is not None and dist.is_initialized() else None,
        )
