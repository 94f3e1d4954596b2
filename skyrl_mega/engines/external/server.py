"""The six methods by which a run uses an inference server, and the facts that a server may state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_mega.engines.base import EngineDied, Request, Sampling

LONGEST_VERSION = 16
"""Digits from which a stated version is no version."""


@dataclass(frozen=True)
class ServerAddress:
    """Everything that a client needs to use a server."""

    url: str
    """Base address, without a slash at the end."""
    token: str | None = field(default=None, repr=False)
    """API key, sent as bearer token; None sends none."""
    concurrency: int = 256
    """Most requests at once."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`options` of the entry in `rollout.endpoints`."""


@dataclass(frozen=True)
class NewTokens:
    """New tokens of a request."""

    tokens: Sequence[int]
    """Token ids."""
    logprobs: Sequence[float]
    """Natural log-prob of each token under the distribution used for sampling."""
    finish: str | None = None
    """`stop` or `length` in the last chunk of a request, else None."""
    versions: tuple[tuple[int, int], ...] = ()
    """Pairs (weight version, index of its first token) over all tokens of the request so far. () states none here: the
    tokens then count as of the version that the server stated last, which is asked again at the end of the request.
    """


@dataclass(frozen=True)
class ServerFacts:
    """Properties of a server, None where the server states none."""

    max_length: int | None = None
    """Maximum length of a sequence in tokens."""
    vocab: int | None = None
    """Number of token ids of the model."""
    dtype: str | None = None
    """Type of the weights, such as `bfloat16`."""
    cache_tokens: int | None = None
    """Capacity of the KV cache in tokens."""
    workers: int | None = None
    """Number of workers, with data-parallel replicas."""
    plugin: bool = False
    """True if the server runs this project's worker extension and weight transfer engine."""
    reloads_experts: bool = True
    """False if the server serves wrong experts after loading a directory."""


def stated_version(text: Any) -> int:
    """Returns a version stated as text; 0 for anything else than a number, such as `default`, a name that no sync
    gave."""
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < LONGEST_VERSION else 0


class ServerRefused(RuntimeError):
    """A server's refusal of a request, with a status that no repetition changes."""


class ServerGone(EngineDied):
    """A server that does not answer, or answers in an unknown form."""


class InferenceServer(Protocol):
    """An inference server. A class of the user implements these six methods; the constructor takes a `ServerAddress`.

    All methods run on a single event loop; `generate` runs many times at once. An exception other than `ServerRefused`
    means that the server is gone: the requests move to other engines, and the server serves again after the next weight
    sync.
    """

    def generate(self, request: Request, sampling: Sampling) -> AsyncIterator[NewTokens]:
        """Continues a prompt; yields the new tokens, in any number of chunks, with `finish` in the last chunk. Closing
        the iterator ends the request.

        Args:
            request: The prompt, the most new tokens and the seed.
            sampling: Sampling parameters; a final stop token belongs to the new tokens.

        Raises:
            ServerRefused: The server refuses the request.
        """

    async def version(self) -> int:
        """Returns the version of the server's weights, as the server states it; 0 for weights that no `update`
        delivered."""

    async def update(self, source: Mapping[str, Any], version: int) -> None:
        """Makes the server load the weights at `source`, and state `version` from then on. Called while paused.

        Args:
            source: "path", a Hugging Face directory, and "timeout_s", the time limit in seconds.
            version: Number of the weights.
        """

    async def pause(self) -> None:
        """Stops computing; requests under way wait, or continue after `resume`."""

    async def resume(self) -> None:
        """Resumes computing after `pause`."""

    async def flush(self) -> None:
        """Drops cached prefixes, which belong to other weights. Called after each update, while paused."""


class DescribedServer(InferenceServer, Protocol):
    """A server that states its properties, for a check before the run."""

    async def describe(self, vocab: int) -> ServerFacts:
        """Returns the properties that the server states; None for each property that it does not state.

        Args:
            vocab: Number of token ids of the policy's model, to compare with.

        Raises:
            ServerGone: The server does not answer.
            ServerRefused: The server cannot be used for a run.
        """


class ReceivingServer(DescribedServer, Protocol):
    """A server whose workers receive their own shards: `sync` is `group` or `files`. Methods follow the order of
    `engines.base.Engine`. Every method raises `ServerGone` if the server does not answer, and `ServerRefused` if it
    refuses."""

    async def connect(self, info: dict[str, Any]) -> None:
        """Connects every worker to the process group of weight transfers (`Engine.connect_weights`)."""

    async def fetch(self, source: dict[str, Any], version: int) -> None:
        """Makes every worker download its shard (`Engine.fetch_weights`)."""

    async def begin(self) -> None:
        """Opens every worker's parameters for writing; the server is paused (`Engine.begin_update`)."""

    async def receive(self, checksums: bool) -> None:
        """Receives or installs the weights of every worker (`Engine.update_weights`)."""

    async def end(self, version: int) -> list[dict[str, float]]:
        """Installs the weights as `version`; returns each worker's report by the fields of `ExchangeReport`."""

    async def abandon(self) -> None:
        """Abandons an update in every worker, and leaves the process group."""

    async def compare(self) -> list[dict[str, Any]]:
        """Returns for each worker, after a comparison with the policy's weights, the number of `parameters`, the
        `bytes` received, and the names of `different` parameters. If `sync` is `group`, the policy ranks must send at
        the same time (`Engine.check_weights`)."""

    async def probe(self) -> None:
        """Waits for an answer of every worker."""
