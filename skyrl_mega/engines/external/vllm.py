"""A `vllm serve` elsewhere: tokens by its `/inference/v1/generate`, weights by the routes of its development mode."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import fields
from typing import Any

from skyrl_mega.engines.base import Request, Sampling
from skyrl_mega.engines.external.http import HttpServer
from skyrl_mega.engines.external.server import (
    NewTokens,
    ServerAddress,
    ServerFacts,
    ServerGone,
    ServerRefused,
    stated_version,
)
from skyrl_mega.weights.exchange.executor import ExchangeReport

PLUGIN = "skyrl_mega.engines.vllm.transfer.WorkerExtension"
"""Worker extension of this project, as vLLM shows it in its configuration."""
UPDATE_S = 3600.0
"""Seconds for a step of a weight update; the driver's own limit (`weights.timeout_s`) ends the wait earlier."""
POLL_S = 0.2
"""Seconds between questions for the end of a download."""
COMMAND_S = 120.0
"""Seconds for a pause, a resume or a flush."""
REPORT = frozenset(each.name for each in fields(ExchangeReport))
"""Fields of a worker's report."""
COMPARISON = {"parameters", "bytes", "different"}
"""Fields of a worker's comparison."""
DEVELOPMENT = "start it with VLLM_SERVER_DEV_MODE=1 (docs/endpoints.md)"


class VllmServer(HttpServer):
    """The client of a vLLM server; implements `server.ReceivingServer`, which has more about each method. Every method
    raises ServerGone if the server does not answer, has an error or answers in an unknown form, and ServerRefused if
    the server refuses.

    Args:
        address: The server.
    """

    def __init__(self, address: ServerAddress) -> None:
        super().__init__(address)
        self.plugin = False
        self.workers: int | None = None
        """Number of workers; None until `describe`."""

    async def generate(self, request: Request, sampling: Sampling) -> AsyncIterator[NewTokens]:
        """Yields the new tokens of a request in chunks; the last chunk has `finish`, and states the weight version of
        each token. Raises ServerRefused if the server refuses the request, and ServerGone if the connection fails or an
        event has an unknown form."""
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "stop_token_ids": list(sampling.stop_tokens),
            "include_stop_str_in_output": True,
            "detokenize": bool(sampling.stop),
            "logprobs": 0,
        }
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        body = {
            "request_id": request.id,
            "token_ids": list(request.tokens),
            "sampling_params": {**self.address.options, **parameters},
            "stream": True,
        }
        async for event in self.stream("/inference/v1/generate", body):
            for choice in event.get("choices") or ():
                yield _chunk(choice)

    async def describe(self, vocab: int) -> ServerFacts:
        """Asks for the model's limits and for the configuration, which shows the plug-in, and returns the facts. The
        configuration does not show the vocabulary: the server must accept the last token id as a prompt, and refuse the
        next; else the fact `vocab` is -1.

        Args:
            vocab: Number of token ids of the policy's model.

        Raises:
            ServerRefused: The server is no vLLM, not in development mode, has another `logprobs_mode` than
                `processed_logprobs`, or does not take tokens or the last token id.
            ServerGone: The server does not answer, or in an unknown form.
        """
        models = await self.get("/v1/models")
        try:
            config = (await self.get("/server_info?config_format=json"))["vllm_config"]
            world = await self.get("/get_world_size")
        except ServerRefused as error:
            raise ServerRefused(f"{error}; {DEVELOPMENT}") from None
        try:
            model, parallel = config["model_config"], config["parallel_config"]
            if (mode := model.get("logprobs_mode")) != "processed_logprobs":
                raise ServerRefused(
                    f"its logprobs_mode is {str(mode)[:40]}; start it with --logprobs-mode processed_logprobs"
                )
            backend = (config.get("weight_transfer_config") or {}).get("backend")
            self.plugin = parallel.get("worker_extension_cls") == PLUGIN and backend == "skyrl_mega"
            self.workers = world["world_size"] if type(world["world_size"]) is int else None
            cache = config["cache_config"].get("kv_cache_size_tokens")
            return ServerFacts(
                max_length=models["data"][0]["max_model_len"],
                vocab=vocab if await self._knows_exactly(vocab) else -1,
                dtype=str(model["dtype"]).removeprefix("torch."),
                cache_tokens=cache if isinstance(cache, int) and cache > 0 else None,
                workers=self.workers,
                plugin=self.plugin,
                # vLLM 0.32 leaves reloaded experts in the files' order, and its kernel for a CPU reads packed ones.
                reloads_experts=self.plugin or (config.get("device_config") or {}).get("device_type") != "cpu",
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerGone(f"/server_info has an unknown form: {type(error).__name__} {error}") from None

    async def _knows_exactly(self, vocab: int) -> bool:
        """Returns True if `vocab` is the number of the model's token ids."""
        async for _ in self.generate(Request("vocabulary", [vocab - 1], 1, 0), Sampling()):
            pass
        try:
            async for _ in self.generate(Request("vocabulary", [vocab], 1, 0), Sampling()):
                pass
        except ServerRefused:
            return True
        return False

    async def version(self) -> int:
        """Returns the version of the weights; 0 for a version that no sync set."""
        answer = await self.get("/weight_info")
        return stated_version(answer.get("weight_version") if isinstance(answer, dict) else None)

    async def update(self, source: Mapping[str, Any], version: int) -> None:
        """Makes every worker load the Hugging Face directory `source["path"]`, and then sets the server's weight
        version to `version`.

        Workers with the plug-in use the plug-in's loader, other workers use vLLM's `reload_weights`.

        Raises:
            ServerGone: The server failed, or did not load within `source["timeout_s"]` seconds.
            ServerRefused: The server refuses.
        """
        seconds, path = source["timeout_s"], source["path"]
        if self.plugin:
            await self._workers("load_files", [path], seconds)
        else:
            await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}, seconds)
        await self.post("/update_weight_version", {"new_version": str(version)}, COMMAND_S)

    async def pause(self) -> None:
        """Stops generation; the requests under way are kept."""
        await self.post("/pause?mode=keep", None, COMMAND_S)

    async def resume(self) -> None:
        """Continues generation, and the requests kept by `pause`."""
        await self.post("/resume", None, COMMAND_S)

    async def flush(self) -> None:
        """Drops the cache of prefixes, and of requests under way, which compute their tokens again. Raises ServerGone
        unless the server reports success."""
        answer = await self.post("/reset_prefix_cache?reset_running_requests=true", None, COMMAND_S)
        if answer != {"success": True}:
            raise ServerGone(self.hidden(f"/reset_prefix_cache answered {str(answer)[:200]}"))

    # ---- weights with the plug-in ----------------------------------------------------------------------------------

    async def connect(self, info: dict[str, Any]) -> None:
        """Connects every worker to the process group of weight transfers. `info` as in `Engine.connect_weights`."""
        await self.post("/init_weight_transfer_engine", {"init_info": info}, UPDATE_S)

    async def fetch(self, source: dict[str, Any], version: int) -> None:
        """Makes every worker download its shard, and waits, without limit, for the end of all downloads. `version` is
        not used. `source` as in `Engine.fetch_weights`."""
        await self._workers("start_fetch", [source], COMMAND_S)
        while set(await self._workers("fetched", [], COMMAND_S)) != {"True"}:  # vLLM sends other values as text
            await asyncio.sleep(POLL_S)  # the download is bounded by the source's own limit

    async def begin(self) -> None:
        """Opens every worker's parameters for writing."""
        await self.post("/start_weight_update", None, COMMAND_S)

    async def receive(self, checksums: bool) -> None:
        """Receives or installs the weights of every worker. `checksums` as in `Engine.update_weights`."""
        await self.post("/update_weights", {"update_info": {"checksums": checksums}}, UPDATE_S)

    async def end(self, version: int) -> list[dict[str, float]]:
        """Installs the weights as `version`; returns each worker's report by the fields of `ExchangeReport`."""
        await self.post("/finish_weight_update", {"weight_version": str(version)}, COMMAND_S)
        return await self._reports(COMMAND_S)

    async def abandon(self) -> None:
        """Abandons an update in every worker."""
        await self._workers("abandon_update", [], COMMAND_S)

    async def compare(self) -> list[dict[str, Any]]:
        """Returns for each worker, after a comparison of its weights with the policy's, the number of `parameters`, the
        `bytes` received, and the names of `different` parameters; raises ServerGone for an answer of another form."""
        answers = await self._workers("check_weights", [], UPDATE_S)
        for answer in answers:
            names = answer.get("different") if isinstance(answer, dict) and set(answer) == COMPARISON else None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ServerGone("a worker's comparison of weights has an unknown form")
            _check_numbers(answer, COMPARISON - {"different"})
        return answers

    async def probe(self) -> None:
        """Waits for an answer of every worker."""
        await self._reports(UPDATE_S)

    async def _reports(self, seconds: float) -> list[dict[str, float]]:
        """Returns each worker's report of its last update; raises ServerGone for one of another form."""
        reports = await self._workers("transfer_report", [], seconds)
        for report in reports:
            if not isinstance(report, dict) or not REPORT.issuperset(report):
                raise ServerGone(f"a worker's report of an update has an unknown form: {str(report)[:200]}")
            _check_numbers(report, report)
        return reports

    async def _workers(self, method: str, args: list[Any], seconds: float) -> list[Any]:
        """Calls a method of every worker and returns the answers; raises ServerGone for no answer, or for more answers
        than workers."""
        answer = await self.post("/collective_rpc", {"method": method, "args": args}, seconds)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results or len(results) > (self.workers or len(results)):
            raise ServerGone(f"/collective_rpc: no usable answer from {self.workers or 'all'} workers to {method}")
        return results


def _check_numbers(answer: Mapping[str, Any], names: Collection[str]) -> None:
    """Raises ServerGone unless these fields are finite numbers of at least 0."""
    for name in names:
        value = answer[name]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ServerGone(f"a worker answered {name} = {ascii(value)[:60]}, which is no number of seconds or bytes")


def _chunk(choice: Mapping[str, Any]) -> NewTokens:
    """Returns the tokens of an event; the last event of a request states the weight version of each token.

    Raises:
        ServerGone: A field is missing or of another type.
    """
    try:
        if choice.get("index", 0) != 0:
            raise ServerGone("a second answer came to a request")
        tokens = choice["token_ids"] or []
        content = (choice.get("logprobs") or {}).get("content") or []
        if [entry["token_id"] for entry in content] != tokens:
            raise ServerGone("log-probs came for other tokens")
        logprobs = [entry["logprob"] for entry in content]
        spans = choice.get("weight_versions") or []
        versions = tuple((stated_version(span["version"]), int(span["start"])) for span in spans)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ServerGone(f"an event of /inference/v1/generate has an unknown form: {repr(error)[:200]}") from None
    return NewTokens(tokens, logprobs, choice.get("finish_reason"), versions)
