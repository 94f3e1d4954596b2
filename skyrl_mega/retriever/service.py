"""HTTP service over an index.

POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}
    → {"result": [[{"document": {"id", "contents"}, "score"}, …], …]}     Search-R1's form
GET /health → {"ready", "version", "passages", "methods", "waiting"}      503 while the index is loading
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, Field
from starlette.middleware.base import RequestResponseEndpoint

from skyrl_mega import __version__
from skyrl_mega.cluster.atomic_output import atomic_file, refuse_file
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import is_unicode
from skyrl_mega.common.terminal import one_line
from skyrl_mega.retriever.batcher import Batcher, BatchLimits, QueueFull
from skyrl_mega.retriever.client import TOKEN_VARIABLE, Hit
from skyrl_mega.retriever.connections import TimeLimitedProtocol
from skyrl_mega.retriever.index import Index, read_recipe

RETRY_AFTER_S = 1
"""Seconds after which a client rejected with 503 may ask again."""
BODY_BYTES = 64 * 2**20
"""Maximum size of a request's body."""
LEAVE_S = 10
"""Time limit in seconds for answering accepted requests after a stop."""

PASSAGES = 32_768
"""Maximum number of passages per answer: queries · topk."""
PASSAGES_AT_ONCE = 4 * PASSAGES
"""Maximum number of passages of all pending answers."""


def _text(query: str) -> str:
    if not is_unicode(query):
        raise ValueError("half of a surrogate pair is no text")
    return query


Query = Annotated[str, Field(max_length=20_000), AfterValidator(_text)]


class SearchRequest(BaseModel):
    """Body of `POST /retrieve`."""

    queries: list[Query]
    topk: int | None = Field(default=None, ge=1, le=1000)
    """Maximum number of passages per query; None: the service's default."""
    return_scores: bool = False
    """True adds the score to each passage."""
    method: str | None = None
    """`dense` or `bm25`; None: the service's default."""


class Service:
    """The web application: loads the index in the background, then answers requests.

    Args:
        folder: Index folder.
        topk: Default number of passages per query.
        method: Default method, `dense` or `bm25`; None means the index's first.
        token: Bearer token required for `/retrieve`; None requires none.
        limits: Limits of batching.
        opening: Further arguments of `Index`.

    Raises:
        UserError: There is no index, or the index does not offer this method.
    """

    def __init__(
        self,
        folder: Path,
        *,
        topk: int = 3,
        method: str | None = None,
        token: str | None = None,
        limits: BatchLimits | None = None,
        **opening: Any,
    ) -> None:
        recipe, self.size = read_recipe(folder)
        self.methods = recipe.methods
        if method is not None and method not in self.methods:
            raise UserError(f"allowed by {folder}: {', '.join(self.methods)}", key="--method", value=method)
        self.folder, self.topk, self.token, self.opening = folder, topk, token, opening
        self.method = method or self.methods[0]
        self.limits = limits or BatchLimits()
        self.batcher: Batcher | None = None
        """None until the index is loaded."""
        self.loaded = asyncio.Event()
        self.load_error: Exception | None = None
        """Error raised while loading the index."""
        self.app = FastAPI(lifespan=self._life, openapi_url=None)
        self.app.get("/health")(self.health)
        self.app.post("/retrieve")(self.retrieve)
        self.app.middleware("http")(self._admit)
        self.app.exception_handler(RequestValidationError)(_refused)
        self.pending_passages = 0
        """Number of passages in pending answers."""

    async def health(self) -> JSONResponse:
        """Returns readiness, version, number of passages, methods and waiting queries; status 503 until the index is
        loaded.

        Needs no token and reveals no passage.
        """
        ready = self.batcher is not None
        state = {"ready": ready, "version": __version__, "passages": self.size, "methods": list(self.methods)}
        waiting = self.batcher.waiting if self.batcher else 0
        headers = None if ready else {"Retry-After": str(RETRY_AFTER_S)}
        return JSONResponse({**state, "waiting": waiting}, 200 if ready else 503, headers)

    async def retrieve(self, question: SearchRequest) -> dict[str, Any]:
        """Waits for the results of a request's queries and returns `{"result": …}`, with a list of passages, best
        first, for each query. A passage has `id` and `contents`; with `return_scores` an object with `document` and
        `score` takes its place.

        Raises:
            HTTPException: 422 for an unknown method, 413 for too many queries or passages, 503 while the index is read
                or too many queries are waiting.
            Exception: The error of the search; the web framework then answers 500.
        """
        method = question.method or self.method
        if method not in self.methods:
            raise HTTPException(422, f"method {method!r}: allowed: {', '.join(self.methods)}")
        if len(question.queries) > self.limits.waiting:
            raise HTTPException(413, f"{len(question.queries)} queries: allowed: {self.limits.waiting} in one request")
        if self.batcher is None:
            raise _unavailable("the index is being read")
        topk = question.topk or self.topk
        passages = len(question.queries) * topk
        if passages > PASSAGES:
            many = f"{len(question.queries)} queries of topk {topk} are {passages} passages"
            raise HTTPException(413, f"{many}: allowed: {PASSAGES} in one request")
        if self.pending_passages + passages > PASSAGES_AT_ONCE:
            raise _unavailable(f"{self.pending_passages} passages are being looked for, allowed: {PASSAGES_AT_ONCE}")
        self.pending_passages += passages
        try:
            results = await self.batcher.ask(question.queries, topk, method)
        except QueueFull as error:
            raise _unavailable(f"{self.batcher.waiting} queries are waiting, allowed: {self.limits.waiting}") from error
        finally:
            self.pending_passages -= passages
        return {"result": [[_document(hit, question.return_scores) for hit in hits] for hits in results]}

    async def _admit(self, request: Request, go_on: RequestResponseEndpoint) -> Response:
        """Rejects requests without the token, or with a body that is too long, before the body is read."""
        if request.url.path != "/health":
            authorization = request.headers.get("Authorization", "")
            if self.token and not hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode()):
                return JSONResponse({"detail": "a bearer token is needed"}, 401, {"WWW-Authenticate": "Bearer"})
            length = request.headers.get("Content-Length", "")
            if not length.isdigit() or int(length) > BODY_BYTES:
                return JSONResponse({"detail": f"a body needs a Content-Length of at most {BODY_BYTES}"}, 413)
        return await go_on(request)

    @asynccontextmanager
    async def _life(self, app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(self._run())
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def _run(self) -> None:
        try:
            index = await asyncio.to_thread(Index, self.folder, **self.opening)
        except Exception as error:  # `serve` reports the error and ends
            self.load_error = error
            return
        finally:
            self.loaded.set()
        self.batcher = Batcher(index.search, self.limits)
        await self.batcher.run()


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """Describes an invalid body without quoting it: the content may not be valid in JSON."""
    assert isinstance(error, RequestValidationError)
    messages = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()[:5]]
    return JSONResponse({"detail": one_line("; ".join(messages), 500)}, 422)


def _document(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.id, "contents": hit.contents}
    return {"document": document, "score": hit.score} if with_score else document


def _unavailable(why: str) -> HTTPException:
    return HTTPException(503, why, {"Retry-After": str(RETRY_AFTER_S)})


def serve(service: Service, host: str, port: int, ready_file: Path | None = None, with_stdin: bool = False) -> None:
    """Serves until SIGTERM or SIGINT, then answers the accepted requests, for at most 10 seconds, and returns. Prints
    the address at the start and when the index is loaded.

    Must be called in the main thread: replaces its handlers of these signals.

    Args:
        service: The application.
        host: Address to bind.
        port: Port to bind; 0 selects a free port.
        ready_file: Written when the index is loaded, None for no file: a JSON object with `url` and `pid`. Removed at
            the end.
        with_stdin: Also end when standard input ends, to avoid outliving the process that holds the pipe.

    Raises:
        UserError: The address cannot be bound; or it is not a loopback address and there is no token; or `ready_file`
            exists with other content.
        Exception: Loading the index failed.
    """
    check_address(host, service.token)
    if ready_file:
        refuse_file(ready_file, "--ready-file", _is_ready_file)
    server = uvicorn.Server(
        uvicorn.Config(
            service.app,
            http=TimeLimitedProtocol,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=LEAVE_S,
        )
    )
    with _bound_socket(host, port) as listening:
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn handles these while serving and raises them again afterwards
            signal.signal(number, lambda *_: None)
        if with_stdin:
            threading.Thread(target=_end_with_stdin, args=(server,), daemon=True).start()
        try:
            asyncio.run(_serve(server, service, listening, url, ready_file))
        finally:
            if ready_file:
                with suppress(FileNotFoundError):
                    if _is_ready_file(ready_file):
                        ready_file.unlink()
    if service.load_error:
        raise service.load_error


def check_address(host: str, token: str | None) -> None:
    """Raises an error if a service without a token would be reachable from other machines.

    Args:
        host: Address to bind; a host name other than localhost counts as reachable.
        token: The service's token; None or empty: no token.

    Raises:
        UserError: `host` is no loopback address, and there is no token.
    """
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        loopback = False
    if not loopback and not token:
        raise UserError(
            f"other machines can reach it, so it needs a token; set {TOKEN_VARIABLE}, or give 127.0.0.1",
            key="--host",
            value=host,
        )


async def _serve(
    server: uvicorn.Server, service: Service, listening: socket.socket, url: str, ready_file: Path | None
) -> None:
    print(f"{url}: reading {service.folder}", flush=True)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    announcing = asyncio.create_task(_announce(server, service, url, ready_file))
    await serving
    announcing.cancel()


async def _announce(server: uvicorn.Server, service: Service, url: str, ready_file: Path | None) -> None:
    await service.loaded.wait()
    if service.load_error:
        server.should_exit = True
        return
    print(f"{url}: ready, {service.size} passages, {service.method}", flush=True)
    if ready_file:
        with atomic_file(ready_file, "--ready-file", _is_ready_file) as part:
            part.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")


def _is_ready_file(file: Path) -> bool:
    with file.open("rb") as opened:
        try:
            content = json.loads(opened.read(2**12))
        except ValueError:
            return False
    return isinstance(content, dict) and content.keys() == {"url", "pid"}


def _bound_socket(host: str, port: int) -> socket.socket:
    """Returns a bound socket; uvicorn listens on it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise UserError(
            error.strerror, key="--host", value=f"{host} --port {port}", fix="--port 0 takes a free one"
        ) from error
    return listening


def _end_with_stdin(server: uvicorn.Server) -> None:
    # unbuffered: the lock of a buffer would still be held at the end of the process
    while os.read(sys.stdin.fileno(), 4096):
        pass
    server.should_exit = True
