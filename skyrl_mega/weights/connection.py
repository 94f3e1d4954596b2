"""What all parties of a weight sync agree on, and how one of them joins.

Policy ranks and engine workers get the same `Connection`, make the same transfer plan from it, and meet at its store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.weights.exchange.exchange import Exchange
from skyrl_mega.weights.plan.cache import cached_plan
from skyrl_mega.weights.plan.plan import Plan
from skyrl_mega.weights.plan.sync_plan import SyncInputs
from skyrl_mega.weights.transports.group import join
from skyrl_mega.weights.transports.ipc import hosts


@dataclass(frozen=True)
class Connection:
    """What every party must agree on. Plain values only: it travels as JSON would."""

    host: str
    port: int
    """Where the store is that all meet at."""
    meeting: str
    """Names this meeting; no other at the same store is called so."""
    inputs: dict[str, Any]
    """Fields of `SyncInputs`: all that the plan follows from."""
    bucket_bytes: int
    timeout_s: float
    plans: str
    """Folder where plans are kept."""

    @property
    def plan_inputs(self) -> SyncInputs:
        """All that the plan follows from."""
        return SyncInputs(**self.inputs)

    @property
    def workers(self) -> int:
        """Workers of one engine."""
        return self.plan_inputs.workers

    @property
    def size(self) -> int:
        """Processes that meet: policy ranks first, then the workers of each engine that takes part."""
        return len(self.plan_inputs.sources) + len(self.plan_inputs.members) * self.workers

    def plan(self, expected: Plan | None = None) -> Plan:
        """From one end to the other; made once for all processes that share `plans`, and for later runs.

        Args:
            expected: What the inputs give, where the caller has it: a file with another plan is replaced.
        """
        folder = Path(self.plans)
        if expected is None:
            return cached_plan(folder, self.inputs, self.plan_inputs.plan)
        return cached_plan(folder, self.inputs, lambda: expected, expected.digest)

    def join(self, device: torch.device, *, source: int | None = None, target: int | None = None) -> Exchange:
        """Joins as policy rank `source`, or as engine worker `target` counted over the engines that take part.

        Returns when all have joined.

        Raises:
            TransportError: Somebody did not come; says who.
        """
        inputs = self.plan_inputs
        ranks = len(inputs.sources)
        if source is not None:
            rank, name = source, f"policy rank {source}"
        else:
            assert target is not None
            engine, worker = inputs.members[target // inputs.workers], target % inputs.workers
            rank, name = ranks + target, f"engine {engine} worker {worker}"
        ends, wire = inputs.endpoints()
        plan = self.plan()  # before the meeting, so that nobody waits for it in there
        where = hosts(plan.topology, 0, ranks)
        guests = {guest for guest, host in where.items() if guest != host}
        transport = join(
            (self.host, self.port),
            rank,
            self.size,
            name,
            device=device,
            timeout_s=self.timeout_s,
            group=self.meeting,
            guests=guests,
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
            agree=_largest_of_all if source is not None and dist.is_initialized() else None,
        )


def _largest_of_all(amax: Tensor) -> None:
    """Takes the element-wise maximum over the policy's ranks."""
    dist.all_reduce(amax, op=dist.ReduceOp.MAX)
