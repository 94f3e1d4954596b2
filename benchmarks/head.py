"""The output head at published shapes, fused and chunked, on a tensor rank; used by kernels.py and gpu/head.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.kernels.linear_logprobs import backward_bytes, forward_bytes
from skyrl_mega.megatron.vocab_parallel import vocab_parallel_logprobs

CHUNK = 1024
"""Tokens per chunk of the chunked head, as in `policy.logit_chunk`."""


@dataclass(frozen=True)
class Shape:
    """A rank's part of a head."""

    name: str
    tokens: int
    hidden: int
    vocab: int
    """Size of the whole vocabulary."""
    tensor: int = 1
    """Ranks sharing the vocabulary."""

    @property
    def columns(self) -> int:
        """Returns this rank's columns."""
        return -(-self.vocab // self.tensor)

    @property
    def product(self) -> int:
        """Returns the FLOPs of hidden · weight. A forward pass takes one product; a backward pass takes three more, as
        one is recomputed."""
        return 2 * self.tokens * self.hidden * self.columns

    def buffers(self, itemsize: int) -> tuple[int, int]:
        """Returns the bytes of the fused head's buffers, forward and backward, without the outputs."""
        forward = forward_bytes(self.tokens, self.columns)
        return forward, max(forward, backward_bytes(self.tokens, self.columns, self.hidden, itemsize))


SHAPES = tuple(
    Shape(f"{model}, TP{tensor}", 8192, hidden, 151936, tensor)
    for model, hidden in (("30B", 2048), ("235B", 4096))
    for tensor in (1, 4)
)
TINY = (Shape("tiny, TP1", 64, 32, 500), Shape("tiny, TP4", 64, 48, 500, 4))


class Measured:
    """Random bfloat16 inputs of a shape, with the head to measure. Needs a process group of a single process."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.shape = shape
        self.hidden, self.weight = (
            (torch.randn(n, shape.hidden, generator=generator, device=device) * scale).bfloat16().requires_grad_()
            for n, scale in ((shape.tokens, 1.0), (shape.columns, 0.02))
        )
        self.targets = torch.randint(0, shape.columns, (shape.tokens,), generator=generator, device=device)

    def run(self, hidden: Tensor, targets: Tensor, chunk: int | None) -> tuple[Tensor, ...]:
        """Returns log-probs and entropy, from the fused head if `chunk` is None."""
        world, vocab = dist.group.WORLD, self.shape.columns
        assert world is not None
        return vocab_parallel_logprobs(
            hidden, self.weight, targets, vocab=vocab, temperature=0.7, chunk=chunk, group=world
        )

    def forward(self, chunk: int | None) -> Tensor:
        """Runs the forward pass, as for old log-probs."""
        with torch.no_grad():
            return self.run(self.hidden, self.targets, chunk)[0]

    def both(self, chunk: int | None) -> Tensor:
        """Runs forward and backward, as in training."""
        self.forget()
        logprobs = self.run(self.hidden, self.targets, chunk)[0]
        logprobs.sum().backward()
        return logprobs

    def forget(self) -> None:
        """Drops the gradients."""
        self.hidden.grad = self.weight.grad = None
