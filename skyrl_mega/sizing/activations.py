"""What a policy rank keeps for the backward pass. Estimated: formulas of what autograd saves, not a measurement.

After Korthikanti et al. (arXiv:2205.05198), for this policy's layers: packed sequences, flash attention (no score
matrix), no dropout, grouped queries, gated MLPs written as separate operations, and experts that receive k copies of
every token. Under tensor parallelism everything between the linear layers is cut along the sequence.

Legend: T tokens of the row on this rank, s = T / tensor, b bytes of an element, h hidden, and per tensor rank q query,
v key or value and f dense columns; R copies of tokens that reach this rank's experts, of width e each.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.megatron import padded_vocab

IMBALANCE = 1.25
"""Tokens of the busiest rank's experts over the mean, on average over layers: an assumption about the router."""
HOTTEST = 2.0
"""The same of the one layer and micro-batch where it is worst, of some thousands in a step: an assumption too."""
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


def activations(
    d: Decoder, parallel: Parallel, pp: int, row: Row, itemsize: int, *, recompute: bool, logit_chunk: int
) -> Activations:
    """At the peak, on a rank of pipeline stage `pp`."""
    layers = parallel.stage_sizes(d.layers)[pp]
    moe = sum(d.is_moe(i) for chunk in _chunks(d, parallel, pp) for i in chunk)
    count = {True: moe, False: layers - moe}
    cost = {kind: layer(d, parallel, row.tokens, itemsize, moe=kind) for kind in count if count[kind]}
    largest = max(layer(d, parallel, row.tokens, itemsize, moe=kind, imbalance=HOTTEST) for kind in cost)
    mean = sum(cost[kind] * count[kind] for kind in cost) / layers
    boundary = row.tokens // parallel.tensor * d.hidden * itemsize
    kept = boundary if recompute else mean
    flight = in_flight(parallel, pp, row.count)
    # Every micro-batch under way also keeps the hidden states that it was sent, and those that it sent on.
    saved = flight * (layers / parallel.virtual_pipeline * kept + (2 * boundary if parallel.pipeline > 1 else 0))
    working = _gradients(d, parallel, row.tokens, itemsize, moe=moe > 0)
    batch = row.tokens * row.count * BATCH_BYTES
    last = parallel.holds_head(pp, parallel.virtual_pipeline - 1)
    # The last norm's input and output, and what the head reads of it, gathered over the tensor ranks and picked.
    top = 2 * boundary + 2 * row.tokens * d.hidden * itemsize if last else 0
    train_logits, forward_logits = logits(d, parallel, row.tokens, itemsize, logit_chunk) if last else (0, 0)
    return Activations(
        train=int(saved + (largest if recompute else 0) + working + top + batch),
        forward=int(largest + 2 * boundary + top + batch),
        train_logits=train_logits,
        forward_logits=forward_logits,
    )


def in_flight(parallel: Parallel, pp: int, count: int) -> int:
    """Micro-batches of one model chunk whose activations exist at once: 1F1B, or its interleaved form."""
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    if chunks == 1:
        return min(count, stages - pp)
    return min(count * chunks, 2 * (stages - pp - 1) + (chunks - 1) * stages + 1)


def layer(
    d: Decoder, parallel: Parallel, tokens: int, itemsize: int, *, moe: bool, imbalance: float = IMBALANCE
) -> int:
    """Bytes that one layer saves for its backward pass, its input among them."""
    t, b = parallel.tensor, itemsize
    s = tokens / t
    q, v = d.heads * d.head_dim / t, d.kv_heads * d.head_dim / t
    norms = 4 * s * d.hidden * b  # inputs and outputs of both
    # The fused projection, of which keys and values are views; queries and keys before their norm and after rotation;
    # what the attention gives to its projection; cosines and sines; the soft-max's normaliser.
    attention = tokens * b * ((q + 2 * v) + (q if d.qk_norm else 0) + (q + v) + q + 4 * d.head_dim)
    attention += tokens * 4 * d.heads / t
    if not moe:
        return int(norms + attention + tokens * b * 5 * d.ffn / t)
    assert d.experts is not None
    copies, width = routed(d, parallel, tokens, imbalance), d.experts.width / parallel.expert_tensor
    # Each expert's input; gate and up, silu, up once more, their product, and that times the router's probability.
    experts = copies * (b * (d.hidden + 6 * width) + 4)
    # Logits, probabilities and masks over all experts, in float32 and bool.
    router = s * d.experts.count * 24
    return int(norms + attention + experts + router)


def routed(d: Decoder, parallel: Parallel, tokens: int, imbalance: float) -> float:
    """Copies of tokens that the busiest rank's experts work on."""
    assert d.experts is not None
    even = tokens / parallel.tensor * d.experts.per_token * parallel.expert_tensor
    return even * (imbalance if parallel.expert > 1 else 1.0)


def logits(d: Decoder, parallel: Parallel, tokens: int, itemsize: int, chunk: int) -> tuple[int, int]:
    """Bytes of the head in the backward and in the forward pass: a chunk's logits, and the gradient of the weight."""
    rows = padded_vocab(d.vocab, parallel.tensor) // parallel.tensor
    table = min(chunk, tokens) * rows
    weight = rows * d.hidden
    # Forward: logits, their exponentials, the masked logits and the product, float32 each (policy/logprobs.py).
    # Backward: two tables of float32 before the weight's gradient, then one and its copy beside the gradient's two.
    backward = max(
        table * 8 + weight * 4, table * (4 + itemsize) + weight * (4 + itemsize), weight * (4 + 2 * itemsize)
    )
    return max(backward, table * 16), table * 16


def _gradients(d: Decoder, parallel: Parallel, tokens: int, itemsize: int, *, moe: bool) -> float:
    """Gradients of one layer's activations and weights that exist together while it goes backward."""
    t = parallel.tensor
    if not moe:
        return itemsize * (tokens * (3 * d.ffn / t + 2 * d.hidden / t) + 3 * d.hidden * d.ffn / t)
    assert d.experts is not None
    width = d.experts.width / parallel.expert_tensor
    held = d.experts.count / parallel.expert * 3 * d.hidden * width
    return itemsize * (routed(d, parallel, tokens, HOTTEST) * (2 * d.hidden + 5 * width) + held)


def _chunks(d: Decoder, parallel: Parallel, pp: int) -> list[range]:
    return [parallel.stage_layers(d.layers, pp, chunk) for chunk in range(parallel.virtual_pipeline)]
