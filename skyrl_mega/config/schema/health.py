"""What a run watches of itself, beside `run.patience`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.schema.fields import at_least, between


@dataclass
class MismatchConfig:
    """How far the engine's log-probs may lie from the policy's (docs/parity.md)."""

    alarm_mean: Optional[float] = at_least(0, None)
    """Nats of `mismatch/logprob_abs_mean` from which a step is told of. None is 0.05 where the engine computes in
    bfloat16, 0.01 in float32, 0.1 with FP8 weights or cache; and −ln top_p more where `rollout.sampling.top_p` cuts
    the engine's distribution, nothing where `top_k` does. 0 never tells."""
    alarm_p99: Optional[float] = at_least(0, None)
    """The same for `mismatch/logprob_abs_p99`. None is ten times what it is for the mean, before what top_p adds."""
    alarm_routes: Optional[float] = between(0, 1, None)
    """Share of `replay/route_mismatch_layer_<n>` from which a step is told of that layer: with
    `policy.moe.replay=rollout`, tokens that the policy itself would send to other experts than the engine did. None is
    0.3 where the engine computes in bfloat16, 0.02 in float32, 0.5 with FP8. 0 never tells."""
    stop_mean: Optional[float] = at_least(0, None)
    """Nats of the mean that end the run in their step, with exit code 1, before its weights go to the engines or into
    a checkpoint. None is 1, and −ln top_p more: no numbers explain it, the engine has other weights, tokens or
    settings; never with `top_k`. 0 never ends it."""
    stop_p99: Optional[float] = at_least(0, None)
    """The same for the 99th percentile. None and 0 never end it."""


@dataclass
class HealthConfig:
    """What a run watches of itself (docs/health.md)."""

    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    """How far engine and policy may differ."""
