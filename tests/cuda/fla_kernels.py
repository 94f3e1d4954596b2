"""The kernels of flash-linear-attention that gated delta nets use, in plain torch: token by token.

Legend: T tokens, C channels, W tokens read by the convolution, G heads of queries and keys, H heads of values, D width
of a key, E width of a value, N sequences.
"""

from __future__ import annotations

import sys
import types
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv1d(x: Tensor, weight: Tensor, *, activation: str, cu_seqlens: Tensor) -> tuple[Tensor, None]:
    """Returns the convolution of x [1, T, C] with a weight [C, W], and no state; `cu_seqlens` [N + 1] are bounds of
    sequences."""
    assert activation == "silu" and x.is_contiguous() and x.shape[0] == 1
    rows, bounds = [], cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        padded = F.pad(x[0, start:end].float(), (0, 0, weight.shape[1] - 1, 0))
        seen = [padded[i : i + end - start] * column for i, column in enumerate(weight.float().unbind(1))]
        rows.append(torch.stack(seen).sum(0))
    return F.silu(torch.cat(rows)).to(x.dtype)[None], None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, None]:
    """Returns the results [1, T, H, E] for q and k [1, T, G, D], v [1, T, H, E], and g and beta [1, T, H]; and no
    state."""
    assert use_qk_l2norm_in_kernel and g.dtype == torch.float32 and q.shape[0] == 1
    group = v.shape[2] // q.shape[2]
    queries, keys = (
        (x[0].float() * torch.rsqrt(x[0].float().square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(group, 1)
        for x in (q, k)
    )
    out, bounds = [], cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        state = v.new_zeros(v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
        for t in range(start, end):
            state = state * g[0, t, :, None, None].exp()
            found = torch.einsum("hd,hde->he", keys[t], state)
            change = beta[0, t, :, None].float() * (v[0, t].float() - found)
            state = state + keys[t, :, :, None] * change[:, None]
            out.append(torch.einsum("hd,hde->he", queries[t] * q.shape[3] ** -0.5, state))
    return torch.stack(out)[None].to(v.dtype), None


def install() -> None:
    """Makes these functions importable in this process by the package's names."""
    for name, function in (
        ("fla.modules.causal_conv1d", causal_conv1d),
        ("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
    ):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        setattr(sys.modules[name], function.__name__, function)
