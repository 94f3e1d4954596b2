"""An SGLang server elsewhere, by the documented HTTP interface of its runtime."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from skyrl_mega.engines.base import Request, Sampling
from skyrl_mega.engines.external.http import HttpServer
from skyrl_mega.engines.external.server import NewTokens, ServerFacts, ServerGone, ServerRefused, stated_version

COMMAND_S = 120.0
"""Seconds for a pause, a resume or a flush."""
GREEDY = 1e-6
"""Temperatures below count as 0."""


class SglangServer(HttpServer):
    """The client of an SGLang server; implements `server.DescribedServer`. Every method raises ServerGone if the server
    does not answer, has an error or answers in an unknown form, and ServerRefused if the server refuses."""

    async def generate(self, request: Request, sampling: Sampling) -> AsyncIterator[NewTokens]:
        """Yields the new tokens of a request in chunks, with the weight version of each token if the server states
        versions, and `finish` in the last chunk. SGLang repeats earlier tokens in each event unless its incremental
        streaming is on; repeated tokens are left out. Raises ServerRefused if the server refuses the request, and
        ServerGone if the connection fails or an event has an unknown form."""
        parameters: dict[str, Any] = {
            "temperature": 0.0 if sampling.temperature < GREEDY else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "max_new_tokens": request.max_tokens,
            "stop_token_ids": list(sampling.stop_tokens),
            "sampling_seed": request.seed % 2**31,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        body = {
            "rid": request.id,
            "input_ids": list(request.tokens),
            "sampling_params": {**self.address.options, **parameters},
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
        }
        seen = 0
        versions: tuple[tuple[int, int], ...] = ()
        async for event in self.stream("/generate", body):
            chunk, stated = _chunk(event, seen)
            if chunk.tokens and stated is not None and (not versions or versions[-1][0] != stated):
                versions = (*versions, (stated, seen))
            seen += len(chunk.tokens)
            yield replace(chunk, versions=() if stated is None else versions)

    async def describe(self, vocab: int) -> ServerFacts:
        """Returns the server's maximum length, cache size and number of workers, each None if not stated; the server
        does not state the vocabulary, so `vocab` is ignored. Raises ServerRefused for a model that generates nothing,
        or if the server refuses a question, and ServerGone if the server does not answer."""
        model = await self.get("/get_model_info")
        server = await self._server_info()
        if not isinstance(model, dict) or not model.get("is_generation", True):
            raise ServerRefused("/get_model_info: the model generates no text")
        length = server.get("context_length") or model.get("max_context_length")
        cache, workers = server.get("max_total_num_tokens"), server.get("tp_size")
        return ServerFacts(
            max_length=length if isinstance(length, int) else None,
            cache_tokens=cache if isinstance(cache, int) and cache > 0 else None,
            workers=workers if isinstance(workers, int) else None,
        )

    async def _server_info(self) -> dict[str, Any]:
        try:
            info = await self.get("/get_server_info")
        except ServerRefused:  # newer servers know the shorter name alone
            info = await self.get("/server_info")
        return info if isinstance(info, dict) else {}

    async def version(self) -> int:
        """Returns the version of the weights; 0 for a version that no update set."""
        answer = await self.get("/get_model_info")
        return stated_version(answer.get("weight_version")) if isinstance(answer, dict) else 0

    async def update(self, source: Mapping[str, Any], version: int) -> None:
        """Makes the server load a Hugging Face directory, which it must see under the same path, and state `version`.
        Raises ServerGone if the loading failed or took longer than `source["timeout_s"]` seconds, and ServerRefused if
        the server refuses."""
        body = {
            "model_path": source["path"],
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": True,
            "keep_pause": True,
        }
        answer = await self.post("/update_weights_from_disk", body, source["timeout_s"])
        if not isinstance(answer, dict) or answer.get("success") is not True:
            message = answer.get("message") if isinstance(answer, dict) else answer
            raise ServerGone(self.hidden(f"/update_weights_from_disk failed: {str(message)[:300]}"))

    async def pause(self) -> None:
        """Stops generation: puts the requests under way back into the server's queue; they continue with new
        weights."""
        await self.post("/pause_generation", {"mode": "retract"}, COMMAND_S)

    async def resume(self) -> None:
        """Continues generation, and the requests in the server's queue."""
        await self.post("/continue_generation", {}, COMMAND_S)

    async def flush(self) -> None:
        """Drops the cache of prefixes. Raises ServerRefused if the server still runs requests."""
        await self.post("/flush_cache", None, COMMAND_S)


def _chunk(event: Mapping[str, Any], seen: int) -> tuple[NewTokens, int | None]:
    """Returns the new tokens of an event, and the weight version stated there, if any.

    Args:
        event: The event.
        seen: Tokens in earlier events.

    Raises:
        ServerGone: A field is missing or of another type.
    """
    try:
        if event.get("index", 0) != 0:
            raise ServerGone("a second answer came to a request")
        about = event["meta_info"]
        pairs = about.get("output_token_logprobs") or []
        total, reason = int(about["completion_tokens"]), about.get("finish_reason")
        new = pairs[len(pairs) - (total - seen) :] if total > seen else []
        if len(new) != total - seen:
            raise ServerGone(f"log-probs came for {len(new)} of {total - seen} new tokens")
        tokens, logprobs = [pair[1] for pair in new], [pair[0] for pair in new]
        finish = reason["type"] if reason else None
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ServerGone(f"an event of /generate has an unknown form: {repr(error)[:200]}") from None
    stated = about.get("weight_version")
    return NewTokens(tokens, logprobs, finish), None if stated is None else stated_version(stated)
