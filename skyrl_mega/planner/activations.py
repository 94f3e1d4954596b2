"""Activation memory of a policy rank for the backward pass, estimated by formulas of autograd's saved tensors, not
measured.

Follows Korthikanti et al. (arXiv:2205.05198), adapted to this policy's layers: packed sequences, flash attention (no
score matrix), no dropout, gated MLPs as separate operations unless fused, and experts receiving k copies of every
token. With tensor parallelism all activations between linear layers are cut along the sequence. The formulas of single
blocks are `saved_bytes` and `gradient_bytes` (`models/blocks/`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from skyrl_mega.kernels.linear_logprobs import backward_bytes, forward_bytes
from skyrl_mega.models.blocks.base import Spec, Work
from skyrl_mega.models.blocks.embedding import padded_vocab
from skyrl_mega.models.blocks.value_head import ValueHeadBlock
from skyrl_mega.models.decoder import Decoder, Layer
from skyrl_mega.parallel.dims import ParallelDims

IMBALANCE = 1.25
"""Tokens of the busiest rank's experts over the mean, averaged over layers: an assumption about the router."""
HOTTEST = 2.0
"""Tokens of the busiest rank's experts over the mean, in the worst of the thousands of layers and micro-batches in a
step: also an assumption."""
HOST_PAGE = 32 * 2**20
"""Bytes of one host memory allocation by a layer (`megatron.activation_offload`)."""
BATCH_BYTES = 64
"""Bytes per token of a packed micro-batch: inputs, positions, targets, indices and loss fields."""


@dataclass(frozen=True)
class LongestRow:
    """Longest micro-batch, packed into a row, and the number of micro-batches."""

    tokens: int
    """Tokens on one context rank."""
    count: int
    """Number of micro-batches per optimizer step on each data-parallel rank."""
    repeated_keys: float = 0.0
    """See `Work.repeated_keys`."""


@dataclass(frozen=True)
class Activations:
    """Peak bytes of activations on a policy rank by phase, estimated."""

    train: int
    """Bytes in the forward and backward pass, without `train_logits`."""
    forward: int
    """Bytes in a log-prob pass, one layer at a time, without `forward_logits`."""
    train_logits: int
    """Bytes of the output head in the backward pass; 0 except on the last stage."""
    forward_logits: int
    """Bytes of the output head in a log-prob pass; 0 except on the last stage."""
    host: int = 0
    """Bytes kept by layers in host memory (`policy.offload_layers`)."""


@lru_cache(maxsize=4096)
def activations(
    decoder: Decoder,
    parallel: ParallelDims,
    pp: int,
    row: LongestRow,
    itemsize: int,
    *,
    recompute: str,
    logit_chunk: int | None,
    offload_layers: int = 0,
    token_bytes: float = BATCH_BYTES,
    spec: Spec = "local",
    fused: frozenset[str] = frozenset(),
) -> Activations:
    """Estimates the peak activation memory of a policy rank in bytes, for all micro-batches in flight. Cached. Raises
    ValueError if the model's layers cannot be divided over the pipeline stages.

    Args:
        decoder, parallel: The model, and the grid of ranks.
        pp, row: Pipeline stage of the rank, from 0, and the longest micro-batch.
        itemsize: Bytes of an activation element.
        recompute: `policy.recompute`; selective and moe only for Transformer Engine's layers.
        logit_chunk: Tokens with logits in memory at once; None with the fused head.
        offload_layers, token_bytes: `policy.offload_layers`, and bytes per token of a packed micro-batch.
        spec, fused: Implementation of the layers, and active subset of `policy.fusions`.
    """
    kinds = _kinds(decoder, parallel, pp)
    usual = replace(Work(parallel, row.tokens, itemsize, IMBALANCE, spec, fused), repeated_keys=row.repeated_keys)
    worst = replace(usual, imbalance=HOTTEST)
    largest = max(_saved(kind, worst) for kind, _ in kinds)
    boundary = row.tokens // parallel.tensor * decoder.hidden * itemsize
    if recompute == "full":
        kept, recomputed = float(boundary), float(largest)
    else:
        kept = _mean(kinds, usual, recompute)
        recomputed = max(_saved(kind, worst) - _saved(kind, worst, recompute) for kind, _ in kinds)
    in_flight_count = in_flight(parallel, pp, row.count)
    layers = parallel.stage_sizes(decoder.layers)[pp] / parallel.virtual_pipeline
    offloaded = min(layers, offload_layers / parallel.virtual_pipeline)
    resident = in_flight_count * (layers - offloaded)
    if offloaded:  # the last offloaded layer of the current micro-batch is present too, and always two layers
        resident += max(1, min(in_flight_count * layers, 2) - (layers - offloaded))
    # Every micro-batch in flight also keeps the received and the sent hidden states.
    saved = resident * kept + in_flight_count * (2 * boundary if parallel.pipeline > 1 else 0)
    working = max(sum(block.gradient_bytes(worst) for block in kind) for kind, _ in kinds)
    batch = row.tokens * row.count * token_bytes
    last = parallel.holds_head(pp, parallel.virtual_pipeline - 1)
    # Input and output of the last norm, and the head's input: gathered over tensor ranks, then the selected tokens.
    head_input = 2 * boundary + 2 * row.tokens * decoder.hidden * itemsize if last else 0
    has_logits = last and not isinstance(decoder.head, ValueHeadBlock)  # a critic computes no logits
    train_logits, forward_logits = (
        logits(decoder, parallel, row.tokens, itemsize, logit_chunk) if has_logits else (0, 0)
    )
    return Activations(
        train=int(saved + recomputed + working + head_input + batch),
        forward=int(largest + 2 * boundary + head_input + batch),
        train_logits=train_logits,
        forward_logits=forward_logits,
        host=int(in_flight_count * offloaded * (kept + HOST_PAGE)),
    )


def in_flight(parallel: ParallelDims, pp: int, count: int) -> int:
    """Returns the largest number of passes with activations in a rank's memory at once, under the 1F1B schedule or its
    interleaved form. A pass is one micro-batch through one of the rank's model chunks.

    Args:
        parallel: The grid of ranks.
        pp: Pipeline stage, from 0.
        count: Micro-batches per optimizer step on each data-parallel rank.
    """
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    if chunks == 1:
        return min(count, stages - pp)
    return min(count * chunks, 2 * (stages - pp - 1) + (chunks - 1) * stages + 1)


def kept_layer(
    decoder: Decoder,
    parallel: ParallelDims,
    pp: int,
    tokens: float,
    itemsize: int,
    *,
    recompute: str,
    spec: Spec,
    fused: frozenset[str],
    imbalance: float = IMBALANCE,
) -> float:
    """Estimates the mean bytes kept of a layer for the backward pass on a rank of stage `pp`, over the stage's layers
    and for one micro-batch. Raises ValueError if the model's layers cannot be divided over the pipeline stages.

    Args:
        decoder: The model.
        parallel: The grid of ranks.
        pp: Pipeline stage, from 0.
        tokens: Tokens of the micro-batch on a context rank, not divided by tensor parallelism.
        itemsize: Bytes of an activation element.
        recompute: `policy.recompute`, except full.
        spec: Implementation of the layers.
        fused: Active subset of `policy.fusions`.
        imbalance: Tokens of the rank's experts, relative to an even distribution (1.0).
    """
    return _mean(
        _kinds(decoder, parallel, pp), Work(parallel, int(tokens), itemsize, imbalance, spec, fused), recompute
    )


def _kinds(decoder: Decoder, parallel: ParallelDims, pp: int) -> list[tuple[Layer, int]]:
    """Returns each kind of layer in a stage, and the number of layers of this kind."""
    return decoder.layer_counts(layer for chunk in _chunks(decoder, parallel, pp) for layer in chunk)


def _mean(kinds: list[tuple[Layer, int]], work: Work, recompute: str) -> float:
    return sum(_saved(kind, work, recompute) * count for kind, count in kinds) / sum(count for _, count in kinds)


def _saved(kind: Layer, work: Work, recompute: str = "none") -> int:
    return int(sum(block.kept_bytes(work, recompute) for block in kind))


def logits(decoder: Decoder, parallel: ParallelDims, tokens: int, itemsize: int, chunk: int | None) -> tuple[int, int]:
    """Estimates the peak bytes of the output head: (in training, in a log-prob pass).

    Counts the logits of a chunk, or the fused head's sums and the gradient of a chunk of logits, plus in training the
    weight's gradient. Call it only for a rank of the last pipeline stage, and not for a critic, which computes no
    logits: neither is checked.

    Args:
        decoder: The model.
        parallel: The grid of ranks.
        tokens: Tokens of the micro-batch on a context rank, not divided by tensor parallelism.
        itemsize: Bytes of an element of the hidden states.
        chunk: Tokens with logits in memory at once; None with the fused head.
    """
    rows = padded_vocab(decoder.vocab, parallel.tensor) // parallel.tensor
    weight = rows * decoder.hidden
    if chunk is None:
        sums, work = forward_bytes(tokens, rows, squares=True), backward_bytes(tokens, rows, decoder.hidden, itemsize)
        # The weight's gradient is written in the weight's type, then both it and its accumulator exist.
        return max(work + weight * itemsize, weight * 2 * itemsize, sums), sums
    table = min(chunk, tokens) * rows
    # Forward: logits, their exponentials, the masked logits and the product, float32 each (megatron/vocab_parallel.py).
    # Backward: two tables of float32 before the weight's gradient, then one and its copy beside the gradient's two.
    backward = max(
        table * 8 + weight * 4, table * (4 + itemsize) + weight * (4 + itemsize), weight * (4 + 2 * itemsize)
    )
    # A micro-batch with a single chunk of counted tokens, however long its row, keeps that chunk's logits.
    return table * 4 + max(backward, table * 16), table * 16


def _chunks(decoder: Decoder, parallel: ParallelDims, pp: int) -> list[range]:
    return [parallel.stage_layers(decoder.layers, pp, chunk) for chunk in range(parallel.virtual_pipeline)]
