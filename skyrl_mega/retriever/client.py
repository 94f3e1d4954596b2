"""Client for a retrieval service: this project's, or any service with the protocol of Search-R1's retriever."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import httpx

from skyrl_mega.common.replies import NoAnswer, Retries, ask_again, error_text
from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.common.values import shown

TOKEN_VARIABLE = "SKYRL_MEGA_RETRIEVER_TOKEN"
"""Environment variable with the token of a service, for the service and for the command line."""
PAUSES_S = (0.1, 5.0)
"""First and longest pause between attempts."""


@dataclass(frozen=True)
class Hit:
    """A retrieved passage with its score."""

    id: str
    """Id of the passage in the corpus."""
    contents: str
    """`"title"`, a line break, the text."""
    score: float
    """Inner product of unit vectors, or BM25; higher is better."""


class RetrievalError(Exception):
    """A search failed or was rejected. Names the URL and the cause."""


class SearchClient:
    """A client of a retrieval service. Thread-safe; connections are kept and reused.

    The machine's proxies are ignored, because the service runs nearby. Requests run in an event loop in a separate
    thread: only there can the time of a whole reply be limited, rather than the time of each read.

    Args:
        url: `http://host:port`, with or without `/retrieve` at the end.
        token: Sent as a bearer token.
        timeout_s: Seconds for a search, including all attempts and pauses.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        self.url = url.rstrip("/").removesuffix("/retrieve").rstrip("/")
        self.timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(headers=headers, limits=limits, trust_env=False)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="retriever-client", daemon=True).start()

    def search(self, queries: Sequence[str], topk: int | None = None, method: str | None = None) -> list[list[Hit]]:
        """Returns the best passages for each query, best first; fewer than `topk` if the service has no more.

        Args:
            queries: Queries without an embedding model's prefix.
            topk: Maximum number of passages per query; None leaves the choice to the service.
            method: `dense` or `bm25`; None leaves the choice to the service.

        Raises:
            RetrievalError: No answer within `timeout_s`, a rejection, an answer of another form, or a closed client.
        """
        body: dict[str, Any] = {"queries": list(queries), "topk": topk, "return_scores": True}
        if method is not None:
            body["method"] = method
        reply = self._wait(self._ask("POST", "/retrieve", body))
        try:
            results = [[_hit(hit) for hit in hits] for hits in reply["result"]]
        except Malformed as error:
            raise RetrievalError(f"{self.url}/retrieve did not answer as Search-R1's retriever: {error}") from error
        except (KeyError, TypeError) as error:
            raise RetrievalError(f"{self.url}/retrieve did not answer as Search-R1's retriever: {error!r}") from error
        if len(results) != len(queries):
            raise RetrievalError(f"{self.url}/retrieve answered {len(results)} queries of {len(queries)}")
        if topk is not None and (longest := max(map(len, results), default=0)) > topk:
            raise RetrievalError(f"{self.url}/retrieve answered {longest} passages where topk = {topk}")
        return results

    def health(self) -> dict[str, Any]:
        """Waits until the service is ready and returns its state: `ready`, `version`, `passages`, `methods`, `waiting`.

        Raises:
            RetrievalError: The service does not answer or become ready within `timeout_s`, rejects the request, or
                answers in another form, or the client is closed.
        """
        state = self._wait(self._ask("GET", "/health", None))
        if not isinstance(state, dict):
            raise RetrievalError(f"{self.url}/health answered {shown(state)}; allowed is a JSON object")
        return state

    def close(self) -> None:
        """Closes the connections and ends the client's thread; a later search raises RetrievalError. Does nothing if
        the client is closed."""
        if self._http.is_closed:
            return
        self._wait(self._http.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, doing: Coroutine[Any, Any, Any]) -> Any:
        if self._http.is_closed:  # the event loop has ended and would never answer
            doing.close()
            raise RetrievalError(f"{self.url}: this client is closed; create another SearchClient")
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result()

    async def _ask(self, verb: str, path: str, body: dict[str, Any] | None) -> Any:
        url, retries = self.url + path, Retries(*PAUSES_S, total_s=self.timeout_s)
        try:
            # at most half of the total time for an attempt, to leave time for a retry if the service hangs
            response, data = await ask_again(self._http, verb, url, body, self.timeout_s / 2, retries=retries)
            if response.is_success:
                return parse_json(data)
        except NoAnswer as error:
            tried = f"{error.attempts} attempts"
            raise RetrievalError(
                f"{url} gave no answer in {self.timeout_s:g} s ({tried}); the last: {error}"
            ) from error
        # invalid URL, or an answer other than JSON
        except (httpx.InvalidURL, httpx.DecodingError, ValueError) as error:
            raise RetrievalError(f"{url}: {type(error).__name__}: {error}") from error
        raise RetrievalError(f"{url} refused: HTTP {response.status_code}: {error_text(response, data)}")


@lru_cache(maxsize=16)
def shared_client(url: str, token: str | None, timeout_s: float) -> SearchClient:
    """Returns this process's `SearchClient` for an address, a token (None: a service without a token) and the seconds
    of a search with all attempts; creates the client at the first call. `close` must not be called on a shared client.

    Environments, which are created all the time, share connections in this way.
    """
    return SearchClient(url, token, timeout_s)


def _hit(answer: Any) -> Hit:
    """Parses a hit of the answer.

    Raises:
        Malformed: A part has the wrong type, or the score is not a finite number.
        KeyError, TypeError: A part is missing.
    """
    name, contents, score = answer["document"]["id"], answer["document"]["contents"], answer["score"]
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise Malformed(f"id {shown(name)}; allowed: text or a whole number")
    if not isinstance(contents, str):
        raise Malformed(f"contents is {type(contents).__name__}; allowed is text")
    try:
        number = float(score) if isinstance(score, int | float) and not isinstance(score, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Malformed(f"score {shown(score)}; allowed are finite numbers")
    return Hit(str(name), contents, number)
