"""The interface of an inference engine, as used by the driver; `vllm/` contains the only implementation.

The driver calls an engine's actor through Ray by these method names; tests substitute simulated engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_mega.telemetry.memory import MemoryReading
from skyrl_mega.telemetry.trace import Span
from skyrl_mega.weights.members import GROUP

if TYPE_CHECKING:
    import numpy as np


class EngineDied(RuntimeError):
    """An engine's process is gone or stalled; only a new engine helps."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters shared by all requests of a call."""

    temperature: float = 1.0
    """Divisor of the logits; 0 always takes the likeliest token."""
    top_p: float = 1.0
    """Smallest total probability of the tokens sampled from; 1.0 keeps all tokens."""
    top_k: int = -1
    """Number of the likeliest tokens sampled from; -1 keeps all tokens."""
    stop: tuple[str, ...] = ()
    """Strings ending a turn; kept in the output. Known only to an engine with a tokenizer."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids ending a turn (end of sequence); kept in the output."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue."""

    id: str
    """Unique name: the trajectory's name, `/`, and the number of the turn."""
    tokens: Sequence[int]
    """Token ids of the prompt."""
    max_tokens: int
    """Most tokens to generate."""
    seed: int
    """Seed of this request's own generator, so samples do not depend on other requests in the batch."""
    seconds: float | None = None
    """Time limit in seconds; afterwards the request ends with the tokens so far, possibly none. None means no limit."""
    routes_from: int = 0
    """Position in `tokens` of the first wanted route, for engines returning routes; earlier routes are known."""
    prompt: int | None = None
    """Prompt number in the data, in a trajectory's first turn: requests of the same number have the same tokens."""

    @property
    def trajectory(self) -> str:
        """Name of the turn's trajectory: the part of `id` before the last `/`."""
        return self.id.rpartition("/")[0]


@dataclass(frozen=True)
class Completion:
    """An engine's response to a request."""

    id: str
    """`Request.id`."""
    tokens: Sequence[int]
    """New tokens, including the final stop token."""
    logprobs: Sequence[float]
    """Natural log-prob of each token under the distribution used for sampling: after temperature, top-k and top-p."""
    finish: str
    """`stop` (a stop token or string), `length`, or `timeout` (the request's own `seconds`)."""
    versions: tuple[tuple[int, int], ...]
    """Pairs (weight version, index of the version's first token); several if a sync came in between."""
    routes: np.ndarray | None = None
    """Experts of every token read by the engine from `routes_from` on, [n, M, K] as in `models.routes`. The last new
    token was not read. None without a new token, and from an engine without routes.
    """


@dataclass(frozen=True)
class Facts:
    """Properties measured by an engine at start."""

    cache_tokens: int
    """Capacity of the cache in tokens; every sequence takes `sequence_tokens` in addition to its own."""
    cache_bytes: int
    """Bytes of the KV cache in each worker."""
    weights: str = GROUP
    """How the engine takes new weights: `GROUP`, `FILES` or `DIRECTORY` of `weights.members`."""
    sequence_tokens: int = 0
    """Part of the cache taken by every sequence besides its tokens, in tokens: states of recurrent layers, sliding
    windows."""
    foreign: bool = False
    """True for a server outside of the run (`ForeignEngine`), whose word about its weights is not enough."""


@dataclass
class Drafts:
    """Counts of draft tokens (`rollout.drafts`) in an engine. Tokens count when their request ends."""

    written: int = 0
    """Tokens of the answers."""
    drafted: int = 0
    """Draft tokens that were checked."""
    accepted: int = 0
    """Draft tokens that became tokens of an answer."""
    steps: int = 0
    """Steps of the engine, of all replicas."""
    suppressed: int = 0
    """Steps without drafts, because drafts would have cost more time than they save."""

    def add(self, other: Drafts) -> None:
        """Adds the counts of `other` to these counts, in place."""
        for name, count in asdict(other).items():
            setattr(self, name, getattr(self, name) + count)


class Engine(Protocol):
    """An inference engine: tokens in, tokens out, weights from the policy. Methods may run concurrently on one event
    loop.

    Every method but `drain` and `record_spans` asks the engine's process, and raises EngineDied if the process is gone
    or stalled; the methods below name further errors.
    """

    async def start(self, former: Facts | None = None) -> Facts:
        """Loads the model and returns the measured facts; to be called before any other method. Waits without limit;
        the caller sets one.

        Args:
            former: Facts of the engine that this engine replaces: the cache gets the same size. None: the engine
                decides the size.

        Raises:
            UserError: The engine rejects the settings, or computes on another device here.
        """

    def generate_many(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[list[Completion]]:
        """Continues prompts; yields completions in small lists as requests end, each request once and in no given
        order. Empty lists show that the engine still works.

        The end of `Request.seconds` is not an error (`finish` is then `timeout`). Closing the iterator early ends the
        other requests. During `pause` and an update requests are accepted, and wait.

        Args:
            requests: Prompts with their limits; each `id` occurs once.
            sampling: Sampling settings of all requests.

        Raises:
            EngineDied: The engine's process is gone or stalled.
            NotReady: A part is asleep, or weights are undefined.
            WrongRoutes: The engine returned expert routes that do not belong to a request.
        """

    async def forget(self) -> None:
        """Drops the cached prefixes of earlier requests; later requests compute all of their tokens. No request may be
        under way."""

    async def drain(self) -> None:
        """Waits, without limit, until no request is under way. Refuses no new request."""

    async def connect_weights(self, info: dict[str, Any]) -> None:
        """Connects every worker to the process group of weight transfers, and leaves a former group first. Returns
        after all processes of the group joined, at most after the connection's `timeout_s`.

        Args:
            info: Fields of `engines.vllm.transfer.InitInfo`: the connection, and this engine's index in the group.

        Raises:
            EngineDied: The engine's process is gone.
            Exception: A process did not join; the type may be lost, the message names the process.
        """

    async def fetch_weights(self, source: dict[str, Any], version: int) -> None:
        """Downloads weight version `version` into host memory or onto the engine's disk; called in place of
        `connect_weights` for an engine with `Facts.weights` `FILES` or `DIRECTORY`. The engine keeps generating with
        its present weights. `begin_update`, `update_weights`, which installs the downloaded weights, and `end_update`
        follow; `abandon_update` drops the download.

        Args:
            source: Place of the weights, plain values only. `FILES`: the fields of `weights.files.source.Source`, for
                `WorkerExtension.start_fetch`. `DIRECTORY`: "path", a Hugging Face directory, and "timeout_s", the time
                limit in seconds.
            version: Number of the weights to download.

        Raises:
            EngineDied: The engine's process is gone.
            Exception: The weights cannot be read, or a checksum differs; the type may be lost.
        """

    async def pause(self) -> None:
        """Stops computing until `resume`; requests under way are kept and new ones wait, cached prefixes are
        dropped."""

    async def resume(self) -> None:
        """Resumes computing after `pause`.

        Raises:
            NotReady: A part is asleep, or weights are undefined.
        """

    async def sleep(self, parts: Sequence[str]) -> None:
        """Pauses the engine and frees the device memory of parts, without keeping a copy. Requests under way wait.

        Cached tokens are computed again. A new request raises NotReady while a part is asleep, and until a sync after
        dropping weights.

        Args:
            parts: "engine_weights", "kv_cache" (`config.residency.ENGINE`). Parts already asleep stay asleep.

        Raises:
            ValueError: The engine was started to keep one of the parts.
        """

    async def wake(self, parts: Sequence[str]) -> None:
        """Allocates memory for parts again. Resumes computing once all parts are present and the weights are defined.

        Dropped weights are undefined until a sync; the cache is empty.

        Args:
            parts: "engine_weights", "kv_cache" (`config.residency.ENGINE`). Parts already present stay.
        """

    async def begin_update(self) -> None:
        """Pauses the engine and opens every worker's parameters for writing; to be called after `connect_weights` or
        `fetch_weights`.

        Raises:
            NotReady: The weights are asleep.
            EngineDied: The engine's process is gone.
        """

    async def update_weights(self, checksums: bool) -> None:
        """Receives weights from the policy ranks after `begin_update`; returns when the weights of all workers are
        complete. All policy ranks and engines of the group must exchange at the same time. After `fetch_weights`,
        writes the downloaded weights instead, and needs no policy rank.

        Args:
            checksums: True to verify each part after arrival; the same in the policy ranks.

        Raises:
            EngineDied: The engine's process is gone.
            Exception: The transfer failed, or a checksum differs; the type may be lost. `abandon_update` must follow.
        """

    async def end_update(self, version: int) -> list[dict[str, float]]:
        """Installs the received weights as version `version` and resumes computing, unless a part is asleep.

        Returns:
            Each worker's seconds and bytes of the update, by the fields of `weights.exchange.executor.ExchangeReport`.

        Raises:
            Exception: A worker lacks a part of the weights, or a server states another version.
        """

    async def abandon_update(self) -> None:
        """Abandons an update that cannot be finished, and leaves the process group. Until the end of the next update,
        which needs `connect_weights` or `fetch_weights` first, a new request raises NotReady, and an engine paused by
        `begin_update` stays paused; any other engine continues its requests under way."""

    async def check_weights(self) -> list[dict[str, Any]]:
        """Receives weights again for comparison with the weights in place, which stay; the policy ranks must send, with
        checksums, at the same time. An engine that read files compares with the weights last downloaded, without the
        policy ranks. A difference raises nothing.

        Returns:
            For each worker: number of `parameters`, `bytes` received, and the names of `different` parameters; [] from
            an engine that cannot compare.

        Raises:
            NotReady: The weights are asleep.
        """

    async def probe(self) -> None:
        """Waits for an answer of every worker, without limit, as a check for hanging workers. Raises EngineDied if a
        process is gone."""

    async def measured(self) -> list[tuple[MemoryReading, dict[int, int]]]:
        """Returns for each worker, since the previous call: the memory use, and tokens in a model step → number of such
        steps. Steps before the first call are not counted. [] from an engine whose memory is not the run's."""

    async def drafts(self) -> Drafts:
        """Returns the counts of draft tokens since the previous call; zeros from an engine without draft tokens."""

    async def record_spans(self, on: bool) -> list[Span]:
        """Starts (`on=True`) or stops recording the times of requests; returns the spans recorded since the previous
        call, [] if recording was off. A request is recorded when it ends."""

    async def health(self) -> int:
        """Returns the version of the weights installed last, 0 before the first weight sync.

        Raises:
            Exception: The engine is dead.
        """


class ForeignEngine(Engine, Protocol):
    """An engine whose server is not the run's. After each update the driver compares log-probs with the policy's before
    tokens of the new version reach a trajectory.
    """

    async def sample_probes(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        """Returns completions with the weights of the last update, in the order of `requests`; also before `trust`.

        Args:
            requests: Prompts with their limits; each `id` occurs once.
            sampling: Sampling settings of all requests.

        Raises:
            EngineDied: The server is gone.
            ServerRefused: The server refuses a request.
        """

    async def trust(self) -> None:
        """Releases the completions held back since the last update."""
