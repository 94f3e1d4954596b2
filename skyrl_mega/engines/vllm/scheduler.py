"""vLLM's scheduler, which sends the tokens of a request on together.

vLLM packs the token and the log-prob that a request got in a step, and the process that asked unpacks them: for a small
model a sixth of what an engine computes. Nobody here reads a response before it has ended, so tokens wait for one
another, for `HOLD_S` at most: long enough to save that work, and short enough to see whether an engine stands still.
"""

from __future__ import annotations

import operator
import time
from typing import Any

import msgspec
import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

from skyrl_mega.engines.vllm.plugin import MAY_HOLD

HOLD_S = 0.1

_REST = [
    f for f in msgspec.structs.fields(EngineCoreOutput) if f.name not in ("request_id", "new_token_ids", "new_logprobs")
]
_rest = operator.attrgetter(*(f.name for f in _REST))
_NOTHING = tuple(f.default for f in _REST)
"""What an output has beside tokens and their log-probs, where it has nothing."""


class HoldingScheduler(Scheduler):
    """Tokens of requests that allow it (`MAY_HOLD` in their `extra_args`) wait until the request ends, `HOLD_S` are
    over, or vLLM pauses: before weights change, everything that the old ones drew has been sent.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[int, dict[str, list[EngineCoreOutput]]] = {}
        """Client → request → what it got and was not told yet."""
        self.sent = time.monotonic()

    def update_from_output(self, *args: Any) -> dict[int, EngineCoreOutputs]:
        """vLLM's own, less the outputs that wait, and with those that have waited."""
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(*args)
        for client, message in messages.items():
            held = self.held.setdefault(client, {})
            going = []
            for output in message.outputs:
                held.setdefault(output.request_id, []).append(output)
                if not self._waits(output):
                    going.append(merged(held.pop(output.request_id)))
            message.outputs = going
        if self._paused or time.monotonic() - self.sent >= HOLD_S:
            self._let_go(messages)
        return {client: message for client, message in messages.items() if _says_something(message)}

    def has_requests(self) -> bool:
        """Whether there is work: before a pause is complete, what was held is sent in a step of no tokens."""
        return bool(super().has_requests() or (self._paused and any(self.held.values())))

    def finish_requests(self, *args: Any) -> list[Any]:
        """Ends requests from outside; nobody waits for what they held."""
        ended: list[Any] = super().finish_requests(*args)
        for request in ended:
            self.held.get(request.client_index, {}).pop(request.request_id, None)
        return ended

    @property
    def _paused(self) -> bool:
        return self.pause_state is not PauseState.UNPAUSED

    def _waits(self, output: EngineCoreOutput) -> bool:
        """Whether it may: its request allows it, goes on, and it has nothing but tokens and their log-probs."""
        request = self.requests.get(output.request_id)
        if request is None or not (request.sampling_params.extra_args or {}).get(MAY_HOLD):
            return False
        return all(map(operator.is_, _rest(output), _NOTHING))

    def _let_go(self, messages: dict[int, EngineCoreOutputs]) -> None:
        self.sent = time.monotonic()
        for client, held in self.held.items():
            if held:
                messages.setdefault(client, EngineCoreOutputs()).outputs += map(merged, held.values())
        self.held.clear()


def _says_something(message: EngineCoreOutputs) -> bool:
    return bool(message.outputs or message.finished_requests or message.scheduler_stats)


def merged(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The outputs of one request, in order, as one; all but the last have nothing but tokens and log-probs."""
    *before, last = outputs
    if before:
        last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
        rows = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
        if rows:
            ids, values, ranks = (np.concatenate(column) for column in list(zip(*rows, strict=True))[:3])
            last.new_logprobs = LogprobsLists(ids, values, ranks)
    return last
