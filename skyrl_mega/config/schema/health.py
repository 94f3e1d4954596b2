"""Settings of a run's health checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.schema.fields import at_least, between


@dataclass
class MismatchConfig:
    """Limits on the difference between the engine's and the policy's log-probs (docs/parity.md)."""

    alarm_mean: Optional[float] = at_least(0, None)
    """Threshold of `mismatch/logprob_abs_mean` for an alarm, in nats. null: 0.05 if the engine computes in bfloat16,
    0.01 in float32, 0.1 with FP8 weights or cache; plus 0.1 if rollouts are generated ahead (`asynchrony`); plus −ln
    top_p if `rollout.sampling.top_p` truncates the engine's distribution; no alarm with `top_k`. 0 disables the
    alarm."""
    alarm_p99: Optional[float] = at_least(0, None)
    """Threshold of `mismatch/logprob_abs_p99`, like `alarm_mean`. null: ten times the default of the mean, before −ln
    top_p is added."""
    alarm_routes: Optional[float] = between(0, 1, None)
    """Threshold of `replay/route_mismatch_layer_<n>` for an alarm about this layer, with `policy.moe.replay=rollout`:
    the share of tokens with other expert choices in the policy than in the engine. null: 0.3 if the engine computes in
    bfloat16, 0.02 in float32, 0.5 with FP8. 0 disables the alarm."""
    stop_mean: Optional[float] = at_least(0, None)
    """Mean mismatch in nats that ends the run with exit code 1 in the same step, before the new weights reach the
    engines or a checkpoint. null: 1, plus −ln top_p, and no limit with `top_k`. No number format explains such a
    difference: the engine uses other weights, tokens or settings. 0 never ends the run."""
    stop_p99: Optional[float] = at_least(0, None)
    """Mismatch at the 99th percentile that ends the run, like `stop_mean`. null and 0 never end the run."""


@dataclass
class HealthConfig:
    """Health checks of a run (docs/health.md)."""

    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    """Limits on the difference between engine and policy."""
