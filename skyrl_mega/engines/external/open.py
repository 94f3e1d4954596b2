"""The entry of `rollout.endpoints` as seen by a client: which class, which checks before the first request."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import httpx

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.imports import load
from skyrl_mega.config.derived import engine_ranks, length_limit
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.endpoints import KEY, EndpointConfig, entries
from skyrl_mega.engines.base import EngineDied, Request, Sampling
from skyrl_mega.engines.external.http import HttpServer
from skyrl_mega.engines.external.server import InferenceServer, ServerAddress, ServerFacts, ServerRefused
from skyrl_mega.engines.external.sglang import SglangServer
from skyrl_mega.engines.external.vllm import VllmServer
from skyrl_mega.weights.members import DIRECTORY, FILES, GROUP

METHODS = ("generate", "version", "update", "pause", "resume", "flush")
"""Methods of a user's class (`server.InferenceServer`)."""
CLIENTS: dict[str, type[HttpServer]] = {"vllm": VllmServer, "sglang": SglangServer}
"""Kind → client."""
RETRY_S = 1.0
"""Seconds between attempts to reach a server."""
REACH_S = 60.0
"""Seconds for a server's answers before a run; the first tokens may compile kernels."""
FIRST = 2
"""Tokens that a server generates before its first real request."""


@dataclass(frozen=True)
class ExternalSpec:
    """A server as an engine of a run."""

    key: str
    """Key of the entry, such as `rollout.endpoints.0`."""
    kind: str
    """`vllm`, `sglang` or `path:Class`."""
    sync: str
    """How the server takes new weights: `GROUP`, `FILES` or `DIRECTORY` of `weights.members`."""
    address: ServerAddress
    silence_s: float
    """Seconds without a token for any request (`rollout.request_timeout_s`)."""
    max_length: int
    """Maximum length of a sequence."""
    vocab: int
    """Number of token ids of the model."""
    workers: int
    """Workers of an engine of the run; with `GROUP` the server needs as many."""
    dtype: str
    """Type of the policy's weights (`model.dtype`)."""
    experts: bool = False
    """True if the model has experts."""

    @property
    def name(self) -> str:
        """Name for the user: kind and address."""
        return f"{self.kind} at {self.address.url}"


def specs(config: Config, vocab: int, experts: bool = False) -> list[ExternalSpec]:
    """Returns the servers of `rollout.endpoints`, with API keys from the environment.

    Args:
        config: The settings.
        vocab: Number of token ids of the model.
        experts: True if the model has experts.

    Raises:
        UserError: The environment variable of an API key is not set.
    """
    rollout = config.rollout
    return [
        ExternalSpec(
            key=f"{KEY}.{number}",
            kind=entry.kind,
            sync=entry.way,
            address=ServerAddress(
                entry.url.rstrip("/"), _token(entry, number), entry.concurrency or rollout.concurrency, entry.options
            ),
            silence_s=rollout.request_timeout_s,
            max_length=length_limit(rollout),
            vocab=vocab,
            dtype=config.model.dtype,
            workers=engine_ranks(rollout),
            experts=experts,
        )
        for number, entry in enumerate(entries(rollout.endpoints))
    ]


def _token(entry: EndpointConfig, number: int) -> str | None:
    if entry.token_env is None:
        return None
    token = os.environ.get(entry.token_env, "").strip()
    if not token or not token.isascii() or not token.isprintable():
        why = "the environment variable has no API key; set it before the run"
        raise UserError(why, key=f"{KEY}.{number}.token_env", value=entry.token_env)
    return token


def open_server(spec: ExternalSpec) -> InferenceServer:
    """Returns the client of a server, without asking the server anything.

    Raises:
        UserError: The address is invalid; or the class of a user cannot be imported, lacks a method, or its constructor
            raised an exception.
    """
    if spec.kind in CLIENTS:
        try:
            return cast(InferenceServer, CLIENTS[spec.kind](spec.address))
        except (httpx.InvalidURL, ValueError) as error:
            raise UserError(f"{error}", key=f"{spec.key}.url", value=spec.address.url) from None
    kind = load(spec.kind, f"{spec.key}.kind")
    if missing := [name for name in METHODS if not callable(getattr(kind, name, None))]:
        why = f"the class has no method {missing[0]}; it needs {', '.join(METHODS)} (docs/endpoints.md)"
        raise UserError(why, key=f"{spec.key}.kind", value=spec.kind)
    try:
        server: InferenceServer = kind(spec.address)
    except Exception as error:  # a class of the user may raise anything
        why = f"its constructor raised {type(error).__name__}: {error}"
        raise UserError(why, key=f"{spec.key}.kind", value=spec.kind) from error
    return server


def check_servers(config: Config, vocab: int, experts: bool = False) -> None:
    """Examines all servers of `rollout.endpoints` at once, before any process of a run starts. Asks each server for a
    few tokens; waits at most `REACH_S` seconds.

    Args:
        config: The settings.
        vocab: Number of token ids of the model.
        experts: True if the model has experts.

    Raises:
        UserError: A server does not answer within `REACH_S`, or does not fit the run (vocabulary, maximum length, type,
            way of taking weights), or its API key is not set.
    """

    async def check(spec: ExternalSpec) -> None:
        try:
            async with asyncio.timeout(REACH_S):
                await examine(open_server(spec), spec)
        except (EngineDied, TimeoutError) as error:
            why = f"the server does not answer: {str(error) or f'no answer within {REACH_S:g} s'}"
            fix = "start it first (docs/endpoints.md)"
            raise UserError(why, key=f"{spec.key}.url", value=spec.address.url, fix=fix) from error

    async def check_all() -> None:
        await asyncio.gather(*map(check, specs(config, vocab, experts)))

    asyncio.run(check_all())


async def ready(server: InferenceServer, spec: ExternalSpec) -> ServerFacts:
    """Examines a server and returns its facts, as `examine` does. After an EngineDied prints the error and tries again
    every `RETRY_S` seconds, without limit. Raises UserError if the server does not fit the run."""
    while True:
        try:
            return await examine(server, spec)
        except EngineDied as error:
            print(f"{spec.name}: {error}", flush=True)  # into the actor's log
            await asyncio.sleep(RETRY_S)


async def examine(server: InferenceServer, spec: ExternalSpec) -> ServerFacts:
    """Examines a server and returns its facts: the server has what its way of taking weights needs, and returns tokens
    with log-probs. If the server states vocabulary, type and maximum length, these fit the policy and the run.

    Raises:
        UserError: The server does not fit the run, or refuses a question or the first tokens.
        EngineDied: The server does not answer or has an error, or a class of the user raised another exception.
    """
    url = spec.address.url
    describe: Callable[[int], Awaitable[ServerFacts]] | None = getattr(server, "describe", None)
    try:
        facts = await describe(spec.vocab) if describe is not None else ServerFacts()
        _check(facts, spec)
        await server.version()
        await _first_tokens(server, spec)
    except ServerRefused as error:
        raise UserError(f"{error}", key=f"{spec.key}.url", value=url, fix="see docs/endpoints.md") from error
    except (UserError, EngineDied):
        raise
    except Exception as error:  # a class of the user may raise anything
        raise EngineDied(f"{type(error).__name__}: {error}") from error
    return facts


def _check(facts: ServerFacts, spec: ExternalSpec) -> None:
    url = spec.address.url
    if facts.max_length is not None and facts.max_length < spec.max_length:
        why = f"the server takes {facts.max_length} tokens, and rollout's limits allow {spec.max_length}"
        raise UserError(why, key=f"{spec.key}.url", value=url, fix="start it with a larger maximum length")
    if facts.cache_tokens is not None and facts.cache_tokens < spec.max_length:
        why = f"the server's KV cache has {facts.cache_tokens} tokens, and rollout's limits allow {spec.max_length}"
        raise UserError(why, key=f"{spec.key}.url", value=url, fix="start it with a larger cache")
    if facts.vocab is not None and facts.vocab != spec.vocab:
        why = f"the server's model has another vocabulary than the policy's, which has {spec.vocab} token ids"
        raise UserError(why, key=f"{spec.key}.url", value=url, fix="start it with the model of model.path")
    if facts.dtype not in (None, spec.dtype):
        why = f"the server computes in {facts.dtype[:20]}, and model.dtype is {spec.dtype}"
        raise UserError(why, key=f"{spec.key}.url", value=url, fix=f"start it with --dtype {spec.dtype}")
    if spec.sync in (GROUP, FILES) and not facts.plugin:
        why = f"sync={spec.sync} needs the plug-in of skyrl_mega in the server, which it does not have"
        raise UserError(why, key=f"{spec.key}.sync", value=spec.sync, fix="start it as docs/endpoints.md shows")
    if spec.sync == DIRECTORY and spec.experts and not facts.reloads_experts:
        why = "vLLM on a CPU serves wrong experts after it has loaded a directory without the plug-in of skyrl_mega"
        raise UserError(why, key=f"{spec.key}.sync", value=spec.sync, fix="start it with the plug-in")
    if spec.sync == GROUP and facts.workers not in (None, spec.workers):
        why = f"the server has {facts.workers} workers, and engines of the run have {spec.workers}"
        fix = f"start it with --tensor-parallel-size {spec.workers}, or give sync: files"
        raise UserError(why, key=f"{spec.key}.sync", value=spec.sync, fix=fix)


async def _first_tokens(server: InferenceServer, spec: ExternalSpec) -> None:
    request = Request(f"first-{os.urandom(4).hex()}", [0, spec.vocab - 1], FIRST, 0)
    tokens: list[int] = []
    logprobs: list[Any] = []
    async for chunk in server.generate(request, Sampling()):
        tokens += chunk.tokens
        logprobs += chunk.logprobs
    if not tokens or len(tokens) != len(logprobs):
        why = f"the server returned {len(tokens)} tokens with {len(logprobs)} log-probs for a prompt"
        raise UserError(why, key=f"{spec.key}.url", value=spec.address.url, fix="see docs/endpoints.md")
