"""An engine actor around a simulated vLLM with chosen cache and speed."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyrl_mega.engines.base import EngineDied, Facts, Request, Sampling
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import EngineSpec


@dataclass
class _Sequence:
    tokens: int
    """Number of tokens to generate."""
    got: list[int] = field(default_factory=list)
    full: asyncio.Event = field(default_factory=asyncio.Event)

    def num_output_tokens(self) -> int:
        return len(self.got)


class SimulatedVllm:
    """The parts of `AsyncLLM` used by an engine: the first `places` sequences get a token every `token_s`."""

    def __init__(self, places: int, token_s: float, stalls_after: int | None) -> None:
        self.places, self.token_s, self.stalls_after = places, token_s, stalls_after
        self.errored, self.given, self.paused = False, 0, False
        self.most = 0
        """Largest number of requests at once."""
        self.hung_replica: int | None = None
        """Replica without progress."""
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=self.pause_generation, resume_scheduler_async=self.resume_generation
        )
        self.steps = asyncio.create_task(self._steps())

    async def pause_generation(self, **_: Any) -> None:
        """Pauses generation, like vLLM."""
        self.paused = True

    async def resume_generation(self) -> None:
        """Resumes generation, like vLLM."""
        self.paused = False

    async def generate(
        self, prompt: Any, parameters: Any, request: str, *, data_parallel_rank: int
    ) -> AsyncIterator[Any]:
        """Yields the whole output at the end, like vLLM; every sequence gets the full length."""
        sequence = _Sequence(parameters.max_tokens)
        states = self.output_processor.request_states
        states[request] = SimpleNamespace(detokenizer=sequence, external_req_id=request, replica=data_parallel_rank)
        self.most = max(self.most, len(states))
        try:
            await sequence.full.wait()
        finally:
            del states[request]
        logprobs = array("f", [0.0]) * sequence.tokens
        result = SimpleNamespace(
            token_ids=sequence.got, logprobs=logprobs, finish_reason="length", weight_versions=None
        )
        yield SimpleNamespace(outputs=[result])

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.token_s)
            if self.paused or (self.stalls_after is not None and self.given >= self.stalls_after):
                continue
            states = self.output_processor.request_states.values()
            computing = [state for state in states if state.replica != self.hung_replica]
            for sequence in [state.detokenizer for state in computing][: self.places]:
                if len(sequence.got) < sequence.tokens:
                    sequence.got.append(7)
                    self.given += 1
                if len(sequence.got) == sequence.tokens:
                    sequence.full.set()


class SimulatedEngine(VllmEngine):
    """An engine around the simulated vLLM. A file named `well` in the model's folder ends its faults.

    Args:
        spec: Spec of the engine.
        places: Sequences in the cache.
        token_s: Seconds per token of each sequence.
        stalls_after: Number of tokens before the engine stalls; None: never.
        facts: Facts returned by `start`.
    """

    def __init__(
        self, spec: EngineSpec, places: int, token_s: float, stalls_after: int | None = None, facts: Facts | None = None
    ) -> None:
        super().__init__(spec)
        self.places, self.token_s, self.stalls_after = places, token_s, stalls_after
        self.facts = facts or Facts(cache_tokens=places * 10, cache_bytes=1)

    async def start(self, former: Facts | None = None) -> Facts:
        """Loads no model and imports nothing of vLLM, which takes ten seconds."""
        well = (Path(self.spec.path) / "well").exists()
        fault = None if well else self.stalls_after
        self.llm = SimulatedVllm(self.places, self.token_s, fault)  # type: ignore[assignment]
        self.watched = True
        return self.facts

    def prompt(self, request: Request) -> Any:
        """Returns the request's tokens."""
        return list(request.tokens)

    def parameters(self, request: Request, sampling: Sampling) -> Any:
        """Returns the only parameter read by the simulated vLLM."""
        return SimpleNamespace(max_tokens=request.max_tokens)

    def _translate_error(self, error: Exception) -> Exception:
        return EngineDied(f"vLLM's process died: {error}") if self.llm.errored else error

    async def most(self) -> int:
        """Returns the largest number of requests at once."""
        return self.llm.most  # type: ignore[attr-defined,no-any-return]
