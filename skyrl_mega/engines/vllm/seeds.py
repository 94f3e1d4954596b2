"""Seeds of vLLM's CPU sampler, drawn ahead.

On a CPU vLLM draws the seed of a request's next token from the request's generator, one call of torch for each request
and token: of 128 requests that is half a millisecond of a step. A block of seeds from the same generator is the same
numbers, for one call in `AHEAD`.
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
SEEDS = 2**31


class SeedsAhead:
    """`TopKTopPSampler.forward_cpu` with its own results, to the last bit."""

    def __init__(self, sampler: TopKTopPSampler) -> None:
        self.mode = sampler.logprobs_mode
        self.streams: WeakKeyDictionary[Generator, Iterator[int]] = WeakKeyDictionary()

    def __call__(
        self, logits: Tensor, generators: dict[int, Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """logits [N, V], a generator for each row that has one → tokens [N], and logits or log-probs [N, V]."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        logits = apply_top_k_top_p(logits, k, p)
        seen = None
        if self.mode == "processed_logits":
            seen = logits
        elif self.mode == "processed_logprobs":
            seen = logits.log_softmax(dim=-1, dtype=torch.float32)
        seeds = self.seeds(len(logits), generators)
        return torch.ops._C.fused_gumbel_argmax(logits.float(), seeds), seen

    def seeds(self, rows: int, generators: dict[int, Generator]) -> Tensor:
        """int64 [N]: the next of each row's own stream; of torch's where it has none."""
        seeds = torch.randint(SEEDS, (rows,)).tolist()
        for row, generator in generators.items():
            stream = self.streams.get(generator)
            if stream is None:
                self.streams[generator] = stream = _blocks(generator.clone_state())
            seeds[row] = next(stream)
        return torch.tensor(seeds)


def _blocks(generator: Generator) -> Iterator[int]:
    """The seeds that single draws from a generator would give."""
    while True:
        yield from torch.randint(SEEDS, (AHEAD,), generator=generator).tolist()


def draw_ahead(runner: Any) -> None:
    """Lets the sampler of vLLM's CPU model runner draw its seeds so, unless it is asked for 64-bit noise."""
    sampler = runner.sampler.topk_topp_sampler
    if sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
        sampler.forward = SeedsAhead(sampler)
