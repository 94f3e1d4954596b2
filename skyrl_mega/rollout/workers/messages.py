"""Messages between the driver and the rollout workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.engines.base import Facts
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.journal import RecordedTurn
from skyrl_mega.telemetry.timeline import ActivityReport
from skyrl_mega.telemetry.trace import Span
from skyrl_mega.trajectories.trajectory import Trajectory

# ---- to a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineView:
    """The driver's view of the engines."""

    name: str
    """Name of the engine group."""
    actors: list[Any]
    """Ray's handles of the actors, by rank."""
    facts: list[Facts | None]
    """Facts of each engine's start, by rank, with one worker's share of the KV cache; None before its start."""
    serving: list[int]
    """Ranks of engines that accept requests."""
    syncs: int
    """Weight syncs so far; reports about engines from before the latest sync are ignored."""


@dataclass(frozen=True)
class TrajectoryJob:
    """A trajectory to run, or a whole group for `rollout.generator`."""

    key: int
    """Unique key within the session."""
    prompt: Prompt
    sample: int
    """Number of the sample within the prompt."""
    name: str
    """Name of the trajectory; the source of the requests' names and random stream."""
    traced: bool
    """True if calls of the environment are recorded."""
    recorded: Sequence[RecordedTurn] = ()
    """Turns recorded by an earlier run."""
    fault: str = ""
    """Error text of a trajectory marked as failed; such a trajectory is not run."""
    names: tuple[str, ...] = ()
    """Names of a group's trajectories; empty for a single trajectory."""

    @property
    def keys(self) -> range:
        """Keys of the trajectories, in order; `key` is the first."""
        return range(self.key, self.key + max(1, len(self.names)))


# ---- from a worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A finished trajectory."""

    key: int
    """`TrajectoryJob.key`."""
    trajectory: Trajectory
    """The trajectory without the prompt, known to the driver, and without the arrays, kept by the worker for
    `hand_over`."""
    spans: Sequence[Span]
    """Recorded calls of the environment; empty unless the job was traced."""


@dataclass(frozen=True)
class Cancelled:
    """An abandoned trajectory, with the environment closed."""

    key: int
    """`TrajectoryJob.key`."""


@dataclass(frozen=True)
class RolloutFailed:
    """A trajectory that could not be run: an engine refused a request, or no engine is left."""

    key: int
    error: ActorFailed
    """The reason; NoServingActor if no engine is left."""


@dataclass(frozen=True)
class EngineDead:
    """An engine that does not answer."""

    rank: int
    """Rank of the engine."""
    actor: Any
    """The actor asked; another actor may have the same rank by now."""
    cause: str
    """Description of the failure."""


@dataclass(frozen=True)
class EngineAwaitsSync:
    """An engine that refuses requests until the next weight sync."""

    rank: int
    syncs: int
    """`EngineView.syncs` at the time of the refusal."""


@dataclass(frozen=True)
class KilledForMemory:
    """Report of sandboxed programs killed since the last report, because all programs together used too much memory."""

    programs: int
    """Number of killed programs; 0 in the first report of a worker with sandboxes."""


@dataclass(frozen=True)
class TimelineCounts:
    """Report of the numbers of requests and environment calls in progress on a worker since the last report."""

    taken: ActivityReport


WorkerEvent = Finished | Cancelled | RolloutFailed | EngineDead | EngineAwaitsSync | KilledForMemory | TimelineCounts
