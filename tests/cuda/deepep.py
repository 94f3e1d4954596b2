"""The package deep_ep in plain torch over gloo: what megatron-core's `flex` dispatcher calls of it, and its own kernel.

Call `install` before megatron-core is imported. Everything that it does is the device's but the numbers of tokens for
each expert, which its own dispatch waits for on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.cuda.syncs import Waits


@dataclass(frozen=True)
class Route:
    """Which tokens went to which rank: what a dispatch leaves for its combine."""

    token: Tensor
    """int64: tokens in the order in which they were sent, rank by rank."""
    sent: list[int]
    received: list[int]
    tokens: int
    choices: Tensor
    """bool [sent, K]: the choices of a token that its copy carries."""


class Buffer:
    """`deep_ep.Buffer`."""

    num_nvl_bytes = num_rdma_bytes = 0
    waits: Waits

    def __init__(self, group: Any, *_: Any) -> None:
        self.group = group

    @staticmethod
    def set_num_sms(count: int) -> None:
        """Nothing has any."""

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        """Of no size."""
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda *_: 0, get_rdma_buffer_size_hint=lambda *_: 0)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, indices: Tensor, experts: int, **_: Any) -> tuple[Any, ...]:
        """Of which this one's dispatch needs the number of experts alone."""
        return None, None, experts, None, None

    def dispatch(
        self,
        x: Tensor,
        handle: Route | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_tokens_per_expert: int = 0,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Tokens, choices (-1: another rank's expert) and weights that this rank receives, tokens of each expert."""
        with self._on_the_device():
            if handle is not None:
                return self._send(x[handle.token], handle.sent, handle.received), None, None, None, None, _Event()
            assert topk_idx is not None and topk_weights is not None
            ranks = self.group.size()
            local = num_tokens_per_expert // ranks
            here = [(topk_idx // local == rank) & (topk_idx >= 0) for rank in range(ranks)]
            token = torch.cat([mine.any(1).nonzero()[:, 0] for mine in here])
            choices = torch.cat([mine[mine.any(1)] for mine in here])
            sent = [int(mine.any(1).sum()) for mine in here]
            counts: list[Any] = [None] * ranks
            dist.all_gather_object(counts, sent, group=self.group)
            received = [of[self.group.rank()] for of in counts]
            route = Route(token, sent, received, len(x), choices)
            index = torch.where(choices, topk_idx[token] % local, -1)
            index = self._send(index, sent, received)
            weights = self._send(topk_weights[token] * choices, sent, received)
            tokens = [int((index == expert).sum()) for expert in range(local)]
            return self._send(x[token], sent, received), index, weights, tokens, route, _Event()

    def combine(
        self, x: Tensor, handle: Route, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, Any]:
        """The sum of what comes back of each token."""
        with self._on_the_device():
            back = self._send(x, handle.received, handle.sent)
            out = torch.zeros(handle.tokens, x.shape[1]).index_add(0, handle.token, back.float()).to(x.dtype)
            if topk_weights is None:
                return out, None, _Event()
            weights = self._send(topk_weights, handle.received, handle.sent) * handle.choices
            summed = weights.new_zeros(handle.tokens, weights.shape[1]).index_add(0, handle.token, weights)
            return out, summed, _Event()

    def _send(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out

    @contextmanager
    def _on_the_device(self) -> Iterator[None]:
        with self.waits.pause(), torch.no_grad():
            yield


class _Event:
    """`EventHandle` and `EventOverlap`: the stream waits, not the host."""

    def __init__(self, *_: Any) -> None:
        pass

    def current_stream_wait(self) -> None: ...


class _Multihot(torch.autograd.Function):
    """megatron-core's Triton kernel that unfolds indices [T, K] and their probabilities to [T, E]."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, probs: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        at = torch.where(indices < 0, experts, indices)
        ctx.save_for_backward(at)
        mask = torch.zeros(len(at), experts + 1, dtype=torch.bool).scatter(1, at, True)[:, :-1]
        return mask.contiguous(), probs.new_zeros(len(at), experts + 1).scatter(1, at, probs)[:, :-1].contiguous()

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (at,) = ctx.saved_tensors
        return None, torch.cat([grad, grad.new_zeros(len(grad), 1)], 1).gather(1, at), None


def install(waits: Waits) -> None:
    """Makes `deep_ep` importable in this process."""
    Buffer.waits = waits
    package: Any = ModuleType("deep_ep")
    utils: Any = ModuleType("deep_ep.utils")
    package.Buffer, package.utils = Buffer, utils
    utils.EventHandle = utils.EventOverlap = _Event
    sys.modules["deep_ep"], sys.modules["deep_ep.utils"] = package, utils


def stand_in() -> None:
    """In the place of megatron-core's Triton kernel, once it is imported."""
    from megatron.core.transformer.moe import token_dispatcher

    module: Any = token_dispatcher
    module.fused_indices_to_multihot = _Multihot.apply
