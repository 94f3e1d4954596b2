"""A vLLM engine in a Ray actor: tokens in, tokens out, weights from the policy."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from array import array
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import engine_data
from skyrl_mega.config.drafts import draft_method
from skyrl_mega.engines.base import Completion, Drafts, EngineDied, Facts, Request, Sampling
from skyrl_mega.engines.presence import Presence
from skyrl_mega.engines.vllm.answer_routes import AnswerRoutes
from skyrl_mega.engines.vllm.draft_counts import request_drafts
from skyrl_mega.engines.vllm.plugin import MAY_HOLD
from skyrl_mega.engines.vllm.replicas import Replicas
from skyrl_mega.engines.vllm.spec import EngineSpec, adapts, arguments, scales
from skyrl_mega.models.routes import WrongRoutes
from skyrl_mega.telemetry.memory import MemoryReading
from skyrl_mega.telemetry.trace import Span

if TYPE_CHECKING:
    from vllm import SamplingParams

CHECK_EVERY_S = 0.5
"""Seconds between checks of vLLM's process during a call."""
CHECKS_AFTER_ERROR = 4
"""Checks of vLLM's process after a failed call, before the error counts as the call's own."""
ABORT_AGAIN_S = 1.0
FETCH_CHECK_S = 0.1
"""Seconds between checks for the end of a download of weights."""
COALESCE_S = 0.004
"""Completions ending within this many seconds are sent in one message."""
BEATS = 4
"""Signs of life per `rollout.request_timeout_s` while no request ends."""


class VllmEngine:
    """An asynchronous vLLM engine; implements `engines.base.Engine`.

    Call `start` first; Ray then runs the methods concurrently on one event loop. Every method that asks vLLM raises
    EngineDied if vLLM's process is gone, and passes vLLM's own errors on.

    Args:
        spec: Settings and model of the engine. Without a config.json in the model's directory on this node, the
            constructor raises UserError.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.version = 0
        self.running = 0
        """Requests under way."""
        self.watched = False
        """True if time without a token counts as a stall: not during a pause, nor before the first answer, which may
        wait for kernels to compile.
        """
        self.spans: list[Span] | None = None
        """Spans of ended requests; None unless recording."""
        self.uses_drafts = bool(draft_method(spec.rollout))
        self.drafted = Drafts()
        """Counts since the last call of `drafts`."""
        self.presence = Presence(spec.sleeps)
        self.paused = False
        """True if computing was stopped, for a sync or a sleep."""
        self.calls: set[asyncio.Queue[Completion | BaseException]] = set()
        """Result queues of the running `generate_many` calls."""
        self.replicas = Replicas(engine_data(spec.rollout))
        if not (Path(spec.path) / "config.json").is_file():
            raise UserError(
                f"there is no config.json on {platform.node()}; give a Hugging Face directory that every node can read",
                key="model.path",
                value=spec.path,
            )
        self.routes = AnswerRoutes(spec)

    async def start(self, former: Facts | None = None) -> Facts:
        """Loads the model, generates two tokens for a trial, and returns the measured facts: the size of the KV cache
        in tokens and in bytes, the part taken by every sequence besides its tokens, and the transport of weights. To be
        called before any other method. Waits without limit; the caller sets one.

        Args:
            former: Facts of the previous engine in this place; the cache gets the same size. None for the first engine.

        Raises:
            UserError: vLLM rejects the settings, or computes on another device here.
            Exception: vLLM's own error, for example if the GPU has too little memory.
        """
        from pydantic import ValidationError
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from skyrl_mega.engines.vllm.columns import collect_columns

        if current_platform.device_type != self.spec.device:  # chosen by vLLM itself, silently
            raise UserError(
                f"vLLM computes on {current_platform.device_type or 'nothing'} on this node; give "
                "the environment of `make cuda` to every node, or cluster.device=cpu",
                key="cluster.device",
                value=self.spec.device,
            )
        for name, value in scales(self.spec, hopper=current_platform.is_device_capability(90)).items():
            os.environ.setdefault(name, value)
        try:
            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(self.spec, former)))
        except ValidationError as error:  # which Ray cannot pickle
            reasons = "; ".join(problem["msg"] for problem in error.errors(include_url=False, include_input=False))
            raise UserError(
                f"vLLM refuses the settings: {reasons}", key="rollout.options", value=self.spec.rollout.options
            ) from None
        collect_columns(self.llm.output_processor)
        await self.workers("check_parameters")
        if self.spec.device == "cpu" and not self.uses_drafts:
            await self.workers("reduce_sampler_work")  # checking drafts draws from the same generators
        if adapts(self.spec):
            await self.workers("suppress_drafts")
        await self.llm.update_weight_version(str(self.version))
        if self.spec.dequantised and self.spec.weights == "auto":
            await self.workers("load_files", self.spec.path)
        if self.routes.recorded:
            await self.workers("record_routes")
        async for _ in self.generate_many([Request("warm-up", [0], 2, 0)], Sampling()):
            pass
        self.watched = True
        cache_bytes = min(await self.workers("cache_bytes"))
        pools, parts = zip(*await self.workers("cache_room"), strict=True)
        # vLLM's number is right for full attention only: it counts the longest sequences, and windows while filling.
        tokens = min(pools) if max(parts) else self.llm.vllm_config.cache_config.kv_cache_size_tokens
        tokens *= self.replicas.count
        return Facts(tokens, cache_bytes, weights=self.spec.transport, sequence_tokens=max(parts))

    # ---- generation ------------------------------------------------------------------------------------------------

    async def generate_many(self, requests: list[Request], sampling: Sampling) -> AsyncIterator[list[Completion]]:
        """Continues prompts; yields completions in small lists as requests end, each request once, in no given order.
        Empty lists show that the engine works. The end of `Request.seconds` is not an error: `finish` is `timeout`.

        An idle engine accepts all requests before computing the first, so the same call with the same weights forms the
        same batches and gives the same numbers to the last bit.

        A single request may take any time; `rollout.request_timeout_s` limits the time without a token for any request.

        Args:
            requests: Prompts, with names unlike those of other requests under way.
            sampling: Parameters shared by all requests.

        Raises:
            EngineDied: vLLM's process is gone, or no request of a replica got a token for `rollout.request_timeout_s`.
            NotReady: A part is asleep, or weights are undefined.
            WrongRoutes: Expert routes of a completion are missing or do not fit the request.
            Exception: vLLM's own for a request, as for a prompt that is too long; ends the call's other requests.
        """
        self.presence.check()
        done: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        was_idle = self.running == 0
        self.running += len(requests)
        self.calls.add(done)
        tasks: list[asyncio.Task[None]] = []
        try:
            # A second pause would make replicas compute, during an update or without weights.
            held = was_idle and not self.paused
            if was_idle:
                self.watch = asyncio.create_task(self._watch())
            if held:
                await self._await_vllm(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
            tasks += [asyncio.create_task(self._generate(request, sampling, done)) for request in requests]
            if held:
                await self._compute_queued()
            remaining = len(requests)
            while remaining:
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
                remaining -= len(answers)
                yield await self._with_routes(answers, requests)
        finally:
            self.running -= len(requests)
            self.calls.discard(done)
            if not self.running:
                self.watch.cancel()
            for task in tasks:
                task.cancel()

    async def _with_routes(self, ended: list[Completion], requests: list[Request]) -> list[Completion]:
        if not self.routes.recorded:
            return ended
        taken = (await self.workers("take_routes", [completion.id for completion in ended]))[0]
        return self.routes.of_worker(ended, requests, taken)

    async def _compute_queued(self) -> None:
        """Lets the engine compute once all tasks of a call have queued their requests."""
        await asyncio.sleep(0)  # every task has now queued its request in the engine
        if self.presence.ready and not self.paused:  # `sleep` or `pause` may have been called meanwhile
            await self._await_vllm(self.llm.engine_core.resume_scheduler_async())

    async def _watch(self) -> None:
        """Fails the calls under way if a replica of vLLM stalls: none of its requests got a token for too long.

        Counts only time in which this process runs and vLLM may compute: not a pause for a weight sync, nor a
        suspension of the process itself.
        """
        limit = self.spec.rollout.request_timeout_s
        interval = min(CHECK_EVERY_S, limit / 10)
        loop = asyncio.get_running_loop()
        stalled_s, before = dict.fromkeys(self.replicas.requests, 0.0), loop.time()
        tokens = dict.fromkeys(self.replicas.requests, -1)
        while max(stalled_s.values()) < limit:
            await asyncio.sleep(interval)
            seen, now = self._tokens(), loop.time()
            for replica, requests in self.replicas.requests.items():
                still = self.watched and requests and seen[replica] == tokens[replica]
                stalled_s[replica] = stalled_s[replica] + min(now - before, 2 * interval) if still else 0.0
            tokens, before = seen, now
        replica = max(stalled_s, key=stalled_s.__getitem__)
        name = "vLLM" if self.replicas.count == 1 else f"replica {replica} of vLLM"
        for done in self.calls:
            done.put_nowait(
                EngineDied(
                    f"{name} stands still: none of its {self.replicas.requests[replica]} requests got a token for "
                    f"{limit:g} s (rollout.request_timeout_s)"
                )
            )

    def _tokens(self) -> dict[int, int]:
        """Returns for each replica the number of tokens generated so far, including requests under way."""
        states = self.llm.output_processor.request_states.values()
        return self.replicas.tokens(
            (state.external_req_id, state.detokenizer.num_output_tokens()) for state in states if state.detokenizer
        )

    async def _generate(
        self, request: Request, sampling: Sampling, done: asyncio.Queue[Completion | BaseException]
    ) -> None:
        output, began, replica = None, time.time(), self.replicas.take(request)
        alarm = None if request.seconds is None else asyncio.create_task(self._abort(request.id, request.seconds))
        try:
            given = self.prompt(request), self.parameters(request, sampling), request.id
            stream = self.llm.generate(*given, data_parallel_rank=replica)
            async for output in stream:  # noqa: B007  (the last output is read below)
                pass
        except Exception as error:  # raised by the caller
            done.put_nowait(self._translate_error(error))
            return
        finally:
            self.replicas.release(request, replica, len(output.outputs[0].token_ids) if output else 0)
            if alarm is not None:
                alarm.cancel()
        assert output is not None
        if self.spans is not None:
            details = {"prompt": len(request.tokens), "tokens": len(output.outputs[0].token_ids)}
            self.spans.append(Span(request.id, began, time.time(), details))
        try:
            done.put_nowait(self._completion(request, output.outputs[0]))
        except WrongRoutes as error:
            done.put_nowait(error)

    def _completion(self, request: Request, result: Any) -> Completion:
        if self.uses_drafts:
            self.drafted.add(request_drafts(len(result.token_ids), result.spec_decode_metrics))
        return Completion(
            request.id,
            array("i", result.token_ids),
            result.logprobs,
            "timeout" if result.finish_reason == "abort" else str(result.finish_reason),
            tuple((int(span.version), span.start) for span in result.weight_versions or []),
            self.routes.of_output(request, result),
        )

    async def _abort(self, request: str, seconds: float) -> None:
        """Aborts a request after the time limit; the last output contains the tokens so far."""
        await asyncio.sleep(seconds)
        while True:  # until cancelled: vLLM may not know the request at the first call
            await self.llm.abort(request)
            await asyncio.sleep(ABORT_AGAIN_S)

    def prompt(self, request: Request) -> Any:
        """Returns vLLM's prompt object with a request's tokens."""
        from vllm.inputs.engine import tokens_input

        return tokens_input(list(request.tokens))

    def parameters(self, request: Request, sampling: Sampling) -> SamplingParams:
        """Returns vLLM's sampling parameters for a request. A request without time limit and stop strings may get its
        tokens in groups (`MAY_HOLD`)."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # A request that this process may end early needs every token as it comes.
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
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            **self.routes.parameters(request),
            extra_args={MAY_HOLD: True} if may_hold else None,
        )

    async def forget(self) -> None:
        """Drops vLLM's cached prefixes, and the routes that the worker has recorded of requests. No request may be
        under way."""
        await self._await_vllm(self.llm.reset_prefix_cache())
        if self.routes.recorded:
            await self.workers("forget_routes")

    async def drain(self) -> None:
        """Waits, without limit, until no request is under way. Refuses no new request."""
        while self.running:
            await asyncio.sleep(CHECK_EVERY_S)

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def connect_weights(self, info: dict[str, Any]) -> None:
        """Connects every worker to the process group of weight transfers, and leaves a former group first. Returns
        after all processes of the group joined, at most after the connection's `timeout_s`.

        Args:
            info: Fields of `engines.vllm.transfer.InitInfo`: the connection, and this engine's index in the group.

        Raises:
            EngineDied: vLLM's process is gone.
            Exception: A process did not join. vLLM may pass on only the text of the worker's TransportError.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._await_vllm(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(info)))

    async def fetch_weights(self, source: dict[str, Any], version: int) -> None:
        """Downloads the boxes of every worker's shard into host memory, or into the cache of the node; the engine goes
        on generating. `begin_update`, `update_weights` and `end_update` install the weights.

        Args:
            source: Fields of `weights.files.source.Source`.
            version: Number of the weights, for errors.

        Raises:
            EngineDied: vLLM's process is gone.
            Exception: The weights cannot be read, or a checksum differs; names the object. vLLM may pass on only the
                text of the worker's error.
        """
        await self.workers("start_fetch", source)
        while not all(await self.workers("fetched")):
            await asyncio.sleep(FETCH_CHECK_S)

    async def pause(self) -> None:
        """Stops computing until `resume`. Requests under way are kept; cached prefixes are dropped. Does nothing if
        computing has stopped already."""
        if self.paused:
            return
        self.watched, self.paused = False, True
        # vLLM's `pause_generation` also clears a cache of images, and sleeps for 20 ms.
        await self._await_vllm(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True))

    async def resume(self) -> None:
        """Resumes computing after `pause`; does nothing without a pause. Raises NotReady if a part is asleep or weights
        are undefined."""
        self.presence.check()
        if not self.paused:
            return
        self.paused = False
        await self._await_vllm(self.llm.resume_generation())
        self.watched = True

    async def sleep(self, parts: Sequence[str]) -> None:
        """Pauses the engine and frees the device memory of these parts, without keeping a copy. Requests under way
        wait.

        After `wake`, the KV cache is empty. Dropped weights are undefined until a weight sync. A new request raises
        NotReady while a part is asleep, or weights are undefined.

        Args:
            parts: "engine_weights", "kv_cache" (`config.residency.ENGINE`). Parts already dropped stay dropped.

        Raises:
            ValueError: The engine was started to keep one of the parts.
        """
        dropped = self.presence.drop(parts)  # no request is accepted from here on
        if dropped:
            await self.pause()
            await self.workers("drop", dropped)

    async def wake(self, parts: Sequence[str]) -> None:
        """Allocates memory for parts again. Resumes computing once all parts are present and the weights are defined.
        Dropped weights are undefined until a sync; the cache is empty.

        Args:
            parts: "engine_weights", "kv_cache" (`config.residency.ENGINE`). Parts already present stay.

        Raises:
            Exception: A worker cannot allocate the memory.
        """
        returning = [part for part in parts if part in self.presence.asleep]
        if returning:
            await self.workers("bring_back", returning)
            self.presence.asleep.difference_update(returning)
            await self._resume_if_ready()

    async def _resume_if_ready(self) -> None:
        if self.presence.ready:
            await self.resume()

    async def begin_update(self) -> None:
        """Pauses the engine and opens every worker's parameters for writing; to be called after `connect_weights` or
        `fetch_weights`. `update_weights` and `end_update`, or `abandon_update`, must follow.

        Raises:
            NotReady: The weights are asleep.
            EngineDied: vLLM's process is gone.
        """
        self.presence.check_weights()
        await self.pause()
        await self._await_vllm(self.llm.start_weight_update())

    async def update_weights(self, checksums: bool) -> None:
        """Receives weights from the policy ranks, or takes those of `fetch_weights`, after `begin_update`; returns
        when the weights of all workers are complete. All policy ranks and engines of a group must exchange at the same
        time.

        Args:
            checksums: True to verify each part after arrival; the same in the policy ranks.

        Raises:
            EngineDied: vLLM's process is gone.
            Exception: The transfer failed, or a checksum differs. vLLM may pass on only the text of the worker's error.
                `abandon_update` must follow.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._await_vllm(self.llm.update_weights(WeightTransferUpdateRequest({"checksums": checksums})))

    async def end_update(self, version: int) -> list[dict[str, float]]:
        """Installs the received weights as version `version` and resumes computing, unless a part is asleep.

        Returns each worker's `weights.exchange.executor.ExchangeReport` as a dict, by rank.

        Raises:
            EngineDied: vLLM's process is gone.
            Exception: A layer needs all of its weights and did not receive all. vLLM may pass on only the text of the
                worker's error.
        """
        await self._await_vllm(self.llm.finish_weight_update(str(version)))
        self.version = version
        if self.routes.recorded:
            await self.workers("routes_version", version)
        self.presence.defined = True
        await self._resume_if_ready()
        return await self.workers("transfer_report")

    async def abandon_update(self) -> None:
        """Abandons an update that cannot be finished, and leaves the process group. Until the end of the next update,
        which needs `connect_weights` or `fetch_weights` first, a new request raises NotReady, and an engine paused by
        `begin_update` stays paused; any other engine continues its requests under way.

        Raises:
            EngineDied: vLLM's process is gone.
        """
        self.presence.defined = False
        await self.workers("abandon_update")

    async def check_weights(self) -> list[dict[str, Any]]:
        """Receives weights again for comparison with the weights in place, which stay; the policy ranks must send, with
        checksums, at the same time. An engine that read files compares with the weights last downloaded, without the
        policy ranks. The engine pauses meanwhile, and stays paused if a part is asleep or weights are
        undefined. A difference raises nothing.

        Returns:
            For each worker: number of `parameters`, `bytes` received, and the names of `different` parameters.

        Raises:
            NotReady: The weights are asleep.
            EngineDied: vLLM's process is gone.
            Exception: The transfer failed. vLLM may pass on only the text of the worker's error.
        """
        self.presence.check_weights()
        await self.pause()
        try:
            return await self.workers("check_weights")
        finally:
            await self._resume_if_ready()

    async def probe(self) -> None:
        """Waits for an answer of every worker, as a check for hanging workers; without limit, so the caller must set
        one.

        Raises:
            EngineDied: vLLM's process is gone.
        """
        await self.workers("transfer_report")

    async def measured(self) -> list[tuple[MemoryReading, dict[int, int]]]:
        """Returns for each worker, since the previous call: the memory use, and tokens in a model step → number of such
        steps. Steps before the first call are not counted."""
        return [(MemoryReading(**memory), steps) for memory, steps in await self.workers("measured")]

    async def drafts(self) -> Drafts:
        """Returns the counts of draft tokens since the previous call; zeros without draft tokens."""
        counts, self.drafted = self.drafted, Drafts()
        if adapts(self.spec):
            answers = await self.workers("draft_steps")
            # The workers of a replica take the same steps; each replica decides for itself.
            for steps, suppressed in answers[:: len(answers) // self.replicas.count]:
                counts.add(Drafts(steps=steps, suppressed=suppressed))
        return counts

    async def record_spans(self, on: bool) -> list[Span]:
        """Starts (`on=True`) or stops recording the times of requests; returns the spans recorded since the previous
        call, [] if recording was off. A request is recorded when it ends."""
        recorded, self.spans = self.spans or [], [] if on else None
        return recorded

    async def workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of `engines.vllm.transfer.WorkerExtension` in every worker and returns the answers by rank:
        the workers of replica 0, of replica 1, …

        Arguments and answers are plain values only. Waits without limit.

        Raises:
            EngineDied: vLLM's process is gone.
            Exception: The method failed in a worker; vLLM may pass on only the text of the error.
        """
        # With several replicas, vLLM's own `collective_rpc` calls all workers, but returns replica 0's answers only.
        call = self.llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        return [answer for replica in await self._await_vllm(call) for answer in replica]

    async def _await_vllm(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Waits for vLLM's answer. Raises EngineDied if vLLM's process dies, which would leave calls unanswered."""
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait([task], timeout=CHECK_EVERY_S))[0]:
            if self.llm.errored:
                task.cancel()
                raise EngineDied("vLLM's process died while a call was under way")
        try:
            return task.result()
        except Exception as error:
            # When a replica dies, vLLM ends the others; these may refuse a call before the death is known here.
            for _ in range(CHECKS_AFTER_ERROR):
                if self.llm.errored:
                    break
                await asyncio.sleep(CHECK_EVERY_S)
            raise self._translate_error(error) from error

    def _translate_error(self, error: Exception) -> Exception:
        """Returns vLLM's error, or EngineDied for any error of a dead vLLM process."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.llm.errored or isinstance(error, EngineDeadError):
            return EngineDied(f"vLLM's process died: {error}")
        return error

    # ---- health ----------------------------------------------------------------------------------------------------

    async def health(self) -> int:
        """Returns the version of the weights installed last, 0 before the first weight sync. Raises vLLM's error if the
        engine is dead."""
        await self.llm.check_health()
        return self.version
