"""One vLLM engine in a Ray actor: tokens in, tokens out, weights from the policy."""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl_mega.config.errors import UserError
from skyrl_mega.engines.base import Completion, EngineDied, Facts, Request, Sampling
from skyrl_mega.engines.presence import Presence
from skyrl_mega.engines.vllm import routes
from skyrl_mega.engines.vllm.plugin import MAY_HOLD
from skyrl_mega.engines.vllm.spec import EngineSpec, arguments, scales
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.routes import RouteShape
from skyrl_mega.telemetry.memory import Reading
from skyrl_mega.telemetry.trace import Span

if TYPE_CHECKING:
    from vllm import SamplingParams

LOOK_EVERY_S = 0.5
"""How often a call under way looks whether vLLM's process is still there."""
ABORT_AGAIN_S = 1.0
COALESCE_S = 0.004
"""Completions that end within so many seconds travel in one message."""
BEATS = 4
"""While nothing ends, a call gives so many signs of life within `rollout.request_timeout_s`."""


class VllmEngine:
    """An asynchronous vLLM engine, an `engines.base.Engine`.

    Start it with `start`; Ray then runs its methods concurrently on one event loop.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.version = 0
        self.running = 0
        """Requests under way."""
        self.ended = 0
        """Tokens of all requests that have ended."""
        self.watched = False
        """Whether time without a token counts: not in a pause, nor before the first request has been answered, for
        which kernels may be compiled."""
        self.spans: list[Span] | None = None
        """Of the requests that have ended, while they are recorded."""
        self.presence = Presence(spec.sleeps)
        self.paused = False
        """Whether it was told to stop computing: for a sync, a sleep."""
        self.calls: set[asyncio.Queue[Completion | BaseException]] = set()
        """Where the calls of `generate_many` under way wait."""
        if not (Path(spec.path) / "config.json").is_file():
            raise UserError(f"model.path={spec.path}: there is no config.json; give a Hugging Face directory")
        self.shape = _shape(spec) if spec.routes else None
        """Of the routes that completions bring."""

    async def start(self, former: Facts | None = None) -> Facts:
        """Loads the model and runs one token through it.

        Args:
            former: What an engine found that ran in this one's place; None for the first. Its cache has the same size.

        Raises:
            UserError: vLLM refuses the settings, or computes on another device here.
        """
        from pydantic import ValidationError
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        if current_platform.device_type != self.spec.device:  # it decides for itself, and never says so
            raise UserError(
                f"cluster.device = {self.spec.device}: vLLM computes on {current_platform.device_type or 'nothing'} on "
                "this node; give the environment of `make cuda` to every node, or cluster.device=cpu"
            )
        for name, value in scales(self.spec, hopper=current_platform.is_device_capability(90)).items():
            os.environ.setdefault(name, value)
        try:
            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(self.spec, former)))
        except ValidationError as error:  # which Ray could not carry
            told = "; ".join(found["msg"] for found in error.errors(include_url=False, include_input=False))
            raise UserError(f"rollout.options={self.spec.rollout.options}: vLLM refuses the settings: {told}") from None
        if self.spec.device == "cpu":
            await self.workers("draw_seeds_ahead")
        await self.llm.update_weight_version(str(self.version))
        if self._records:
            await self.workers("record_routes")
        async for _ in self.generate_many([Request("warm-up", [0], 2, 0)], Sampling()):
            pass
        self.watched = True
        tokens = self.llm.vllm_config.cache_config.kv_cache_size_tokens
        return Facts(cache_tokens=tokens, cache_bytes=min(await self.workers("cache_bytes")))

    # ---- generation ------------------------------------------------------------------------------------------------

    async def generate_many(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[list[Completion]]:
        """Continues prompts and yields completions in small lists as they end; empty ones are signs of life.

        An idle engine takes all requests in before it computes the first one, so that the same call with the same
        weights forms the same batches and gives the same numbers to the last bit.

        A request may take as long as it needs: how long it waits for a place in the cache depends on the others, and
        its tokens are bounded by `max_tokens`. What is bounded is the time in which no request gets a token.

        Args:
            requests: Prompts.
            sampling: Shared by all of them.

        Raises:
            EngineDied: vLLM's process is gone, or gave no request a token for `rollout.request_timeout_s`.
            NotReady: A part of it is asleep, or its weights are undefined.
        """
        self.presence.check()
        done: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        held = self.running == 0
        self.running += len(requests)
        self.calls.add(done)
        tasks: list[asyncio.Task[None]] = []
        try:
            if held:
                self.watch = asyncio.create_task(self._watch())
                await self._answer(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
            tasks += [asyncio.create_task(self._generate(request, sampling, done)) for request in requests]
            if held:
                await asyncio.sleep(0)  # every task has now handed its request to the engine's queue
            if held and self.presence.ready and not self.paused:  # it may have been told to sleep or wait meanwhile
                await self._answer(self.llm.engine_core.resume_scheduler_async())
            left = len(requests)
            while left:
                try:
                    async with asyncio.timeout(self.spec.rollout.request_timeout_s / BEATS):
                        ended = [await done.get()]
                except TimeoutError:
                    yield []
                    continue
                await asyncio.sleep(COALESCE_S)
                while not done.empty():
                    ended.append(done.get_nowait())
                answers = []
                for outcome in ended:
                    if isinstance(outcome, BaseException):
                        raise outcome
                    answers.append(outcome)
                left -= len(answers)
                yield await self._with_routes(answers, requests)
        finally:
            self.running -= len(requests)
            self.calls.discard(done)
            if not self.running:
                self.watch.cancel()
            for task in tasks:
                task.cancel()

    async def _watch(self) -> None:
        """Ends the calls under way when vLLM stands still: for too long no request has got a token.

        Only what passes while this process runs and vLLM may compute is counted: not a pause for a weight sync, nor
        the time in which the process itself was stopped.
        """
        limit = self.spec.rollout.request_timeout_s
        every = min(LOOK_EVERY_S, limit / 10)
        loop = asyncio.get_running_loop()
        tokens, still, before = -1, 0.0, loop.time()
        while still < limit:
            await asyncio.sleep(every)
            seen, now = self._tokens(), loop.time()
            still = still + min(now - before, 2 * every) if self.watched and seen == tokens else 0.0
            tokens, before = seen, now
        for done in self.calls:
            done.put_nowait(
                EngineDied(
                    f"vLLM stands still: none of its {self.running} requests got a token for {limit:g} s "
                    "(rollout.request_timeout_s)"
                )
            )

    def _tokens(self) -> int:
        """Tokens that requests have got so far, those of requests under way among them."""
        under_way = self.llm.output_processor.request_states.values()
        return self.ended + sum(state.detokenizer.num_output_tokens() for state in under_way if state.detokenizer)

    async def _generate(
        self, request: Request, sampling: Sampling, done: asyncio.Queue[Completion | BaseException]
    ) -> None:
        from vllm.inputs.engine import tokens_input

        output, began = None, time.time()
        alarm = None if request.seconds is None else asyncio.create_task(self._abort(request.id, request.seconds))
        try:
            stream = self.llm.generate(
                tokens_input(list(request.tokens)), self.parameters(request, sampling), request.id
            )
            async for output in stream:  # noqa: B007  (the last one is read below)
                pass
        except Exception as error:  # handed to the caller, who raises it
            done.put_nowait(self._named(error))
            return
        finally:
            if alarm is not None:
                alarm.cancel()
        assert output is not None
        if self.spans is not None:
            about = {"prompt": len(request.tokens), "tokens": len(output.outputs[0].token_ids)}
            self.spans.append(Span(request.id, began, time.time(), about))
        try:
            done.put_nowait(self._completion(request, output.outputs[0]))
        except routes.WrongRoutes as error:
            done.put_nowait(error)

    def _completion(self, request: Request, result: Any) -> Completion:
        self.ended += len(result.token_ids)
        found = None
        if self.shape and not self._records and result.token_ids:
            count = len(request.tokens) + len(result.token_ids) - 1 - request.routes_from
            found = routes.of_output(result.routed_experts, count, shape=self.shape, name=request.id)
        return Completion(
            request.id,
            array("i", result.token_ids),
            array("f", result.logprobs.logprobs),
            "timeout" if result.finish_reason == "abort" else str(result.finish_reason),
            tuple((int(span.version), span.start) for span in result.weight_versions or []),
            found,
        )

    # ---- routes ----------------------------------------------------------------------------------------------------

    @property
    def _records(self) -> bool:
        """Whether the worker records routes: vLLM's runner on CUDA gives them itself."""
        return self.shape is not None and self.spec.device == "cpu"

    async def _with_routes(self, ended: list[Completion], requests: list[Request]) -> list[Completion]:
        """The same with what the worker has recorded of them.

        Raises:
            WrongRoutes: Routes that cannot be theirs.
        """
        if not self._records:
            return ended
        taken = (await self.workers("take_routes", [completion.id for completion in ended]))[0]
        return [
            self._routed(completion, next(r for r in requests if r.id == completion.id), packed)
            for completion, packed in zip(ended, taken, strict=True)
        ]

    def _routed(self, completion: Completion, request: Request, packed: list[bytes] | None) -> Completion:
        assert self.shape is not None
        if not completion.tokens:
            return completion
        found = routes.checked(
            None if packed is None else routes.Read.unpacked(packed, self.shape),
            np.array([*request.tokens, *completion.tokens[:-1]], np.int32),
            request.routes_from,
            None if self.spec.updated_under_way else {version for version, _ in completion.versions},
            shape=self.shape,
            name=request.id,
        )
        return replace(completion, routes=found)

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

        # Whoever ends a request before its end, this process, needs every token as it comes.
        may_hold = request.seconds is None and not sampling.stop
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
            **({"routed_experts_prompt_start": request.routes_from} if self.shape and not self._records else {}),
            extra_args={MAY_HOLD: True} if may_hold else None,
        )

    async def forget(self) -> None:
        """Empties the prefix cache."""
        await self._answer(self.llm.reset_prefix_cache())
        if self._records:
            await self.workers("forget_routes")

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def connect_weights(self, info: dict[str, Any]) -> None:
        """Joins every worker to the group that weights travel in; see `engines.vllm.transfer.InitInfo`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._answer(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(info)))

    async def pause(self) -> None:
        """Stops computing. Requests under way stay where they are; caches of the old weights are dropped."""
        self.watched, self.paused = False, True
        await self._answer(self.llm.pause_generation(mode="keep", clear_cache=True))

    async def resume(self) -> None:
        """Goes on computing."""
        self.presence.check()
        self.paused = False
        await self._answer(self.llm.resume_generation())
        self.watched = True

    async def sleep(self, parts: Sequence[str]) -> None:
        """Pauses, and drops parts from the device; see `engines.vllm.sleep`. Requests under way wait."""
        new = self.presence.drop(parts)  # from now on no request is taken
        if new:
            await self.pause()
            await self.workers("drop", new)

    async def wake(self, parts: Sequence[str]) -> None:
        """Takes memory for parts again, and goes on once everything is there."""
        back = [part for part in parts if part in self.presence.asleep]
        if back:
            await self.workers("bring_back", back)
            self.presence.asleep.difference_update(back)
            await self._go_on()

    async def _go_on(self) -> None:
        if self.presence.ready:
            await self.resume()

    async def begin_update(self) -> None:
        """Pauses and gets every worker's parameters ready to be written."""
        self.presence.check_weights()
        await self.pause()
        await self._answer(self.llm.start_weight_update())

    async def update_weights(self, checksums: bool) -> None:
        """Receives weights; returns when every worker has all of its shard. `checksums`: each part is proved."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._answer(self.llm.update_weights(WeightTransferUpdateRequest({"checksums": checksums})))

    async def end_update(self, version: int) -> list[dict[str, float]]:
        """Puts the received weights in place and goes on; from here on they are version `version`.

        Returns each worker's `executor.Report` as a dict.
        """
        await self._answer(self.llm.finish_weight_update(str(version)))
        self.version = version
        if self._records:
            await self.workers("routes_version", version)
        self.presence.defined = True
        await self._go_on()
        return await self.workers("transfer_report")

    async def abandon_update(self) -> None:
        """Takes back an update that cannot be finished. The engine stays paused until the next one has ended."""
        self.presence.defined = False
        await self.workers("abandon_update")

    async def check_weights(self) -> list[dict[str, Any]]:
        """Receives weights once more and compares them with those in place; see `weights.sync.Compared`."""
        self.presence.check_weights()
        await self.pause()
        try:
            return await self.workers("check_weights")
        finally:
            await self._go_on()

    async def probe(self) -> None:
        """Returns when every worker has answered."""
        await self.workers("transfer_report")

    async def measured(self) -> list[tuple[Reading, dict[int, int]]]:
        """Of each worker its memory, and how many steps it made of how many tokens, since the last time."""
        return [(Reading(**memory), steps) for memory, steps in await self.workers("measured")]

    async def record_spans(self, on: bool) -> list[Span]:
        """Records requests from now on, or no more. Returns those that were recorded."""
        found, self.spans = self.spans or [], [] if on else None
        return found

    async def workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of `engines.vllm.transfer.WorkerExtension` in every worker, with plain values only."""
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


def _shape(spec: EngineSpec) -> RouteShape:
    """What the routes of an engine's model look like.

    Raises:
        UserError: It has none.
    """
    hf = read_config(Path(spec.path))
    shape = RouteShape.of(architecture(hf).describe(hf))
    if shape is None:
        raise UserError(f"policy.moe.replay: model.path={spec.path} has no experts to be routed to; give off")
    return shape
