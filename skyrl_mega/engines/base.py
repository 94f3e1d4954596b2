"""What the driver asks of an engine, whichever it is: `vllm/` has the one there is.

The driver calls an engine's actor through Ray, by these names; tests put simulated engines in its place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_mega.telemetry.memory import Reading
from skyrl_mega.telemetry.trace import Span

if TYPE_CHECKING:
    import numpy as np


class EngineDied(RuntimeError):
    """An engine's own process is gone or stands still; only a new engine helps."""


@dataclass(frozen=True)
class Sampling:
    """How all requests of one call are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Strings that end a turn; they stay in the output. Only an engine with a tokenizer knows them."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end a turn (end of sequence); they stay in the output."""


@dataclass(frozen=True)
class Request:
    """One prompt to be continued."""

    id: str
    tokens: Sequence[int]
    max_tokens: int
    seed: int
    """Seeds this request's own generator, so that its draws do not depend on its neighbours in a batch."""
    seconds: float | None = None
    """Time that it has; past it, it ends with the tokens that there are, of which there may be none. None: no end."""
    routes_from: int = 0
    """Position in `tokens` from where on routes are wanted, of an engine that gives them: those before are known."""
    prompt: int | None = None
    """Of the data, in a trajectory's first turn: requests with the same one have the same tokens."""

    @property
    def trajectory(self) -> str:
        """Whose turn it is."""
        return self.id.rpartition("/")[0]


@dataclass(frozen=True)
class Completion:
    """What an engine made of a request."""

    id: str
    tokens: Sequence[int]
    """New tokens, the one that ended it included."""
    logprobs: Sequence[float]
    """Natural log-prob of each token under the distribution it was drawn from: after temperature, top-k and top-p."""
    finish: str
    """`stop` (a stop token or string), `length`, or `timeout` (of its own `seconds`)."""
    versions: tuple[tuple[int, int], ...]
    """(weight version, index of its first token): more than one where a sync came in between."""
    routes: np.ndarray | None = None
    """[n, M, K] as in `models.routes`: the experts of every token that the engine read, from `routes_from` on. The last
    new token was not read. None from an engine that gives none, and without a new token."""


@dataclass(frozen=True)
class Facts:
    """What an engine has found out about itself at its start."""

    cache_tokens: int
    """Tokens whose keys and values its cache holds."""
    cache_bytes: int
    """Bytes of the cache in each of its workers."""


class Engine(Protocol):
    """Tokens in, tokens out, weights from the policy. All methods may be under way at once on one event loop."""

    async def start(self, former: Facts | None = None) -> Facts:
        """Loads the model. `former`: what the engine found that ran in this one's place, whose cache it takes over."""

    def generate_many(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[list[Completion]]:
        """Continues prompts; yields completions in small lists as they end. Empty ones are signs of life."""

    async def forget(self) -> None:
        """Empties the cache of prefixes."""

    async def connect_weights(self, info: dict[str, Any]) -> None:
        """Joins every worker to the group that weights travel in."""

    async def pause(self) -> None:
        """Stops computing; requests under way stay where they are."""

    async def resume(self) -> None:
        """Continues computing."""

    async def sleep(self, parts: Sequence[str]) -> None:
        """Pauses, and drops these of `config.residency.ENGINE` from the device. Requests under way wait; what the cache
        held of them is computed again. Without all parts, and until a sync has filled weights that were dropped, a
        request is an error. Parts that are asleep stay so."""

    async def wake(self, parts: Sequence[str]) -> None:
        """Takes memory for these again: weights are undefined until a sync has filled them, the cache is empty. Goes on
        computing once it can. Parts that are there stay so."""

    async def begin_update(self) -> None:
        """Pauses, and gets every worker's parameters ready to be written."""

    async def update_weights(self, checksums: bool) -> None:
        """Receives weights; returns when every worker has all of its shard."""

    async def end_update(self, version: int) -> list[dict[str, float]]:
        """Puts the received weights in place and continues; each worker's report."""

    async def abandon_update(self) -> None:
        """Takes back an update that cannot be finished; stays paused until the next one has ended."""

    async def check_weights(self) -> list[dict[str, Any]]:
        """Receives weights once more and compares them with those in place."""

    async def probe(self) -> None:
        """Returns when every worker has answered."""

    async def measured(self) -> list[tuple[Reading, dict[int, int]]]:
        """Of each worker its memory, and how many steps it made of how many tokens, since the last time."""

    async def record_spans(self, on: bool) -> list[Span]:
        """Records requests from now on, or no more. Returns those that were recorded."""

    async def health(self) -> int:
        """The weight version; raises where the engine is dead."""
