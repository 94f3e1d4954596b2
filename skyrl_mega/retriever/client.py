"""The client of a retrieval service: this project's, or any that answers as Search-R1's retriever does."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import httpx

from skyrl_mega.config.outside import parsed
from skyrl_mega.config.terminal import one_line

TOKEN_VARIABLE = "SKYRL_MEGA_RETRIEVER_TOKEN"
"""The environment variable that holds a service's token, for the service itself and for the command line."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses between attempts grow twofold from the one to the other; each is drawn between half and all of that."""
WORTH_A_RETRY = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Hit:
    """A passage that was found."""

    id: str
    contents: str
    """`"title"`, a line break, the text."""
    score: float
    """Inner product of unit vectors, or BM25; higher is better."""


class RetrievalError(Exception):
    """A search that got no answer in its time, or was refused. Names the URL and the cause."""


class Client:
    """Asks one service. Threads may share it; connections are kept and used again.

    The machine's proxies are not asked: the service is a neighbour.

    Args:
        url: `http://host:port`, with or without `/retrieve` at its end.
        token: Sent as a bearer token.
        timeout_s: Seconds for one search, all its attempts and pauses included.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/").removesuffix("/retrieve").rstrip("/")
        self.timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.Client(headers=headers, limits=limits, trust_env=False)

    def search(self, queries: Sequence[str], topk: int | None = None, method: str | None = None) -> list[list[Hit]]:
        """The best passages for each query, best first.

        Args:
            queries: As the service should read them, without an embedding model's prefix.
            topk: Passages of each query at most; None leaves it to the service.
            method: `dense` or `bm25`; None leaves it to the service.

        Raises:
            RetrievalError: No answer within `timeout_s`, a refusal, or an answer of another form.
        """
        body: dict[str, Any] = {"queries": list(queries), "topk": topk, "return_scores": True}
        if method is not None:
            body["method"] = method
        reply = self._ask("POST", "/retrieve", body)
        try:
            found = [[_hit(hit) for hit in hits] for hits in reply["result"]]
        except (KeyError, TypeError, ValueError) as error:
            raise RetrievalError(f"{self.url}/retrieve answered in another form: {error!r}") from error
        if len(found) != len(queries):
            raise RetrievalError(f"{self.url}/retrieve answered {len(found)} queries of {len(queries)}")
        return found

    def health(self) -> dict[str, Any]:
        """What the service says of itself: `ready`, `version`, `passages`, `methods`, `waiting`.

        Raises:
            RetrievalError: As `search`; also while it is not ready for all of `timeout_s`.
        """
        return self._ask("GET", "/health", None)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _ask(self, verb: str, path: str, body: dict[str, Any] | None) -> Any:
        start, attempts, pause = time.monotonic(), 0, FIRST_PAUSE_S
        while True:
            attempts += 1
            left = self.timeout_s - (time.monotonic() - start)
            # Half of the whole at most: a service that hangs leaves time for another try.
            limit = max(min(left, self.timeout_s / 2), 0.01)
            wanted = 0.0
            try:
                response = self._http.request(verb, self.url + path, json=body, timeout=limit)
                if response.is_success:
                    return parsed(response.content)
                cause = f"HTTP {response.status_code}: {_first_line(response)}"
                if response.status_code not in WORTH_A_RETRY:
                    raise RetrievalError(f"{self.url}{path} refused: {cause}")
                wanted = _retry_after(response)
            except httpx.TransportError as error:
                cause = f"{type(error).__name__}: {error}"
            except (httpx.InvalidURL, httpx.DecodingError, ValueError) as error:  # no URL, or an answer that is no JSON
                raise RetrievalError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
            rest = max(wanted, pause * random.uniform(0.5, 1.0))  # drawn, so that many do not come back at once
            left = self.timeout_s - (time.monotonic() - start)
            if rest >= left:
                raise RetrievalError(
                    f"{self.url}{path} gave no answer in {self.timeout_s:g} s ({attempts} attempts); the last: {cause}"
                )
            time.sleep(rest)
            pause = min(2 * pause, LONGEST_PAUSE_S)


@lru_cache(maxsize=16)
def shared_client(url: str, token: str | None, timeout_s: float) -> Client:
    """The one client of this process for these settings: environments are many, and made all the time."""
    return Client(url, token, timeout_s)


def _hit(given: Any) -> Hit:
    contents = given["document"]["contents"]
    if not isinstance(contents, str):
        raise TypeError(f"contents is {type(contents).__name__}; allowed is text")
    return Hit(str(given["document"]["id"]), contents, float(given["score"]))


def _first_line(response: httpx.Response) -> str:
    return one_line((response.text.strip().splitlines() or [response.reason_phrase])[0], 300)


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the service asks for; 0 when it does not say (or says a date)."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0
