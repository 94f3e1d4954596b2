"""What a policy rank keeps for the backward pass. Estimated: formulas of what autograd saves, not a measurement.

After Korthikanti et al. (arXiv:2205.05198), for this policy's layers: packed sequences, flash attention (no score
matrix), no dropout, gated MLPs written as separate operations unless they are fused, and experts that receive k
copies of every token. Under tensor parallelism everything between the linear layers is cut along the sequence. A
block's own formula is its `saved_bytes` and `gradient_bytes` (`models/blocks/`).
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.kernels.linear_logprobs import backward_bytes, forward_bytes
from skyrl_mega.models.blocks.base import Spec, Work
from skyrl_mega.models.blocks.embedding import padded_vocab
from skyrl_mega.models.blocks.value_head import ValueHead
from skyrl_mega.models.decoder import Decoder, Layer
from skyrl_mega.parallel.dims import ParallelDims

IMBALANCE = 1.25
"""Tokens of the busiest rank's experts over the mean, on average over layers: an assumption about the router."""
HOTTEST = 2.0
"""The same of the one layer and micro-batch where it is worst, of some thousands in a step: an assumption too."""
HOST_PAGE = 32 * 2**20
"""Bytes of host memory that a layer takes at a time (`megatron.activation_offload`)."""
BATCH_BYTES = 64
"""Bytes of one token of a packed micro-batch: inputs, positions, targets, places and the fields of the loss."""


@dataclass(frozen=True)
class Row:
    """The longest micro-batch."""

    tokens: int
    """On one rank, that is on one context rank."""
    count: int
    """Micro-batches of one optimizer step on one data-parallel rank."""


@dataclass(frozen=True)
class Activations:
    """Bytes at the peak of a phase."""

    train: int
    """Forward and backward."""
    forward: int
    """Log-probs only: one layer at a time."""
    train_logits: int
    """The head's, in the backward pass; 0 but on the last stage."""
    forward_logits: int
    host: int = 0
    """What layers keep in host memory (`policy.offload_layers`)."""


def activations(
    d: Decoder,
    parallel: ParallelDims,
    pp: int,
    row: Row,
    itemsize: int,
    *,
    recompute: str,
    logit_chunk: int | None,
    offload_layers: int = 0,
    token_bytes: float = BATCH_BYTES,
    spec: Spec = "local",
    fused: frozenset[str] = frozenset(),
) -> Activations:
    """At the peak, on a rank of pipeline stage `pp`.

    Args:
        recompute: `policy.recompute`, of Transformer Engine's layers.
        offload_layers: `policy.offload_layers`.
        logit_chunk: Tokens whose logits exist at once; None with the fused head.
        token_bytes: Of one token of a packed micro-batch.
        spec: Whose layers they are.
        fused: Which of `policy.fusions` run in them.
    """
    kinds = _kinds(d, parallel, pp)
    usual = Work(parallel, row.tokens, itemsize, IMBALANCE, spec, fused)
    worst = Work(parallel, row.tokens, itemsize, HOTTEST, spec, fused)
    largest = max(_saved(kind, worst) for kind, _ in kinds)
    boundary = row.tokens // parallel.tensor * d.hidden * itemsize
    if recompute == "full":
        kept, again = float(boundary), float(largest)
    else:
        kept = _mean(kinds, usual, recompute)
        again = max(_saved(kind, worst) - _saved(kind, worst, recompute) for kind, _ in kinds)
    flight = in_flight(parallel, pp, row.count)
    layers = parallel.stage_sizes(d.layers)[pp] / parallel.virtual_pipeline
    away = min(layers, offload_layers / parallel.virtual_pipeline)
    there = flight * (layers - away)
    if away:  # of the micro-batch that is computed the last layer that moves is there, too, and always two of them
        there += max(1, min(flight * layers, 2) - (layers - away))
    # Every micro-batch under way also keeps the hidden states that it was sent, and those that it sent on.
    saved = there * kept + flight * (2 * boundary if parallel.pipeline > 1 else 0)
    working = max(sum(block.gradient_bytes(worst) for block in kind) for kind, _ in kinds)
    batch = row.tokens * row.count * token_bytes
    last = parallel.holds_head(pp, parallel.virtual_pipeline - 1)
    # The last norm's input and output, and what the head reads of it, gathered over the tensor ranks and picked.
    top = 2 * boundary + 2 * row.tokens * d.hidden * itemsize if last else 0
    choice = last and not isinstance(d.head, ValueHead)  # of a token, which a critic does not make
    train_logits, forward_logits = logits(d, parallel, row.tokens, itemsize, logit_chunk) if choice else (0, 0)
    return Activations(
        train=int(saved + again + working + top + batch),
        forward=int(largest + 2 * boundary + top + batch),
        train_logits=train_logits,
        forward_logits=forward_logits,
        host=int(flight * away * (kept + HOST_PAGE)),
    )


def in_flight(parallel: ParallelDims, pp: int, count: int) -> int:
    """Micro-batches of one model chunk whose activations exist at once: 1F1B, or its interleaved form."""
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    if chunks == 1:
        return min(count, stages - pp)
    return min(count * chunks, 2 * (stages - pp - 1) + (chunks - 1) * stages + 1)


def layer(
    d: Decoder,
    parallel: ParallelDims,
    tokens: int,
    itemsize: int,
    *,
    moe: bool,
    imbalance: float = IMBALANCE,
    recompute: str = "none",
    spec: Spec = "local",
    fused: frozenset[str] = frozenset(),
) -> int:
    """Bytes that one layer, with experts or without, saves for its backward pass, its input among them; of
    `policy.recompute` all kinds but full."""
    kind = next(d.layer(i) for i in range(d.layers) if d.is_moe(i) == moe)
    return _saved(kind, Work(parallel, tokens, itemsize, imbalance, spec, fused), recompute)


def kept_layer(
    d: Decoder,
    parallel: ParallelDims,
    pp: int,
    tokens: float,
    itemsize: int,
    *,
    recompute: str,
    spec: Spec,
    fused: frozenset[str],
) -> float:
    """Bytes that a layer of stage `pp` saves for its backward pass, on average; of `policy.recompute` all kinds but
    full."""
    return _mean(_kinds(d, parallel, pp), Work(parallel, int(tokens), itemsize, IMBALANCE, spec, fused), recompute)


def _kinds(d: Decoder, parallel: ParallelDims, pp: int) -> list[tuple[Layer, int]]:
    """The kinds of layers of a stage, and how many of each."""
    return d.counted(layer for chunk in _chunks(d, parallel, pp) for layer in chunk)


def _mean(kinds: list[tuple[Layer, int]], work: Work, recompute: str) -> float:
    return sum(_saved(kind, work, recompute) * count for kind, count in kinds) / sum(count for _, count in kinds)


def _saved(kind: Layer, work: Work, recompute: str = "none") -> int:
    return int(sum(block.kept_bytes(work, recompute) for block in kind))


def logits(d: Decoder, parallel: ParallelDims, tokens: int, itemsize: int, chunk: int | None) -> tuple[int, int]:
    """Bytes of the head in the backward and in the forward pass: a chunk's logits, or the fused head's sums and its
    chunk of their gradient; and the gradient of the weight."""
    rows = padded_vocab(d.vocab, parallel.tensor) // parallel.tensor
    weight = rows * d.hidden
    if chunk is None:
        sums, work = forward_bytes(tokens, rows, squares=True), backward_bytes(tokens, rows, d.hidden, itemsize)
        # The weight's gradient is written in its own type; then that stands beside what it is added to.
        return max(work + weight * itemsize, weight * 2 * itemsize, sums), sums
    table = min(chunk, tokens) * rows
    # Forward: logits, their exponentials, the masked logits and the product, float32 each (megatron/vocab_parallel.py).
    # Backward: two tables of float32 before the weight's gradient, then one and its copy beside the gradient's two.
    backward = max(
        table * 8 + weight * 4, table * (4 + itemsize) + weight * (4 + itemsize), weight * (4 + 2 * itemsize)
    )
    return max(backward, table * 16), table * 16


def _chunks(d: Decoder, parallel: ParallelDims, pp: int) -> list[range]:
    return [parallel.stage_layers(d.layers, pp, chunk) for chunk in range(parallel.virtual_pipeline)]
