"""Log-probs collected as columns equal those of vLLM's own front end."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from skyrl_mega.engines.vllm.columns import collect_columns


class FrontEnd:
    """vLLM's output processor as far as `collect_columns` uses it."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any, prompt: str | None, queue: object = None) -> None:
        """Adds a request with vLLM's own collector."""
        collector = LogprobsProcessor.from_new_request(None, request)
        self.request_states[request.request_id] = SimpleNamespace(logprobs_processor=collector)


def logprobs_of(processor: Any) -> Any:
    """Returns the log-probs of two outputs, of three tokens and of one, by a new request's collector."""
    request: Any = SimpleNamespace(request_id="a", sampling_params=SamplingParams(logprobs=0, flat_logprobs=True))
    processor.add_request(request, None, queue=None)
    collector = processor.request_states["a"].logprobs_processor
    draw = np.random.default_rng(0)
    for count in (3, 1):
        ids, ranks = draw.integers(0, 99, (count, 1)), draw.integers(1, 9, count)
        rows = LogprobsLists(ids, np.log(draw.random((count, 1), np.float32)), ranks)
        collector.update_from_output(EngineCoreOutput("a", ids[:, 0].tolist(), rows))
    return collector.logprobs


def test_columns_equal_vllms_lists() -> None:
    ours = FrontEnd()
    collect_columns(ours)
    assert logprobs_of(ours) == array("f", logprobs_of(FrontEnd()).logprobs)
