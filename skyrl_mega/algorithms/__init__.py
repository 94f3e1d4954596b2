"""From rewards to a loss: pure functions on tensors, independent of Megatron, vLLM and Ray."""

from skyrl_mega.algorithms.filters import informative_groups
from skyrl_mega.algorithms.kl import kl
from skyrl_mega.algorithms.mismatch import mismatch, mismatch_sums
from skyrl_mega.algorithms.shaping import soft_overlong, without_truncated
from skyrl_mega.algorithms.token_weights import token_weights

__all__ = [
    "informative_groups",
    "kl",
    "mismatch",
    "mismatch_sums",
    "soft_overlong",
    "token_weights",
    "without_truncated",
]
