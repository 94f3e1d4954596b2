"""The state of a steady batch: running requests that each get one more token, while no other request waits.

vLLM builds a new schedule in every step and examines every token, 18 to 21 µs per token on a CPU. While a batch is
steady, only counters change between two steps. `scheduler.HoldingScheduler` then leaves to vLLM's own methods only the
requests with an event in this step (a block begins or is full, the request may end), and `SteadyBatch` advances the
others. After each call the state of vLLM's scheduler is the same as without a steady batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from skyrl_mega.engines.vllm.plugin import MAY_HOLD

CAPACITY = 64
"""Steps in a new `LogprobColumns`; doubled when full."""


def supported(scheduler: Scheduler) -> bool:
    """Returns True if an engine's settings permit steady batches (see the head of this file): full attention with one
    group of cache blocks, no pipelining of batches, and no connectors, draft models, LoRA adapters or auxiliary
    outputs."""
    config, managers = scheduler.vllm_config, scheduler.kv_cache_manager.coordinator.single_type_managers
    unsupported = (
        scheduler.connector,
        scheduler.ec_connector,
        scheduler.aux_output_connector,
        scheduler.lora_config,
        config.speculative_config,
        scheduler.return_sampling_mask,
        scheduler.enable_kv_cache_events,
        scheduler.log_stats,
        scheduler.scheduler_config.async_scheduling,
        scheduler.use_v2_model_runner,
    )
    return (
        not any(unsupported)
        and config.max_concurrent_batches == 1
        and [type(manager) for manager in managers] == [FullAttentionManager]
        and managers[0].block_size == scheduler.block_size == scheduler.hash_block_size
    )


def is_plain(request: Request) -> bool:
    """Returns True if a request is between two tokens, needs nothing but tokens and their log-probs, and permits the
    engine to send them later (`MAY_HOLD`)."""
    parameters = request.sampling_params
    return (
        request.status is RequestStatus.RUNNING
        and request.num_computed_tokens + 1 == request.num_tokens > request.num_prompt_tokens
        and parameters is not None
        and bool((parameters.extra_args or {}).get(MAY_HOLD))
        and parameters.num_logprobs == 0
        and parameters.prompt_logprobs is None
        and parameters.repetition_detection is None
        and not (
            request.resumable
            or request.use_structured_output
            or request.mm_features
            or request.spec_token_ids
            or request.events
            or request.trace_headers
            or request.prefill_stats
            or request.num_in_flight_tokens
            or request.num_output_placeholders
            or request.num_stale_output_tokens
            or request.num_nans_in_logits
        )
    )


class LogprobColumns:
    """Log-probs sampled in steady steps and not yet sent: a row per request, a column per step.

    Args:
        rows: Number of requests.
        like: A step's log-probs; the arrays get the same types.
    """

    def __init__(self, rows: int, like: LogprobsLists) -> None:
        self.steps = 0
        self.arrays = [np.empty((rows, CAPACITY), array.dtype) for array in like[:3]]
        """Token ids, log-probs and ranks."""

    def add(self, rows: np.ndarray, step: LogprobsLists, order: np.ndarray) -> None:
        """Appends a column with a step's log-probs: `rows[i]` gets entry `order[i]` of the step [N, 1]."""
        if self.steps == self.arrays[0].shape[1]:
            self.arrays = [np.concatenate([array, np.empty_like(array)], axis=1) for array in self.arrays]
        for array, values in zip(self.arrays, step[:3], strict=True):
            array[rows, self.steps] = values.reshape(len(values))[order]
        self.steps += 1

    def row(self, row: int) -> LogprobsLists:
        """Returns the token ids [steps, 1], log-probs [steps, 1] and ranks [steps] of the request in row number `row`,
        as views."""
        ids, values, ranks = (array[row, : self.steps] for array in self.arrays)
        return LogprobsLists(ids[:, None], values[:, None], ranks)


class SteadyBatch:
    """The running requests in vLLM's order, and the numbers that change in every step.

    Args:
        requests: Plain requests (`is_plain`).
        longest: Longest sequence of the model, in tokens.
    """

    def __init__(self, requests: Sequence[Request], longest: int) -> None:
        self.requests = list(requests)
        self.ids = [request.request_id for request in requests]
        self.computed = [request.num_computed_tokens for request in requests]
        """Tokens in the cache, before the next step."""
        self.sampled = [request.num_output_tokens for request in requests]
        """Sampled tokens, before the next step."""
        self.limits = [min(request.max_tokens, longest - request.num_prompt_tokens) for request in requests]
        """Most tokens to sample."""
        self.stops = {token for request in requests for token in _stop_tokens(request)}
        self.scheduled: SchedulerOutput | None = None
        """Schedule of the step under way."""
        self.unsent: LogprobColumns | None = None
        self.rows = np.arange(len(requests))
        """Row of each request in `unsent`."""

    def due(self, block_size: int) -> list[Request]:
        """Returns the requests whose next token is the first or the last of a block: each needs at most one block.
        `block_size` is the number of tokens in a block of the KV cache."""
        ends = (0, block_size - 1)
        return [self.requests[i] for i, computed in enumerate(self.computed) if computed % block_size in ends]

    def complete(self, scheduled: SchedulerOutput) -> None:
        """Adds the other requests of the batch, a token each, to vLLM's schedule of the due requests (`due`). Changes
        the schedule and the requests in place, and keeps the schedule as that of the step under way (`expects`)."""
        due = scheduled.scheduled_cached_reqs
        blocks = dict(zip(due.req_ids, due.new_block_ids, strict=True))
        for request in self.requests:
            if request.request_id not in blocks:
                request.num_computed_tokens += 1
                request.num_in_flight_tokens += 1
        scheduled.scheduled_cached_reqs = CachedRequestData(
            req_ids=self.ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[blocks.get(name) for name in self.ids],
            num_computed_tokens=self.computed,
            num_output_tokens=self.sampled,
        )
        scheduled.num_scheduled_tokens = dict.fromkeys(self.ids, 1)
        scheduled.total_num_scheduled_tokens = len(self.ids)
        self.scheduled = scheduled

    def expects(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> bool:
        """Returns True if this is the output of the step prepared by `complete`, with a token and a log-prob for each
        request and no NaN in the logits.

        Args:
            scheduled: The schedule of the step that gave the output.
            output: The model's output.
        """
        tokens, logprobs = output.sampled_token_ids, output.logprobs
        return (
            scheduled is self.scheduled
            and logprobs is not None
            and logprobs.cu_num_generated_tokens is None
            and logprobs.logprobs.shape == (len(tokens), 1)
            and all(len(row) == 1 for row in tokens)
            and not output.num_nans_in_logits
        )

    def ending(self, output: ModelRunnerOutput) -> list[int]:
        """Returns the indices in `requests` of the requests that may end with the token sampled in this step: at a stop
        token of any request of the batch, or at the most tokens. `expects` must be True for the output."""
        tokens, limits, stops = self._tokens(output), self.limits, self.stops
        return [i for i, sampled in enumerate(self.sampled) if sampled + 1 >= limits[i] or tokens[i] in stops]

    def outputs(self, indices: Iterable[int]) -> list[tuple[int, EngineCoreOutput]]:
        """Returns (client, output) for the requests with these indices in `requests`: the request's client, and its
        unsent tokens and log-probs. [] if nothing is unsent. The tokens stay unsent until `flush` or `remove`."""
        if self.unsent is None:
            return []
        outputs = []
        for i in indices:
            request = self.requests[i]
            tokens = request.output_token_ids[-self.unsent.steps :]
            output = EngineCoreOutput(request.request_id, tokens, self.unsent.row(self.rows[i]))
            outputs.append((request.client_index, output))
        return outputs

    def flush(self) -> list[tuple[int, EngineCoreOutput]]:
        """Returns the `outputs` of all requests, and counts their tokens as sent."""
        outputs = self.outputs(range(len(self.requests)))
        self.unsent = None
        return outputs

    def remove(self, indices: Sequence[int]) -> None:
        """Removes the requests with these indices in `requests` from the batch. Their unsent tokens are lost: take the
        `outputs` before."""
        removed = set(indices)
        kept = [i for i in range(len(self.ids)) if i not in removed]
        self.requests = [self.requests[i] for i in kept]
        # New lists: a schedule contains the others.
        self.ids = [self.ids[i] for i in kept]
        self.computed = [self.computed[i] for i in kept]
        self.sampled = [self.sampled[i] for i in kept]
        self.limits = [self.limits[i] for i in kept]
        self.rows = self.rows[kept]

    def advance(self, output: ModelRunnerOutput) -> None:
        """Appends the step's sampled tokens to all requests of the batch, and their log-probs to `unsent`. `expects`
        must be True for the output, and the requests of `ending` must have been removed."""
        assert output.logprobs is not None, "see `expects`"
        for request, token in zip(self.requests, self._tokens(output), strict=True):
            request.num_in_flight_tokens -= 1
            request.append_output_token_ids(token)
        self.computed = [count + 1 for count in self.computed]
        self.sampled = [count + 1 for count in self.sampled]
        if self.unsent is None:
            self.unsent = LogprobColumns(len(self.requests), output.logprobs)
            self.rows = np.arange(len(self.requests))
        order = np.array([output.req_id_to_index[name] for name in self.ids], np.intp)
        self.unsent.add(self.rows, output.logprobs, order)

    def _tokens(self, output: ModelRunnerOutput) -> list[int]:
        index, tokens = output.req_id_to_index, output.sampled_token_ids
        return [tokens[index[name]][0] for name in self.ids]


def _stop_tokens(request: Request) -> Iterable[int]:
    parameters = request.sampling_params
    assert parameters is not None, "see `is_plain`"
    yield from parameters.stop_token_ids or ()
    if parameters.eos_token_id is not None:
        yield parameters.eos_token_id
