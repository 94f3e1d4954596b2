"""From a micro-batch's last hidden states to what is read from them: log-probs of its tokens, or values.

Both work only on the tokens that count: prompts and observations are most of an agent's tokens, and the output
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
    """Log-probs and entropy, float32 [L] each, and Σ_v p(v)² where it is asked for; 0 for tokens that nobody asks for.

    Args:
        model: The last chunk.
        hidden: [L/tp, 1, H].
        micro: Its columns `mask` and `weights`, where there are any, say which tokens count.
        vocab: Tokens without padding.
        temperature: Divides the logits.
        chunk: Tokens whose logits exist at once; None: the fused head.
        squares: Asks for them.
    """
    weight = head_weight(model)
    hidden, at = _whole(hidden, same_gradient=False), counted(micro)
    values = vocab_parallel_logprobs(
        hidden[at, 0].to(weight.dtype),
        weight,
        micro.targets[at],
        vocab=vocab,
        temperature=temperature,
        chunk=chunk,
        group=mpu.get_tensor_model_parallel_group(),
        squares=squares,
    )
    return tuple(v.new_zeros(len(micro.targets)).index_copy(0, at, v) for v in values)


def values_of(model: Any, hidden: Tensor, micro: MicroBatch) -> Tensor:
    """The value of the state before each target, that is V(s_t) where token t is drawn in s_t: float32 [L].

    Every tensor rank computes all of them from the same hidden states, so each has the head's whole gradient and its
    own part of the hidden states'. 0 for tokens that nobody asks for.

    Args:
        model: The last chunk of a critic.
        hidden: [L/tp, 1, H].
        micro: As in `logprobs_of`.
    """
    weight = head_weight(model)
    hidden, at = _whole(hidden, same_gradient=True), counted(micro)
    values = (hidden[at, 0].float() @ weight.T)[:, 0]
    return values.new_zeros(len(micro.targets)).index_copy(0, at, values)


def counted(micro: MicroBatch) -> Tensor:
    """int64: the places whose target counts: it is predicted, and neither masked out nor of weight 0."""
    wanted = micro.source >= 0
    for name in ("mask", "weights"):
        if name in micro.columns:
            wanted = wanted & (micro.columns[name] != 0)
    return wanted.nonzero()[:, 0]


def _whole(hidden: Tensor, *, same_gradient: bool) -> Tensor:
    """[L, 1, H] from the tensor ranks' parts along the sequence.

    Args:
        same_gradient: Every rank goes on alike, so that each one's gradient is the whole; else they are summed.
    """
    if mpu.get_tensor_model_parallel_world_size() == 1:
        return hidden
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not same_gradient)
