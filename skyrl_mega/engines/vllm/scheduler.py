"""A vLLM scheduler that sends the tokens of several steps in one message and schedules steady batches quickly.

vLLM packs the token and the log-prob of a request in every step, and the calling process unpacks both: for a small
model, a sixth of an engine's computation. A request without a time limit and stop strings (`MAY_HOLD`) is read only at
its end, so its tokens are held for at most `HOLD_S`: long enough to save this work, and short enough to notice a
stalled engine.

While the running requests stay the same and none waits, vLLM's own methods see only the requests with an event
(`steady`). Any other step is vLLM's.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

from skyrl_mega.engines.vllm.drafts import AdaptiveScheduler
from skyrl_mega.engines.vllm.plugin import MAY_HOLD
from skyrl_mega.engines.vllm.steady import SteadyBatch, is_plain, supported

HOLD_S = 1.0
"""Seconds between two sendings of all held tokens. Well below the least `rollout.request_timeout_s`, 5 seconds without
a token, after which an engine counts as stalled."""

_OTHER_FIELDS = [
    f for f in msgspec.structs.fields(EngineCoreOutput) if f.name not in ("request_id", "new_token_ids", "new_logprobs")
]
_other_values = operator.attrgetter(*(f.name for f in _OTHER_FIELDS))
_DEFAULTS = tuple(f.default for f in _OTHER_FIELDS)
"""Default values of the output's fields other than tokens and log-probs."""


class HoldingScheduler(AdaptiveScheduler):
    """A scheduler that holds the tokens of requests with `MAY_HOLD` in `extra_args`.

    Tokens are sent when the request ends, `HOLD_S` seconds after the last sending, or when vLLM pauses: everything
    sampled with old weights is sent before weights change.
    """

    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[int, dict[str, list[EngineCoreOutput]]] = {}
        """Client → request → outputs not yet sent."""
        self.sent = time.monotonic()
        self.may_be_steady = supported(self)
        self.batch: SteadyBatch | None = None
        """The steady batch; None if the last step was vLLM's."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Returns the next step's schedule: from the steady batch (`engines.vllm.steady`) if the running requests form
        one and the cache has free blocks, else vLLM's own."""
        batch = self._steady_batch()
        due = batch.due(self.block_size) if batch else []
        if batch is None or len(due) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            self._leave()
            return super().schedule(throttle_prefills)
        self.batch = batch
        running, self.running = self.running, due
        scheduled = super().schedule(throttle_prefills)
        self.running = running
        assert len(scheduled.num_scheduled_tokens) == len(due), "vLLM schedules every request that is due"
        batch.complete(scheduled)
        self.prev_step_scheduled_req_ids.update(batch.ids)
        return scheduled

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Adds a step's sampled tokens to the requests as vLLM does, and returns client → message with the outputs to
        send now; clients without anything to send are left out.

        Other outputs of a request are held, and merged into one when the request ends, `HOLD_S` seconds after the last
        sending, or on a pause.
        """
        if self.batch is not None and self.batch.expects(scheduler_output, model_runner_output):
            ending = self._advance(self.batch, model_runner_output)
            scheduler_output = replace(scheduler_output, num_scheduled_tokens=dict.fromkeys(ending, 1))
        else:
            self._leave()
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for client, message in messages.items():
            held = self.held.setdefault(client, {})
            sendable = []
            for output in message.outputs:
                held.setdefault(output.request_id, []).append(output)
                if not self._may_hold(output):
                    sendable.append(merged(held.pop(output.request_id)))
            message.outputs = sendable
        if self._paused or time.monotonic() - self.sent >= HOLD_S:
            self._send_held(messages)
        return {client: message for client, message in messages.items() if _has_content(message)}

    def has_requests(self) -> bool:
        """Returns True if vLLM has requests, or a pause has begun and held outputs are not sent yet: these are sent in
        a step without tokens."""
        return bool(super().has_requests() or (self._paused and any(self.held.values())))

    def finish_requests(self, *args: Any) -> list[Any]:
        """Aborts requests as vLLM's scheduler does, drops their held outputs, and returns the aborted requests."""
        self._leave()
        ended: list[Any] = super().finish_requests(*args)
        for request in ended:
            self.held.get(request.client_index, {}).pop(request.request_id, None)
        return ended

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Sets vLLM's pause state, which pauses or resumes scheduling; ends the steady batch."""
        self._leave()
        super().set_pause_state(pause_state)

    def _steady_batch(self) -> SteadyBatch | None:
        """Returns the steady batch of the running requests; None if vLLM must schedule them. Ends a batch of other
        requests."""
        if not self.may_be_steady or self._paused or self.waiting or self.kv_holding_waiting or not self.running:
            return None
        if self.batch is not None and self.batch.requests == self.running:
            return self.batch
        self._leave()
        scheduled = self.prev_step_scheduled_req_ids
        if not all(request.request_id in scheduled and is_plain(request) for request in self.running):
            return None
        return SteadyBatch(self.running, self.max_model_len)

    def _advance(self, batch: SteadyBatch, output: ModelRunnerOutput) -> list[str]:
        """Removes the requests that may end from the batch, adds the step's tokens to the others, and returns the ids
        of the removed requests: vLLM ends them."""
        ending = batch.ending(output)
        names = [batch.ids[i] for i in ending]
        if ending:
            self._hold(batch.outputs(ending))
            batch.remove(ending)
        batch.advance(output)
        return names

    def _leave(self) -> None:
        """Ends the steady batch, if any: vLLM handles all of its requests from here on."""
        if self.batch is not None:
            self._hold(self.batch.flush())
            self.batch = None

    def _hold(self, outputs: Iterable[tuple[int, EngineCoreOutput]]) -> None:
        for client, output in outputs:
            self.held.setdefault(client, {}).setdefault(output.request_id, []).append(output)

    @property
    def _paused(self) -> bool:
        return self.pause_state is not PauseState.UNPAUSED

    def _may_hold(self, output: EngineCoreOutput) -> bool:
        """Returns True if an output may be held: the request permits holding and continues, and the output contains
        only tokens and log-probs.
        """
        request = self.requests.get(output.request_id)
        if request is None or not (request.sampling_params.extra_args or {}).get(MAY_HOLD):
            return False
        return all(map(operator.is_, _other_values(output), _DEFAULTS))

    def _send_held(self, messages: dict[int, EngineCoreOutputs]) -> None:
        self.sent = time.monotonic()
        if self.batch is not None:
            self._hold(self.batch.flush())
        for client, held in self.held.items():
            if held:
                messages.setdefault(client, EngineCoreOutputs()).outputs += map(merged, held.values())
        self.held.clear()


def _has_content(message: EngineCoreOutputs) -> bool:
    return bool(message.outputs or message.finished_requests or message.scheduler_stats)


def merged(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Merges the outputs of a request, at least one and in order, into the last, which is changed and returned. All but
    the last contain only tokens and log-probs."""
    *before, last = outputs
    if before:
        last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
        rows = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
        if rows:
            ids, values, ranks = (np.concatenate(column) for column in list(zip(*rows, strict=True))[:3])
            last.new_logprobs = LogprobsLists(ids, values, ranks)
    return last
