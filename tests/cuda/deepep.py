"""The package deep_ep in plain torch over gloo: the part used by megatron-core's `flex` dispatcher, and a replacement
of its kernel.

Call `install` before the import of megatron-core. All work counts as the device's, except the numbers of tokens for
each expert: the real dispatch waits for these numbers on the host.
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
    """Route of tokens to ranks, passed from a dispatch to its combine."""

    token: Tensor
    """int64: indices of the sent tokens in sending order, rank by rank."""
    sent: list[int]
    received: list[int]
    tokens: int
    choices: Tensor
    """bool [sent, K]: choices of a token carried by this copy."""


class Buffer:
    """Replacement of `deep_ep.Buffer`."""

    num_nvl_bytes = num_rdma_bytes = 0
    waits: Waits

    def __init__(self, group: Any, *_: Any) -> None:
        self.group = group

    @staticmethod
    def set_num_sms(count: int) -> None:
        """Does nothing: a CPU has no SMs."""

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        """Returns a configuration with buffer sizes of 0."""
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda *_: 0, get_rdma_buffer_size_hint=lambda *_: 0)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, indices: Tensor, experts: int, **_: Any) -> tuple[Any, ...]:
        """Returns the layout; `dispatch` below needs the number of experts only."""
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
        """Returns this rank's tokens, choices (-1: an expert of another rank), weights, and tokens of each expert."""
        with self._on_the_device():
            if handle is not None:
                return self._send(x[handle.token], handle.sent, handle.received), None, None, None, None, _Event()
            assert topk_idx is not None and topk_weights is not None
            ranks = self.group.size()
            local = num_tokens_per_expert // ranks
            masks = [(topk_idx // local == rank) & (topk_idx >= 0) for rank in range(ranks)]
            token = torch.cat([mine.any(1).nonzero()[:, 0] for mine in masks])
            choices = torch.cat([mine[mine.any(1)] for mine in masks])
            sent = [int(mine.any(1).sum()) for mine in masks]
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
        """Returns the sum of the copies of each token."""
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
    """Replacement of `EventHandle` and `EventOverlap`: the stream waits, not the host."""

    def __init__(self, *_: Any) -> None:
        pass

    def current_stream_wait(self) -> None: ...


class _Multihot(torch.autograd.Function):
    """Replacement of megatron-core's Triton kernel for unfolding indices [T, K] and probabilities to [T, E]."""

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
    """Replaces megatron-core's Triton kernel after the import of megatron-core."""
    from megatron.core.transformer.moe import token_dispatcher

    module: Any = token_dispatcher
    module.fused_indices_to_multihot = _Multihot.apply
