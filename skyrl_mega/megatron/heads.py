"""Log-probs of tokens, or values of states, from the last hidden states of a micro-batch.

Both are computed only for tokens with a weight: prompts and observations are most of an agent's tokens, and the output
projection is most of a small model's work.

Legend: L tokens of the micro-batch on this context rank, H width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from skyrl_mega.megatron.model import head_weight
from skyrl_mega.megatron.packing import MicroBatch
from skyrl_mega.megatron.vocab_parallel import vocab_parallel_logprobs


def logprobs_of(
    model: Any,
    hidden: Tensor,
    micro: MicroBatch,
    *,
    vocab: int,
    temperature: float,
    chunk: int | None,
    squares: bool = False,
) -> tuple[Tensor, ...]:
    """Returns log-probs and entropies of the targets in nats, float32 [L] each, and with `squares` also Σ_v p(v)².

    Tokens that do not count (`counted_positions`) get 0. A collective of the tensor ranks.

    Args:
        model: The last chunk.
        hidden: [L/tp, 1, H].
        micro: The micro-batch; optional columns `mask` and `weights` select the counted tokens.
        vocab: Tokens without padding.
        temperature: Divides the logits.
        chunk: Number of tokens with logits in memory at a time; None: the fused head.
        squares: True to compute Σ_v p(v)².
    """
    weight = head_weight(model)
    hidden, positions = _gather_sequence(hidden, same_gradient=False), counted_positions(micro)
    values = vocab_parallel_logprobs(
        hidden[positions, 0].to(weight.dtype),
        weight,
        micro.targets[positions],
        vocab=vocab,
        temperature=temperature,
        chunk=chunk,
        group=mpu.get_tensor_model_parallel_group(),
        squares=squares,
    )
    return tuple(v.new_zeros(len(micro.targets)).index_copy(0, positions, v) for v in values)


def values_of(model: Any, hidden: Tensor, micro: MicroBatch) -> Tensor:
    """Returns the value of the state before each target, V(s_t) with token t sampled in s_t: float32 [L]; 0 for targets
    that do not count (`counted_positions`).

    Every tensor rank computes all values from the same hidden states. So each rank holds the head's whole gradient, and
    its own part of the hidden states' gradient. A collective of the tensor ranks.

    Args:
        model: The last chunk of a critic.
        hidden: [L/tp, 1, H].
        micro: See `logprobs_of`.
    """
    weight = head_weight(model)
    hidden, positions = _gather_sequence(hidden, same_gradient=True), counted_positions(micro)
    values = (hidden[positions, 0].float() @ weight.T)[:, 0]
    return values.new_zeros(len(micro.targets)).index_copy(0, positions, values)


def counted_positions(micro: MicroBatch) -> Tensor:
    """Returns the positions in this context rank's part of the packed row, int64, of targets that count: with a
    sequence's token as target, not masked out, and not of weight 0. In ascending order."""
    is_counted = micro.source >= 0
    for name in ("mask", "weights"):
        if name in micro.columns:
            is_counted = is_counted & (micro.columns[name] != 0)
    return is_counted.nonzero()[:, 0]


def _gather_sequence(hidden: Tensor, *, same_gradient: bool) -> Tensor:
    """Gathers the tensor ranks' parts along the sequence to [L, 1, H].

    Args:
        same_gradient: True if every rank computes the same from here on, so each rank's gradient is already the whole;
            False to sum the ranks' gradients.
    """
    if mpu.get_tensor_model_parallel_world_size() == 1:
        return hidden
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not same_gradient)
