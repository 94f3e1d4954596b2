"""Less work for vLLM's sampler on a CPU, with the same tokens and log-probs.

- vLLM draws the seed of a request's next token from the request's generator, with a torch call for each request and
  token: half a millisecond per step for 128 requests. A block of seeds from the same generator contains the same
  numbers, with a single call for `AHEAD` seeds.
- With the log-prob of a token vLLM returns the token's rank, and compares the log-probs of all tokens for it. Nothing
  here reads ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

AHEAD = 64
"""Number of seeds drawn at once from a generator."""
SEEDS = 2**31
"""Number of possible seeds."""


class SeedsAhead:
    """A replacement for `TopKTopPSampler.forward_cpu` with the same results, to the last bit.

    Args:
        sampler: vLLM's sampler, whose `logprobs_mode` decides about the second result.
    """

    def __init__(self, sampler: TopKTopPSampler) -> None:
        self.mode = sampler.logprobs_mode
        self.streams: WeakKeyDictionary[Generator, _Stream] = WeakKeyDictionary()
        self.generators: dict[int, Generator] = {}
        """The rows' generators in the last call."""
        self.current: list[_Stream] = []
        """The streams of these rows, in the same order."""
        self.blocks = np.empty((0, AHEAD), np.int64)
        """Their present blocks of seeds."""
        self.used = np.empty(0, np.intp)
        """Number of used seeds of each block."""

    def __call__(
        self, logits: Tensor, generators: dict[int, Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Samples a token per row from logits, with the rows' generators.

        Args:
            logits: [N, V].
            generators: Row → generator; a row without one uses torch's default generator.
            k: Number of tokens kept per row (top-k), [N]; None keeps all.
            p: Probability kept per row (top-p), [N]; None keeps all.

        Returns:
            The tokens [N]; and the logits or float32 log-probs [N, V] after top-k and top-p, None unless the sampler's
            `logprobs_mode` is "processed_logits" or "processed_logprobs".
        """
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        logits = apply_top_k_top_p(logits, k, p)
        processed = None
        if self.mode == "processed_logits":
            processed = logits
        elif self.mode == "processed_logprobs":
            processed = logits.log_softmax(dim=-1, dtype=torch.float32)
        seeds = self.seeds(len(logits), generators)
        return torch.ops._C.fused_gumbel_argmax(logits.float(), seeds), processed

    def seeds(self, rows: int, generators: dict[int, Generator]) -> Tensor:
        """Returns a seed for each of `rows` rows, int64 [N] on the CPU: the next of the row's generator in `generators`
        (row → generator), or of torch's default generator for a row without one. The default generator advances by
        `rows` numbers in every call. The given generators themselves are not advanced: their seeds come from copies
        made when the mapping is first given or has changed.
        """
        seeds = torch.randint(SEEDS, (rows,))
        if generators != self.generators:
            self._take(generators)
        if self.current:
            seeds.numpy()[list(generators)] = self.blocks[np.arange(len(self.used)), self.used]
            self.used += 1
            for i in np.flatnonzero(self.used == AHEAD):
                self.blocks[i], self.used[i] = self.current[i].draw(), 0
        return seeds

    def _take(self, generators: dict[int, Generator]) -> None:
        """Takes over the streams of these generators, each at the place that it has reached."""
        for stream, block, used in zip(self.current, self.blocks, self.used, strict=True):
            stream.block, stream.used = block, int(used)
        self.generators = dict(generators)
        for generator in generators.values():
            if generator not in self.streams:
                self.streams[generator] = _Stream(generator)
        self.current = [self.streams[generator] for generator in generators.values()]
        self.blocks = np.array([stream.block for stream in self.current]).reshape(-1, AHEAD)
        self.used = np.array([stream.used for stream in self.current], np.intp)


class _Stream:
    """The seeds of a generator: the same numbers as single draws from the generator, which is not advanced."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator.clone_state()
        self.block = self.draw()
        """Seeds [AHEAD], as of the last change of the rows."""
        self.used = 0

    def draw(self) -> np.ndarray:
        """Returns the next block of seeds, int64 [AHEAD]."""
        return torch.randint(SEEDS, (AHEAD,), generator=self.generator).numpy()


Gather = Callable[[Tensor, int, Tensor], "LogprobsTensors"]


def without_ranks(gather: Gather) -> Gather:
    """Returns a replacement for vLLM's `Sampler.gather_logprobs` that does not compute ranks where only the log-prob of
    the sampled token is wanted: ranks are 0 there."""

    def gather_sampled(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        from vllm.v1.outputs import LogprobsTensors

        if num_logprobs:
            return gather(logprobs, num_logprobs, token_ids)
        column = token_ids.unsqueeze(-1)
        return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), torch.zeros_like(token_ids))

    return gather_sampled


def save_work(runner: Any) -> None:
    """Replaces parts of the sampler of vLLM's CPU model runner (see the head of this file). The function that draws
    seeds stays if the sampler does not use the one for CPUs, or 64-bit noise is requested."""
    runner.sampler.gather_logprobs = without_ranks(runner.sampler.gather_logprobs)
    sampler = runner.sampler.topk_topp_sampler
    if sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
        sampler.forward = SeedsAhead(sampler)
