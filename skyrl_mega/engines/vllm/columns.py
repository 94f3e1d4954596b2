"""The log-probs of a request's tokens as one column of numbers, in the process that calls vLLM.

vLLM's front end appends the log-prob, id, rank and text of every token to four lists, one token at a time: for a small
model most of the calling process's time. Only the log-probs are read here, and whole arrays of them arrive.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists


class LogprobColumn(LogprobsProcessor):
    """A collector of the sampled tokens' log-probs; `logprobs` is an array of float32."""

    def __init__(self) -> None:
        super().__init__(
            tokenizer=None,
            logprobs=array("f"),
            prompt_logprobs=None,
            cumulative_logprob=None,
            num_logprobs=0,
            num_prompt_logprobs=None,
        )

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        column = logprobs_lists.logprobs[:, 0]  # the sampled token comes first
        self.logprobs.frombytes(column.astype(np.float32).tobytes())


def collect_columns(processor: OutputProcessor) -> None:
    """Replaces the method `add_request` of vLLM's output processor, so that the log-probs of later requests are
    collected in a `LogprobColumn` each. Requests already running are not changed."""
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        processor.request_states[request.request_id].logprobs_processor = LogprobColumn()

    processor.add_request = add_request
