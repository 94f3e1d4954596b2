"""Settings of the correction for differences between the engine's and the policy's log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import at_least, between, one_of


@dataclass
class RejectionConfig:
    """Rejection of tokens with low probability under the policy: a rejected token has loss 0, but keeps the KL and
    entropy terms. Ratios are π_old / π_engine."""

    level: str = one_of("off", "token", "sequence", "geometric")
    """Level of the ratio. token: each token (IcePop, together with `importance_cap` equal to `high`). sequence: product
    over a whole answer. geometric: geometric mean over an answer."""
    low: float = between(0, 1, 0.5)
    """Ratios below this bound are rejected."""
    high: float = at_least(1, 2.0)
    """Ratios above this bound are rejected. IcePop uses 0.5 to 5; for geometric means, about 0.999 to 1.001 is
    usual."""
    outlier_low: Optional[float] = between(0, 1, None)
    """Rejects a whole answer if any token in it has a smaller ratio, independently of `level`; null rejects none. 1e-4
    is usual; verl calls this a veto."""
    outlier_high: Optional[float] = at_least(1, None)
    """Rejects a whole answer if any token in it has a larger ratio; null rejects none. 100 is usual."""
    off_policy: Optional[float] = at_least(0, None)
    """Threshold of DeepSeek-V3.2's mask (arXiv:2512.02556) in nats: rejects tokens with a negative advantage if the
    mean of log π_engine - log π over the answer is larger; null rejects none. π is the policy in training, so later
    mini-batches are rejected more often. TRL's documentation suggests to start with 0.5."""
