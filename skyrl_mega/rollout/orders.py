"""What the driver and the processes that play trajectories tell one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_mega.engines.base import Facts
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.journal import Said
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.telemetry.timeline import Taken
from skyrl_mega.telemetry.trace import Span

# ---- to a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnginesNow:
    """The engines, as the driver knows them."""

    name: str
    """Of their group."""
    actors: list[Any]
    """By rank, as the facts."""
    facts: list[Facts | None]
    serving: list[int]
    """Ranks that may be asked."""
    syncs: int
    """That the session has seen: what is said of engines before the newest one is old."""


@dataclass(frozen=True)
class Order:
    """A trajectory to be played."""

    key: int
    """No other order of its session has it."""
    prompt: Prompt
    sample: int
    name: str
    """Names its requests and their random stream."""
    traced: bool
    """Whether calls of its environment are recorded."""
    said: Sequence[Said] = ()
    """Its turns that were played before."""
    fault: str = ""
    """Why it has failed, and is not played."""


# ---- from a worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """An order that was carried out."""

    key: int
    trajectory: Trajectory
    """Without its prompt, which the driver has, and its arrays, which the worker
    keeps for `hand_over`."""
    spans: Sequence[Span]


@dataclass(frozen=True)
class Stopped:
    """An order that was abandoned; its environment is closed."""

    key: int


@dataclass(frozen=True)
class Failed:
    """An order that cannot be carried out: an engine refused it, or none is left."""

    key: int
    nobody: bool
    """Whether no engine is left."""
    actor: str
    rank: int
    method: str
    cause: str


@dataclass(frozen=True)
class EngineDead:
    """An engine that does not answer."""

    rank: int
    actor: Any
    """What was asked: another may be in its place by now."""
    cause: str


@dataclass(frozen=True)
class EngineRests:
    """An engine that refuses requests until the next sync."""

    rank: int
    syncs: int
    """As `EnginesNow`, when it refused."""


@dataclass(frozen=True)
class EndedForMemory:
    """Sandboxed programs that had to end since the last time, as all that ran at once had too much memory."""

    programs: int


@dataclass(frozen=True)
class Counts:
    """What this worker has had under way since the last time."""

    taken: Taken


News = Played | Stopped | Failed | EngineDead | EngineRests | EndedForMemory | Counts
