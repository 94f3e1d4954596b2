"""Seeds of vLLM's CPU sampler, drawn in blocks.

On a CPU vLLM draws the seed of a request's next token from the request's generator, with a torch call for each request
and token: half a millisecond per step for 128 requests. A block of seeds from the same generator contains the same
numbers, with a single call for `AHEAD` seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
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
        self.streams: WeakKeyDictionary[Generator, Iterator[int]] = WeakKeyDictionary()
        self.generators: dict[int, Generator] = {}
        """The rows' generators in the last call."""
        self.rows: list[tuple[int, Iterator[int]]] = []
        """The rows' streams in the last call."""

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
        seeds = torch.randint(SEEDS, (rows,)).tolist()
        if generators != self.generators:
            self.generators = dict(generators)
            self.rows = [(row, self._stream(generator)) for row, generator in generators.items()]
        for row, stream in self.rows:
            seeds[row] = next(stream)
        return torch.tensor(seeds)

    def _stream(self, generator: Generator) -> Iterator[int]:
        stream = self.streams.get(generator)
        if stream is None:
            self.streams[generator] = stream = _blocks(generator.clone_state())
        return stream


def _blocks(generator: Generator) -> Iterator[int]:
    """Yields the same seeds as single draws from a generator."""
    while True:
        yield from torch.randint(SEEDS, (AHEAD,), generator=generator).tolist()


def draw_ahead(runner: Any) -> None:
    """Replaces the sampling function of vLLM's CPU model runner by `SeedsAhead`, which draws the same seeds in blocks.
    Changes nothing if the sampler does not use the CPU function, or 64-bit noise is requested."""
    sampler = runner.sampler.topk_topp_sampler
    if sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
        sampler.forward = SeedsAhead(sampler)
