"""What is done about the engine's log-probs, which are not the policy's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import at_least, between, one_of


@dataclass
class RejectionConfig:
    """What the engine drew and the policy would not have: its loss is 0, but for the KL term and the entropy. Ratios
    are π_old / π_engine."""

    level: str = one_of("off", "token", "sequence", "geometric")
    """Whose ratio is looked at: a token's (IcePop, with `importance_cap` at `high`), a whole answer's product, or its
    geometric mean."""
    low: float = between(0, 1, 0.5)
    """A ratio below is rejected."""
    high: float = at_least(1, 2.0)
    """A ratio above is rejected. IcePop takes 0.5 to 5; for geometric means 0.999 to 1.001 and the like is usual."""
    outlier_low: Optional[float] = between(0, 1, None)
    """An answer with a token whose ratio is below is rejected as a whole, whatever `level` is; None rejects none. 1e-4
    is usual; verl calls it a veto."""
    outlier_high: Optional[float] = at_least(1, None)
    """An answer with a token whose ratio is above is rejected as a whole; None rejects none. 100 is usual."""
    off_policy: Optional[float] = at_least(0, None)
    """DeepSeek-V3.2's mask (arXiv:2512.02556): tokens with a negative advantage are rejected where the mean of
    log π_engine - log π over their answer is above, nats; None rejects none. It looks at the policy as it is trained,
    so that later mini-batches are rejected more. TRL's documentation begins with 0.5."""
