"""One vLLM engine in a Ray actor: tokens in, tokens out, weights from the policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import RolloutConfig

if TYPE_CHECKING:
    from vllm import SamplingParams

LOOK_EVERY_S = 0.5
"""How often a call under way looks whether vLLM's process is still there."""
ROUTER = r"re:.*\.mlp\.gate$"
"""Stays as it is in an engine that quantises what it loads, as in FP8 checkpoints: rounded, it picks other experts."""
ABORT_AGAIN_S = 1.0
COALESCE_S = 0.004
"""Completions that end within so many seconds travel in one message."""


class EngineDied(RuntimeError):
    """vLLM's own process is gone; only a new engine helps."""


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
    tokens: list[int]
    max_tokens: int
    seed: int
    """Seeds this request's own generator, so that its draws do not depend on its neighbours in a batch."""
    seconds: float | None = None
    """Time that it has; past it, it ends with the tokens that there are, of which there may be none. None: no end."""


@dataclass(frozen=True)
class Completion:
    """What an engine made of a request."""

    id: str
    tokens: list[int]
    """New tokens, the one that ended it included."""
    logprobs: list[float]
    """Natural log-prob of each token under the distribution it was drawn from: after temperature, top-k and top-p."""
    finish: str
    """`stop` (a stop token or string), `length`, or `timeout` (of its own `seconds`)."""
    versions: tuple[tuple[int, int], ...]
    """(weight version, index of its first token): more than one where a sync came in between."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of."""

    path: str
    """Hugging Face directory: config.json, and tokenizer files where stop strings are used."""
    dtype: str
    device: str
    """`cpu` or `cuda`."""
    rollout: RolloutConfig
    max_length: int
    """Longest sequence, prompt and response."""
    weights: str = "dummy"
    """`dummy` (the first sync brings them) or `auto` (read from the directory)."""
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    """More vLLM engine arguments; `rollout.options` goes before them."""


def environment(spec: EngineSpec) -> dict[str, str]:
    """Environment variables of the engine's process, set before it starts."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_HOST_IP": "127.0.0.1",  # its own processes are all on this node
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "skyrl_mega",
    }
    if spec.device == "cpu":
        env |= {
            "OMP_NUM_THREADS": str(spec.rollout.threads),
            # Policy and engine share the cores and take turns: pinned threads would queue for one of them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if spec.rollout.tensor == 1:
            # Else vLLM puts its one worker into a third process: 7 s more to start.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if spec.rollout.eager:
            # vLLM compiles a helper of its sampler even in eager mode: 18 s at the first request.
            env["TORCHDYNAMO_DISABLE"] = "1"
    return env


class Engine:
    """An asynchronous vLLM engine. Start it with `start`; Ray then runs its methods concurrently on one event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.version = 0
        self.running = 0
        if not (Path(spec.path) / "config.json").is_file():
            raise UserError(f"model.path={spec.path}: there is no config.json; give a Hugging Face directory")

    async def start(self) -> dict[str, Any]:
        """Loads the model and runs one token through it. Returns facts about the engine.

        Raises:
            UserError: vLLM refuses the settings.
        """
        from pydantic import ValidationError
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.arguments()))
        except ValidationError as error:  # which Ray could not carry
            told = "; ".join(found["msg"] for found in error.errors(include_url=False, include_input=False))
            raise UserError(f"rollout.options={self.spec.rollout.options}: vLLM refuses the settings: {told}") from None
        await self.llm.update_weight_version(str(self.version))
        async for _ in self.generate_many([Request("warm-up", [0], 2, 0)], Sampling(), 600.0):
            pass
        return {"block": self.llm.vllm_config.cache_config.block_size}

    def arguments(self) -> dict[str, Any]:
        """vLLM's engine arguments."""
        from vllm.config import WeightTransferConfig

        from skyrl_mega.weights.vllm_plugin import BACKEND

        spec, rollout = self.spec, self.spec.rollout
        arguments: dict[str, Any] = {
            "model": spec.path,
            "dtype": spec.dtype,
            "load_format": spec.weights,
            "seed": spec.seed,
            "tensor_parallel_size": rollout.tensor,
            "max_model_len": spec.max_length,
            "max_num_seqs": rollout.concurrency,
            # A whole wave of prompts may be prefilled in one step, but never less than the longest sequence.
            "max_num_batched_tokens": max(spec.max_length, 8192),
            "enforce_eager": rollout.eager,
            "skip_tokenizer_init": not rollout.sampling.stop,
            "generation_config": "vllm",  # nothing of the directory's sampling defaults
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            "worker_extension_cls": "skyrl_mega.weights.vllm_engine.WorkerExtension",
        }
        if spec.device == "cpu":
            arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)
            arguments["distributed_executor_backend"] = "uni" if rollout.tensor == 1 else "mp"
            # The draw after half a prompt is taken back; vLLM cannot do that to a seeded CPU generator, and dies.
            arguments["enable_chunked_prefill"] = False
        else:
            arguments["gpu_memory_utilization"] = rollout.memory_fraction
            arguments["distributed_executor_backend"] = "mp"
        if str(rollout.options.get("quantization", "")).startswith("fp8_"):
            arguments["quantization_config"] = {"ignore": [ROUTER]}
        return arguments | spec.extra | rollout.options

    # ---- generation ------------------------------------------------------------------------------------------------

    async def generate_many(
        self, requests: list[Request], sampling: Sampling, timeout_s: float
    ) -> AsyncIterator[list[Completion]]:
        """Continues prompts and yields completions in small lists as they end.

        An idle engine takes all requests in before it computes the first one, so that the same call with the same
        weights forms the same batches and gives the same numbers to the last bit.

        Args:
            requests: Prompts.
            sampling: Shared by all of them.
            timeout_s: Seconds for each request.

        Raises:
            TimeoutError: A request took longer; names it.
        """
        done: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        held = self.running == 0
        self.running += len(requests)
        if held:
            await self._answer(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
        tasks = [asyncio.create_task(self._generate(request, sampling, timeout_s, done)) for request in requests]
        try:
            if held:
                await asyncio.sleep(0)  # every task has now handed its request to the engine's queue
                await self._answer(self.llm.engine_core.resume_scheduler_async())
            left = len(requests)
            while left:
                ended = [await done.get()]
                await asyncio.sleep(COALESCE_S)
                while not done.empty():
                    ended.append(done.get_nowait())
                for outcome in ended:
                    if isinstance(outcome, BaseException):
                        raise outcome
                left -= len(ended)
                yield ended  # type: ignore[misc]
        finally:
            self.running -= len(requests)
            for task in tasks:
                task.cancel()

    async def _generate(
        self, request: Request, sampling: Sampling, timeout_s: float, done: asyncio.Queue[Completion | BaseException]
    ) -> None:
        from vllm.inputs.engine import tokens_input

        output = None
        alarm = None if request.seconds is None else asyncio.create_task(self._abort(request.id, request.seconds))
        try:
            async with asyncio.timeout(timeout_s):
                stream = self.llm.generate(tokens_input(request.tokens), self.parameters(request, sampling), request.id)
                async for output in stream:  # noqa: B007  (the last one is read below)
                    pass
        except TimeoutError:
            done.put_nowait(TimeoutError(f"request {request.id}: no end within {timeout_s:g} s"))
            return
        except Exception as error:  # handed to the caller, who raises it
            done.put_nowait(self._named(error))
            return
        finally:
            if alarm is not None:
                alarm.cancel()
        assert output is not None
        result = output.outputs[0]
        done.put_nowait(
            Completion(
                request.id,
                list(result.token_ids),
                list(result.logprobs.logprobs),
                "timeout" if result.finish_reason == "abort" else str(result.finish_reason),
                tuple((int(span.version), span.start) for span in result.weight_versions or []),
            )
        )

    async def _abort(self, request: str, seconds: float) -> None:
        """Ends a request once its time is over; its last output has the tokens so far."""
        await asyncio.sleep(seconds)
        while True:  # until it has ended: the first call may find it not yet known
            await self.llm.abort(request)
            await asyncio.sleep(ABORT_AGAIN_S)

    def parameters(self, request: Request, sampling: Sampling) -> SamplingParams:
        """vLLM's sampling parameters for a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=request.max_tokens,
            seed=request.seed,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_tokens),
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    async def forget(self) -> None:
        """Empties the prefix cache."""
        await self._answer(self.llm.reset_prefix_cache())

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def connect_weights(self, info: dict[str, Any]) -> None:
        """Joins every worker to the group that weights travel in; see `weights.vllm_engine.InitInfo`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._answer(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(info)))

    async def pause(self) -> None:
        """Stops computing. Requests under way stay where they are; caches of the old weights are dropped."""
        await self._answer(self.llm.pause_generation(mode="keep", clear_cache=True))

    async def resume(self) -> None:
        """Goes on computing."""
        await self._answer(self.llm.resume_generation())

    async def begin_update(self) -> None:
        """Pauses and gets every worker's parameters ready to be written."""
        await self.pause()
        await self._answer(self.llm.start_weight_update())

    async def update_weights(self, checksums: bool) -> None:
        """Receives weights; returns when every worker has all of its shard. `checksums`: each part is proved."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._answer(self.llm.update_weights(WeightTransferUpdateRequest({"checksums": checksums})))

    async def end_update(self, version: int) -> list[dict[str, float]]:
        """Puts the received weights in place and goes on; from here on they are version `version`.

        Returns each worker's `pipeline.Report` as a dict.
        """
        await self._answer(self.llm.finish_weight_update(str(version)))
        self.version = version
        await self.resume()
        return await self.workers("transfer_report")

    async def abandon_update(self) -> None:
        """Takes back an update that cannot be finished. The engine stays paused until the next one has ended."""
        await self.workers("abandon_update")

    async def check_weights(self) -> list[dict[str, Any]]:
        """Receives weights once more and compares them with those in place; see `weights.sync.Compared`."""
        await self.pause()
        found = await self.workers("check_weights")
        await self.resume()
        return found

    async def probe(self) -> None:
        """Returns when every worker has answered."""
        await self.workers("transfer_report")

    async def workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of `weights.vllm_engine.WorkerExtension` in every worker, with plain values only."""
        found: list[Any] = await self._answer(self.llm.collective_rpc(method, args=args))
        return found

    async def _answer(self, call: Coroutine[Any, Any, Any]) -> Any:
        """vLLM's answer. When its engine process dies, vLLM leaves the calls under way without one; here they fail."""
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait([task], timeout=LOOK_EVERY_S))[0]:
            if self.llm.errored:
                task.cancel()
                raise EngineDied("vLLM's process died while a call was under way")
        try:
            return task.result()
        except Exception as error:
            raise self._named(error) from error

    def _named(self, error: Exception) -> Exception:
        """What vLLM raised; its many words for its own death are one here."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.llm.errored or isinstance(error, EngineDeadError):
            return EngineDied(f"vLLM's process died: {error}")
        return error

    # ---- life ------------------------------------------------------------------------------------------------------

    async def health(self) -> int:
        """The weight version; raises where the engine is dead."""
        await self.llm.check_health()
        return self.version
