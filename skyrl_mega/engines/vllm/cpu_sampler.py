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
        """Generator → its stream, also of requests that have no row now, until the generator is deleted."""
        self.generators: dict[int, Generator] = {}
        """The rows' generators in the last call."""
        self.rows: list[int] = []
        """These rows, in the order of the mapping that was given first: an equal one may have another order."""
        self.current: list[_Stream] = []
        """The streams of `rows`, in the same order."""
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
        """Returns a seed for each of `rows` rows, int64 [N] on the CPU.

        A row in `generators` (row → generator) gets the next seed of its generator; another row gets one of torch's
        default generator, which advances by `rows` numbers in every call. A given generator is copied when it is first
        seen, and is not advanced. It may change its row, or leave and come back: its seeds continue.
        """
        seeds = torch.randint(SEEDS, (rows,))
        if generators != self.generators:
            self._take(generators)
        if self.current:
            seeds.numpy()[self.rows] = self.blocks[np.arange(len(self.used)), self.used]
            self.used += 1
            for i in np.flatnonzero(self.used == AHEAD):
                self.blocks[i], self.used[i] = self.current[i].draw(), 0
        return seeds

    def _take(self, generators: dict[int, Generator]) -> None:
        """Saves the places of the present streams, then makes the streams of `generators` the present ones, each at its
        own place. Starts a stream for a new generator."""
        for stream, block, used in zip(self.current, self.blocks, self.used, strict=True):
            stream.block, stream.used = block.copy(), int(used)
        self.generators, self.rows = dict(generators), list(generators)
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
        """Seeds [AHEAD]. While the stream has a row, `SeedsAhead.blocks` has the newer ones."""
        self.used = 0
        """Number of used seeds of `block`; as old as `block`."""

    def draw(self) -> np.ndarray:
        """Returns the next block of seeds, int64 [AHEAD]."""
        return torch.randint(SEEDS, (AHEAD,), generator=self.generator).numpy()


Gather = Callable[[Tensor, int, Tensor], "LogprobsTensors"]


def without_ranks(gather: Gather) -> Gather:
    """Returns a replacement for vLLM's `Sampler.gather_logprobs` that returns 0 for every rank if only the log-prob of
    the given token is wanted (`num_logprobs` 0); otherwise the same as `gather`."""

    def gather_sampled(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        from vllm.v1.outputs import LogprobsTensors

        if num_logprobs:
            return gather(logprobs, num_logprobs, token_ids)
        column = token_ids.unsqueeze(-1)
        return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), torch.zeros_like(token_ids))

    return gather_sampled


def reduce_work(runner: Any) -> None:
    """Makes the sampler of vLLM's CPU model runner compute no unread ranks, and draw seeds in blocks (see the head of
    this file). Seeds are drawn as before if the sampler does not use `forward_cpu`, or 64-bit noise is requested."""
    runner.sampler.gather_logprobs = without_ranks(runner.sampler.gather_logprobs)
    sampler = runner.sampler.topk_topp_sampler
    if sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
        sampler.forward = SeedsAhead(sampler)
