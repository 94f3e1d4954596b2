"""Log-prob, entropy and squared probabilities of hidden states under an output head, without the logits in memory.

`partial_sums` is the forward pass and `gradients` the backward pass over one tensor rank's columns of the vocabulary.
Ranks exchange the sums in between; `merge` adds sums over splits of the vocabulary, and the same way over ranks.

Forward, every tile of logits x is reduced in place to the largest, Σ e^(x - peak), Σ (x - peak) · e^(x - peak), the
target's, and Σ e^2(x - peak). The moment is relative to the peak, so logits of ±10⁴ lose no precision.

Backward, the gradient of the logits is recomputed for a chunk of the vocabulary, [T, columns] in the model's dtype, and
used by two matrix products. The weight's gradient of that chunk is complete at once, because the chunk covers all
tokens. The hidden states' gradient is accumulated in float32. (A kernel that kept a token tile's dHidden would need
4·128·H bytes, 1 MiB at H 2,048, of an SM's 228 KiB. Accumulated in L2, tile by tile, dHidden takes 2 MiB of traffic for
0.13 GFLOP: at 5.5 TB/s a third of the peak.)

The bottleneck is the matrix product: 2·T·H·V FLOPs forward, 6·T·H·V backward, 2 of these for recomputing the logits.
Memory traffic is far from a bottleneck: with as many columns in a chunk as the hidden states are wide, a chunk takes
6·T·H² FLOPs and 14·T·H bytes in bfloat16 (the gradient written and read twice, dHidden read and written): 878 FLOPs per
byte at H 2,048, compared to an H100's balance of 295. The softmax of a tile costs one exponential per element, 7 % of
the tile's product at H 2,048.

Legend: T tokens, H hidden width, V vocabulary, v columns of this rank, S splits of the columns, Q quantities. Sources:
online soft-max, Milakov and Gimelshein (arXiv:1805.02867); Cut Cross-Entropy (arXiv:2411.09009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PEAK, TOTAL, MOMENT, TARGET, SQUARES = range(5)
"""Indices of the quantities Q, with e = e^(x - peak): largest logit x; Σ e; Σ (x - peak) e; the target's x, 0 on ranks
without the target; Σ e²."""
LOWEST = -1e30
"""The peak of a split without logits, such as a split of padding: finite, to avoid ∞ - ∞."""
SPLITS = 33
"""Number of vocabulary splits for the sums. Four tiles of tokens then fill the 132 processors of an H100; 151,936
columns are 18 tiles of 256 in each split."""
TILE_COLUMNS = 256
"""Splits and chunks are multiples of this number of columns."""


@dataclass(frozen=True)
class Head:
    """The parameters of an output head's distribution, apart from the products hidden · weight."""

    valid: int
    """Number of this rank's columns that are tokens; later columns are padding with probability 0."""
    first: int = 0
    """The token of this rank's first column."""
    temperature: float = 1.0
    """Divides the logits, after the soft cap."""
    soft_cap: float | None = None
    """logit ← cap · tanh(logit / cap), as in Gemma 2."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of the output head's forward and backward pass on one tensor rank."""

    hidden_TH: Tensor
    """bfloat16, float16, float32, or float64 (supported by the kernel only in Triton's interpreter)."""
    weight_vH: Tensor
    """This rank's rows of the output projection, of the same dtype."""
    targets_T: Tensor
    """int64: tokens of the whole vocabulary."""
    head: Head
    floor_T: Tensor | None = None
    """Restricts each distribution to a *support*: the logits (after cap and temperature) not below the token's floor,
    and the target in any case. Log-prob, entropy and gradients then belong to the distribution over the support alone.
    For top-p or top-k the floor is the logit of the least likely token kept; equal logits are all included. A logit is
    used instead of a probability, because a logit is the same on all ranks and needs no other pass over the vocabulary.
    -∞ restricts nothing. float32, or float64 for float64 inputs."""

    def __post_init__(self) -> None:
        """Raises ValueError if shapes or dtypes do not match, or the head counts more valid columns than the weight
        has, or fewer than 0."""
        (tokens, width), (columns, weight_width) = self.hidden_TH.shape, self.weight_vH.shape
        if width != weight_width or self.hidden_TH.dtype != self.weight_vH.dtype or self.targets_T.shape != (tokens,):
            raise ValueError(
                f"hidden states {list(self.hidden_TH.shape)} {self.hidden_TH.dtype}, a weight "
                f"{[columns, weight_width]} {self.weight_vH.dtype} and targets {list(self.targets_T.shape)} "
                "are no head's inputs"
            )
        if not 0 <= self.head.valid <= columns:
            raise ValueError(f"a rank of {columns} columns cannot have {self.head.valid} valid ones")

    def columns(self, part: slice) -> Inputs:
        """Returns the inputs for some of this rank's columns alone; the weight is a view.

        Args:
            part: The columns, a slice with start and stop within the rank's columns.
        """
        valid = min(max(self.head.valid - part.start, 0), part.stop - part.start)
        head = replace(self.head, first=self.head.first + part.start, valid=valid)
        return replace(self, weight_vH=self.weight_vH[part], head=head)

    @property
    def by_kernel(self) -> bool:
        """True if Triton's kernels compute the result."""
        return self.hidden_TH.is_cuda and self.hidden_TH.dtype != torch.float64


@dataclass(frozen=True)
class Saved:
    """Results of the forward pass needed by the backward pass, [T] each, float32 (float64 from float64)."""

    peak_T: Tensor
    """The largest logit."""
    log_sum_T: Tensor
    """ln Σ e^(x - peak); stored apart from the peak, because a large peak would absorb it in a sum."""
    entropy_T: Tensor
    """Entropy of the distribution, in nats."""


# ---- forward ---------------------------------------------------------------------------------------------------------


def partial_sums(inputs: Inputs, *, squares: bool = False) -> Tensor:
    """Runs the forward pass over this rank's columns of the vocabulary.

    Args:
        inputs: Hidden states, weight and targets.
        squares: True to compute Σ e² too, for the sum of squared probabilities.

    Returns:
        [Q, S, T]: the quantities PEAK, TOTAL, MOMENT, TARGET (and SQUARES) of each split and token, to be reduced by
        `merge`; float32, or float64 from float64.
    """
    if inputs.by_kernel:
        from skyrl_mega.kernels import linear_logprobs_triton

        return linear_logprobs_triton.partial_sums(inputs, squares=squares)
    return partial_sums_reference(inputs, squares=squares)


def merge(parts_QST: Tensor) -> Tensor:
    """Returns the quantities over all splits (or ranks), [Q, T], from the quantities of each, [Q, S, T]. Overwrites
    `parts_QST`."""
    peak_T = parts_QST[PEAK].amax(0)
    rebase(parts_QST, peak_T)
    merged = parts_QST.sum(1)
    merged[PEAK] = peak_T
    return merged


def rebase(sums: Tensor, peak_T: Tensor) -> None:
    """Rescales quantities [Q, T] or [Q, S, T] from their own peaks to the higher peak `peak_T`, in place. Row PEAK is
    invalid afterwards, row TARGET stays."""
    shift = sums[PEAK].sub_(peak_T)
    sums[MOMENT].addcmul_(shift, sums[TOTAL])
    factor = shift.exp_()
    sums[TOTAL].mul_(factor)
    sums[MOMENT].mul_(factor)
    if len(sums) > SQUARES:
        sums[SQUARES].mul_(factor).mul_(factor)


def finish(sums_QT: Tensor) -> tuple[Tensor, Tensor | None, Saved]:
    """Computes the results of the forward pass from the quantities over the whole vocabulary, [Q, T] (`merge`), without
    changing them.

    Returns:
        The targets' log-probs in nats [T]; Σ p² [T], or None without the quantity SQUARES; and the values saved for the
        backward pass, with the entropy in nats.
    """
    log_sum_T = sums_QT[TOTAL].log()
    entropy_T = log_sum_T - sums_QT[MOMENT] / sums_QT[TOTAL]
    logprobs_T = sums_QT[TARGET] - sums_QT[PEAK] - log_sum_T
    squares_T = sums_QT[SQUARES] / sums_QT[TOTAL].square() if len(sums_QT) > SQUARES else None
    return logprobs_T, squares_T, Saved(sums_QT[PEAK].clone(), log_sum_T, entropy_T)


# ---- backward --------------------------------------------------------------------------------------------------------


def gradients(
    inputs: Inputs, saved: Saved, grad_logprobs_T: Tensor, grad_entropy_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs the backward pass over this rank's columns of the vocabulary.

    Args:
        inputs: The inputs of the forward pass.
        saved: Results over the whole vocabulary (`finish`).
        grad_logprobs_T, grad_entropy_T: Incoming gradients of each log-prob and entropy, in the dtype of `saved`; None
            for the entropy if no gradient flows through it.

    Returns:
        The gradients of the hidden states [T, H], this rank's part of a sum over ranks, and of the weight [v, H], in
        their dtypes.
    """
    hidden, weight = inputs.hidden_TH, inputs.weight_vH
    tokens, columns = len(hidden), chunk_columns(*weight.shape)
    buffer = torch.empty(tokens * columns, dtype=weight.dtype, device=weight.device)
    grad_hidden = torch.zeros(hidden.shape, dtype=precise(hidden.dtype), device=hidden.device)
    grad_weight = torch.empty_like(weight)
    for part in chunks(len(weight), columns):
        chunk = inputs.columns(part)
        width = len(chunk.weight_vH)
        grad_logits = buffer[: tokens * width].view(tokens, width)
        logit_gradients(chunk, saved, grad_logprobs_T, grad_entropy_T, out_Tv=grad_logits)
        torch.mm(grad_logits.T, hidden, out=grad_weight[part])
        _add_product(grad_hidden, grad_logits, chunk.weight_vH)
    del buffer, grad_logits
    return grad_hidden.to(hidden.dtype), grad_weight


def logit_gradients(
    inputs: Inputs, saved: Saved, grad_logprobs_T: Tensor, grad_entropy_T: Tensor | None, *, out_Tv: Tensor
) -> None:
    """Writes the gradient with respect to the products hidden · weight, before soft cap and temperature, into `out_Tv`.

    Args:
        inputs, saved, grad_logprobs_T, grad_entropy_T: See `gradients`.
        out_Tv: [T, v] for the v columns of `inputs`, contiguous on a GPU; overwritten.
    """
    if inputs.by_kernel:
        from skyrl_mega.kernels import linear_logprobs_triton

        linear_logprobs_triton.logit_gradients(inputs, saved, grad_logprobs_T, grad_entropy_T, out_Tv=out_Tv)
    else:
        logit_gradients_reference(inputs, saved, grad_logprobs_T, grad_entropy_T, out_Tv=out_Tv)


def _add_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a · b to `to`, accumulated in the dtype of `to`."""
    if a.is_cuda and a.dtype != to.dtype:
        torch.addmm(to, a, b, out_dtype=to.dtype, out=to)
    else:
        to.addmm_(a.to(to.dtype), b.to(to.dtype))


# ---- memory ----------------------------------------------------------------------------------------------------------


def forward_bytes(tokens: int, columns: int, *, squares: bool = False) -> int:
    """Returns the bytes of the partial sums, computed in float32: the forward pass's memory, apart from a few numbers
    per token.

    Args:
        tokens: Number of tokens.
        columns: Columns of this tensor rank.
        squares: True if Σ e² is computed too.
    """
    return 4 * (5 if squares else 4) * splits(columns) * tokens


def backward_bytes(tokens: int, columns: int, hidden: int, itemsize: int) -> int:
    """Returns the bytes used by the backward pass besides the returned gradients: a chunk's logit gradients, and the
    hidden states' gradient in float32.

    Args:
        tokens: Number of tokens.
        columns: Columns of this tensor rank.
        hidden: Hidden width.
        itemsize: Bytes of an element of the model.
    """
    return tokens * (chunk_columns(columns, hidden) * itemsize + hidden * 4)


def splits(columns: int) -> int:
    """Returns S, the number of splits in which the forward pass sums this number of columns: at most `SPLITS`. There
    must be at least one column."""
    return -(-columns // split_columns(columns))


def split_columns(columns: int) -> int:
    """Returns the columns of each split of the forward pass, a multiple of `TILE_COLUMNS`; the last split may be
    shorter."""
    return _whole_tiles(-(-columns // SPLITS))


def chunk_columns(columns: int, hidden: int) -> int:
    """Returns the columns of a chunk of the backward pass, with logit gradients in memory at a time: about the hidden
    width, from 1,024 to 8,192, and at most `columns`."""
    return min(_whole_tiles(min(max(hidden, 1024), 8192)), columns)


def precise(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for logits and sums: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def _whole_tiles(columns: int) -> int:
    return -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def chunks(total: int, chunk: int) -> Iterator[slice]:
    """Returns the slices of at most `chunk` entries that make up `total` entries."""
    return (slice(i, min(i + chunk, total)) for i in range(0, total, chunk))


# ---- in torch --------------------------------------------------------------------------------------------------------


def partial_sums_reference(inputs: Inputs, *, squares: bool = False) -> Tensor:
    """Computes the result of `partial_sums` in torch on any device, with several copies of a split's logits in
    memory."""
    width, parts = len(inputs.weight_vH), []
    for part in chunks(width, split_columns(width)):
        logits, is_target, _ = _logits(inputs.columns(part))
        peak_T = logits.amax(-1).clamp(min=LOWEST)
        shifted = logits - peak_T[:, None]
        exp = shifted.exp()
        # For probability 0, 0 · -∞ must not become nan.
        moment_T = (exp * shifted.masked_fill(exp == 0, 0.0)).sum(-1)
        rows = [peak_T, exp.sum(-1), moment_T, logits.masked_fill(~is_target, 0.0).sum(-1)]
        parts.append(torch.stack([*rows, exp.square().sum(-1)] if squares else rows))
    return torch.stack(parts, 1)


def logit_gradients_reference(
    inputs: Inputs, saved: Saved, grad_logprobs_T: Tensor, grad_entropy_T: Tensor | None, *, out_Tv: Tensor
) -> None:
    """Writes the result of `logit_gradients` into `out_Tv`, in torch on any device, with several copies of the logits
    in memory."""
    logits, is_target, slope = _logits(inputs)
    # d log p(target) / d logits = onehot(target) - p;  d entropy / d logits = -p (log p + entropy)
    logprobs = logits - saved.peak_T[:, None] - saved.log_sum_T[:, None]
    probs = logprobs.exp()
    pull = grad_logprobs_T[:, None].expand_as(probs)
    if grad_entropy_T is not None:
        surprise = logprobs.masked_fill(probs == 0, 0.0) + saved.entropy_T[:, None]
        pull = pull + grad_entropy_T[:, None] * surprise
    out_Tv.copy_((grad_logprobs_T[:, None] * is_target - pull * probs) * slope)


def _logits(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | float]:
    """Returns logits (-∞ outside of the support), a mask of the targets, and d logit / d product."""
    dtype, head = precise(inputs.hidden_TH.dtype), inputs.head
    logits = inputs.hidden_TH.to(dtype) @ inputs.weight_vH.to(dtype).T
    slope: Tensor | float = 1 / head.temperature
    if head.soft_cap is not None:
        tanh = torch.tanh(logits / head.soft_cap)
        logits, slope = tanh * head.soft_cap, (1 - tanh.square()) / head.temperature
    logits = logits / head.temperature
    column = torch.arange(logits.shape[1], device=logits.device)
    valid = column < head.valid
    is_target = (column == inputs.targets_T[:, None] - head.first) & valid
    kept = valid if inputs.floor_T is None else ((logits >= inputs.floor_T[:, None]) | is_target) & valid
    return logits.masked_fill(~kept, float("-inf")), is_target, slope
