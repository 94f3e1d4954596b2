"""Transformer Engine's attention kernels in plain torch: cuDNN's attention of packed sequences, and the kernels of
context parallelism (Transformer Engine's `context_parallel.py`): merging of partial results (P2P), and the order of
tokens around an all-to-all (A2A).

Legend: T queries, S keys, H heads, G heads of keys and values, D size of a head, N sequences. A context-parallel rank
holds a part of the first half and a part of the second half of each sequence, so each of its sequences has two halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KERNELS: dict[str, Callable[..., Any]] = {}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function of the compiled extension by name."""
    KERNELS[function.__name__] = function
    return function


@kernel
def get_fused_attn_backend(*_: Any, **__: Any) -> tuple[Any, str]:
    """Returns cuDNN's backend for sequences of any length."""
    import transformer_engine_torch as tex

    return tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


@kernel
def fused_attn_fwd(*args: Any) -> list[Tensor]:
    """Returns output [T, H, D], logarithm of the normaliser [T, H, 1] in float32, and state of the random numbers."""
    q, v = args[16], args[18]
    assert args[4] == 0.0, "dropout"
    _plain(args[9], args[11:14], args[:2], args[14:16])
    scores, values = _scores(args[10], args[3], args[14:16], args[20:22], q, args[17]), _heads(v, q)
    lse = scores.logsumexp(-1)
    out = torch.einsum("hts,shd->thd", (scores - lse[..., None]).exp(), values)
    return [out.to(q.dtype).contiguous(), lse.T[..., None].contiguous(), torch.zeros(2, dtype=torch.int64)]


@kernel
def fused_attn_bwd(*args: Any) -> list[Tensor | None]:
    """Returns the gradients of queries, keys and values, and two None. Output and normaliser refer to all keys,
    possibly more than the given keys (FlashAttention-2, algorithm 2)."""
    scale, (q, k, v, out, of_out), lse = args[2], args[19:24], args[25][0]
    assert lse.shape == (len(q), q.shape[1], 1) and args[3] == 0.0, "dropout"
    _plain(args[11], args[13:16], args[:2], args[17:19])
    scores, keys, values = _scores(args[12], scale, args[17:19], args[26:28], q, k), _heads(k, q), _heads(v, q)
    shares = (scores - lse[..., 0].T[..., None]).exp()
    width = (*q.shape[:2], v.shape[-1])  # in latent attention other than the width of queries and keys
    out, of_out = out.view(width).float(), of_out.view(width).float()
    of_shares = torch.einsum("thd,shd->hts", of_out, values)
    of_scores = scale * shares * (of_shares - (of_out * out).sum(-1).T[..., None])
    gradients = torch.einsum("hts,shd->thd", of_scores, keys), torch.einsum("hts,thd->shd", of_scores, q.float())
    of_values = torch.einsum("hts,thd->shd", shares, of_out)
    grads = gradients[0], *(t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (gradients[1], of_values))
    return [*(grad.to(t.dtype).contiguous() for grad, t in zip(grads, (q, k, v), strict=True)), None, None]


def _plain(bias: Any, others: tuple[Any, ...], longest: tuple[int, int], bounds: tuple[Tensor, Tensor]) -> None:
    """Checks that no unsupported feature is requested, and that no sequence exceeds the given length."""
    import transformer_engine_torch as tex

    assert bias is tex.NVTE_Bias_Type.NVTE_NO_BIAS and others[0] is tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    assert others[1] in ((-1, -1), (-1, 0)), "a window"
    for most, cu in zip(longest, bounds, strict=True):
        assert int((cu[1:] - cu[:-1]).max()) <= most


def _heads(keys: Tensor, q: Tensor) -> Tensor:
    """Returns the keys or values repeated for each query head."""
    return keys.float().repeat_interleave(q.shape[1] // keys.shape[1], 1)


def _scores(
    mask: Any, scale: float, bounds: tuple[Tensor, Tensor], padded: tuple[Any, Any], q: Tensor, k: Tensor
) -> Tensor:
    """Returns float32 scores [H, T, S]; -inf for a key of another sequence, or a later key under a causal mask."""
    import transformer_engine_torch as tex

    kinds = tex.NVTE_Mask_Type
    assert mask is kinds.NVTE_PADDING_CAUSAL_MASK or mask is kinds.NVTE_PADDING_MASK, mask
    sequences = []
    for cu, cu_padded, t in zip(bounds, padded, (q, k), strict=True):
        assert cu_padded is None or torch.equal(cu, cu_padded), "there is padding between sequences"
        assert int(cu[-1]) == len(t)
        sequences.append(torch.arange(len(cu) - 1).repeat_interleave((cu[1:] - cu[:-1]).long()))
    seen = sequences[0][:, None] == sequences[1]
    if mask is kinds.NVTE_PADDING_CAUSAL_MASK:
        assert torch.equal(*bounds), "causal from the top left: queries and keys begin together"
        seen &= torch.arange(len(q))[:, None] >= torch.arange(len(k))
    return (torch.einsum("thd,shd->hts", q.float(), _heads(k, q)) * scale).masked_fill(~seen, float("-inf"))


def _half(cu: Tensor, half: int) -> Tensor:
    """Returns the token indices, int64 [T / 2], of each sequence's first half (0) or second half (1)."""
    starts, lengths = cu[:-1].long(), (cu[1:] - cu[:-1]).long()
    assert not (lengths % 2).any()
    parts = [torch.arange(n // 2) + s + half * n // 2 for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    return torch.cat(parts)


@kernel
def thd_read_half_tensor(tensor: Tensor, cu: Tensor, half: int) -> Tensor:
    """Returns a half of each sequence, [T / 2, …] of [T, …]."""
    return tensor[_half(cu, half)]


@kernel
def thd_read_second_half_lse(lse: Tensor, cu: Tensor, packed: bool, tokens: int) -> Tensor:
    """Returns the normaliser of the second halves, [H, T / 2] of [H, T]."""
    assert packed
    second_halves = lse[:, _half(cu, 1)]
    assert second_halves.shape[1] == tokens
    return second_halves


@kernel
def thd_second_half_lse_correction(lse: Tensor, more: Tensor, cu: Tensor, packed: bool) -> None:
    """Adds keys to the normaliser of the second halves."""
    assert packed
    at = _half(cu, 1)
    lse[:, at] = torch.logaddexp(lse[:, at], more)


@kernel
def thd_out_correction(
    out: Tensor, more: Tensor, old: Tensor, new: Tensor, of_more: Tensor, cu: Tensor, second: bool, packed: bool
) -> None:
    """Adds the output of more keys to the output, for the second halves or for all tokens; normalisers are [H, T]."""
    assert packed and out.dtype == more.dtype
    at = _half(cu, 1) if second else torch.arange(len(out))
    before, share = (old - new).exp().T[at, :, None], (of_more - new[:, at]).exp().T[..., None]
    out[at] = (out[at].float() * before + more.view(len(at), *out.shape[1:]).float() * share).to(out.dtype)


@kernel
def thd_grad_correction(grad: Tensor, more: Tensor, cu: Tensor, first: str, second: str) -> None:
    """Updates each half of a gradient [T, …] as requested; `more` holds the halves to copy or add."""
    positions = {half: _half(cu, half) for half, how in enumerate((first, second)) if how in ("copy", "add")}
    rows = torch.cat(list(positions.values())).sort().values
    assert len(more) == len(rows)
    whole = torch.zeros_like(grad)
    whole[rows] = more.view(len(rows), *grad.shape[1:])
    for half, how in enumerate((first, second)):
        at = _half(cu, half)
        if how == "zero":
            grad[at] = 0
        elif how == "copy":
            grad[at] = whole[at]
        elif how == "add":
            grad[at] += whole[at]
        else:
            assert how == "none"


def _rank_order(cu: Tensor, ranks: int) -> Tensor:
    """Returns int64 [T]: the tokens of the packed row in the order of the context ranks' parts, one after the other."""
    parts = []
    for rank in range(ranks):
        for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            chunks = torch.arange(start, end).view(2 * ranks, -1)
            parts += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    return torch.cat(parts)


@kernel
def thd_sequence_order_to_cp_rank_order(x: Tensor, cu: Tensor, ranks: int, tokens: int) -> Tensor:
    """Returns the row's tokens [T, …] in the order of the context ranks' parts."""
    assert len(x) == tokens == int(cu[-1])
    return x[_rank_order(cu, ranks)]


@kernel
def thd_cp_rank_order_to_sequence_order(x: Tensor, cu: Tensor, ranks: int, tokens: int) -> Tensor:
    """Returns tokens [T, …] in the order of the context ranks' parts, put in the row's order."""
    assert len(x) == tokens == int(cu[-1])
    row = torch.empty_like(x)
    row[_rank_order(cu, ranks)] = x
    return row
