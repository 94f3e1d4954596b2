"""The weight of every token in the loss, fixed for a whole mini-batch before it is cut."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.config.schema import AlgorithmConfig

_SHARES = "clip dual_clip importance_clipped rejected outlier off_policy covariance high_entropy"
FRACTIONS = {f"{of}_fraction" for of in _SHARES.split()}
"""Metrics of a policy loss that are shares of tokens."""
MEANS = frozenset({*FRACTIONS, "ratio", "importance_weight", "kl_old", "kl", "entropy"})
"""Metrics of a policy loss that are means over tokens."""


def token_weights(
    mask_T: Tensor,
    lengths_N: Tensor,
    mode: str,
    samples: int | None = None,
    *,
    groups_G: Tensor | None = None,
    length: int | None = None,
) -> Tensor:
    """Returns each token's weight in the loss, computed once for a whole mini-batch, including the sequences of all DP
    ranks.

        tokens         w_t = m_t / Σ m                        (DAPO, arXiv:2503.14476, equation 12)
        sequences      w_t = m_t / (sequences · Σ m of its sequence)   (GRPO, arXiv:2402.03300, equation 3)
        prompts        w_t = m_t / (prompts · Σ m of its prompt's group)   (DAPO, equation 12, as printed)
        constant       w_t = m_t / (sequences · length)       (Dr. GRPO, arXiv:2503.20783, section 3.2)
        micro_batches  w_t = m_t / (groups · Σ m of its group)   (the mean of the token means of a run's micro-batches)

    In the last mode a group is `samples` consecutive sequences; the last group may have fewer.

    Sequences with an all-zero mask do not count, and neither do prompts without tokens. The weights sum to 1, or to 0
    if no token is left; with constant, to the mean number of tokens over `length`. With micro_batches a group with an
    all-zero mask does count, like a micro-batch with loss 0: the weights sum to the share of the other groups.

    Args:
        mask_T: Loss mask [T], 1 for tokens produced by the policy that count.
        lengths_N: Tokens of each sequence; sum(lengths) = T.
        mode: `algorithm.loss_mean`.
        samples: `algorithm.loss_mean_samples`; only for micro_batches.
        groups_G: Number of sequences of each prompt's group, in order; sum(groups) = N. Only for prompts.
        length: `algorithm.loss_mean_length`; only for constant.

    Returns:
        float32 [T].

    Raises:
        ValueError: The mode is unknown, or its `samples`, `groups_G` or `length` is missing.
    """
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_N), device=mask_T.device), lengths_N)
    tokens_N = mask_T.new_zeros(len(lengths_N), dtype=torch.float64).index_add(0, sequence_T, mask_T.double())
    weights_N = sequence_weights(tokens_N, mode, samples, groups_G=groups_G, length=length)
    return (mask_T.double() * weights_N[sequence_T]).float()


def sequence_weights(
    tokens_N: Tensor,
    mode: str,
    samples: int | None = None,
    *,
    groups_G: Tensor | None = None,
    length: int | None = None,
) -> Tensor:
    """Returns the weight of a single counting token of each sequence: float64 [N]. `token_weights` has the formulae.
    The weight of a sequence without counting tokens is finite, but has no meaning.

    Args:
        tokens_N: float64: number of counting tokens per sequence.
        mode, samples, groups_G, length: See `token_weights`.

    Raises:
        ValueError: The mode is unknown, or its `samples`, `groups_G` or `length` is missing.
    """
    match mode:
        case "tokens":
            return (1 / tokens_N.sum().clamp(min=1)).expand(len(tokens_N))
        case "sequences":
            return 1 / ((tokens_N > 0).sum().clamp(min=1) * tokens_N.clamp(min=1))
        case "constant" if length:
            return (1 / ((tokens_N > 0).sum().clamp(min=1) * length).double()).expand(len(tokens_N))
        case "prompts" if groups_G is not None:
            group_N = torch.arange(len(groups_G), device=tokens_N.device).repeat_interleave(groups_G)
            tokens_G = tokens_N.new_zeros(len(groups_G)).index_add(0, group_N, tokens_N)
            return 1 / ((tokens_G > 0).sum().clamp(min=1) * tokens_G.clamp(min=1))[group_N]
        case "micro_batches" if samples:
            group_N = torch.arange(len(tokens_N), device=tokens_N.device) // samples
            groups = -(-len(tokens_N) // samples)
            tokens_G = tokens_N.new_zeros(groups).index_add(0, group_N, tokens_N)
            return 1 / (groups * tokens_G.clamp(min=1))[group_N]
    raise ValueError(f"algorithm.loss_mean={mode!r}, loss_mean_samples={samples}, loss_mean_length={length}")


def averages(metrics: dict[str, float], algorithm: AlgorithmConfig, total: float) -> dict[str, float]:
    """Returns a mini-batch's metrics as means over the counting tokens: divides the metrics in `MEANS` by `total`.

    Metrics arrive weighted like the loss. These weights do not sum to 1 with `loss_mean=constant`, or with
    `loss_mean=micro_batches` if a group is empty. With another `loss_mean`, or `total` 0, returns `metrics` itself.

    Args:
        metrics: Sums over the mini-batch of the loss's metrics; other metrics are unchanged.
        algorithm: Defines the mean of the loss.
        total: Sum of the mini-batch's weights.
    """
    if algorithm.loss_mean not in ("micro_batches", "constant") or total == 0:
        return metrics
    scaled = MEANS if algorithm.kl.mean == "loss" else MEANS - {"kl"}
    return {name: value / total if name in scaled else value for name, value in metrics.items()}
