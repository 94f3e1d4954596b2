"""The load-balancing loss of experts (Switch Transformer, arXiv:2101.03961, equations 4 to 6) over a whole mini-batch.

    loss = coefficient · Σ over layers of  E · Σ_i f_i P_i

f_i is expert i's share of the mini-batch's choices, P_i the mean of the expert's router probability over the
mini-batch's tokens. E · Σ f_i P_i is 1 if all experts are chosen equally often.

megatron-core computes both per micro-batch, so the loss depends on the cut of the mini-batch. Over the whole mini-batch
(arXiv:2501.11873) the loss is a plain sum over tokens once f is known. f carries no gradient and is counted by a
forward pass without gradients, before training on the mini-batch.

Legend: E experts, K choices of a token, M MoE layers of this rank, L local tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

Routing = Callable[..., tuple[Tensor, Tensor]]
"""A routing function: (logits [L, 1, E], padding [L, 1]) → probabilities and mask of chosen experts, [L, E] each."""


class ExpertBalance:
    """The load-balancing loss of a rank's routers: counts choices, and adds the loss's gradient to the probabilities.

    Replaces `routing` of every router in the chunks.

    Args:
        chunks: The rank's model chunks.
        coefficient: `policy.moe.aux_loss`.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], coefficient: float) -> None:
        self.coefficient = coefficient
        self.routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
        self.counting = False
        for layer, router in enumerate(self.routers):
            router.routing = partial(self._routing, layer, router.routing)

    @contextmanager
    def counting_choices(self, experts: int, device: torch.device) -> Iterator[None]:
        """Counts the experts chosen in the forward passes inside the context; sets `share` and `tokens` at the end, not
        after an error. A collective of the ranks with the same layers. Call before training on each mini-batch, for the
        passes of all its micro-batches; also resets the sums of `value`.

        Args:
            experts: E.
            device: Device of the counters.
        """
        self.chosen, self.scores = torch.zeros(2, len(self.routers), experts, device=device)
        self.counting = True
        try:
            yield
        finally:
            self.counting = False
        dist.all_reduce(self.chosen, group=_same_layers_group())
        choices_M = self.chosen.sum(1, keepdim=True).clamp(min=1)
        self.share = experts * self.chosen / choices_M
        """[M, E]: E f_i; 1 if all experts are chosen equally often."""
        self.tokens = choices_M / max((router.topk for router in self.routers), default=1)
        """[M, 1]: tokens of the mini-batch."""

    def value(self) -> float:
        """Returns the mean of E · Σ f_i P_i over all MoE layers of the model, without the coefficient: 1 if all experts
        are chosen equally often. All ranks get the same number. A collective of all ranks. Call once, after
        `counting_choices` and training on the mini-batch."""
        dist.all_reduce(self.scores, group=_same_layers_group())
        sums = torch.stack([(self.share * self.scores / self.tokens).sum(), self.scores.new_tensor(len(self.routers))])
        dist.all_reduce(sums, group=mpu.get_pipeline_model_parallel_group())
        return float(sums[0] / sums[1])

    def _routing(self, layer: int, routing: Routing, logits: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        probs, chosen = routing(logits, padding_mask=padding_mask)
        if self.counting:
            self.chosen[layer] += (chosen & ~padding_mask.reshape(-1, 1)).sum(0)
        elif torch.is_grad_enabled():  # skips log-prob passes, and the first run of a layer to be recomputed
            router = self.routers[layer]
            _, scores = compute_routing_scores_for_aux_loss(
                logits.view(-1, logits.shape[-1]),
                router.topk,
                router.score_function,
                fused=router.config.moe_router_fusion,
                padding_mask=padding_mask.reshape(-1),
            )
            sums = scores.sum(0)
            self.scores[layer] += sums.detach()
            loss = self.coefficient * (self.share[layer] * sums / self.tokens[layer]).sum()
            probs = MoEAuxLossAutoScaler.apply(probs, loss)
        return probs, chosen


def _same_layers_group() -> dist.ProcessGroup:
    return mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
