"""Watchers of what lies between engine and policy, and the stop: tokens that were sampled are no longer the policy's.

docs/parity.md says where differences come from and how large they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from skyrl_mega.algorithms.mismatch import P99
from skyrl_mega.config.derived import engine_precision, generates_ahead
from skyrl_mega.config.schema import Config
from skyrl_mega.telemetry.table import number
from skyrl_mega.trainer.health.seen import Finding, Row, Seen, figure, twice

MEAN = "mismatch/logprob_abs_mean"
NAMES = {"mean": MEAN, "p99": P99}
"""Ends of the settings below `health.mismatch` → the metric."""
CALLED = {"mean": "in the mean", "p99": "at the 99th percentile"}

ALARM_MEAN = {"float32": 0.01, "bfloat16": 0.05, "fp8": 0.1}
"""Nats by what the engine computes in. One precision differs by 1e-7 in float32, by about 0.01 in bfloat16, and a large
mixture of experts by a few times that, as rounding sends some tokens to other experts."""
TAIL = 10.0
"""Times the alarm of the mean: that of the 99th percentile."""
ROUTES = "replay/route_mismatch_layer_"
ALARM_ROUTES = {"float32": 0.02, "bfloat16": 0.3, "fp8": 0.5}
"""Share of a layer's choices of experts. Rounding decides between experts that are nearly alike: arXiv:2510.11370 sees
about a tenth of the routers choose otherwise in bfloat16."""
STALE = 0.1
"""Nats by which the policy may have moved away from what was generated ahead (`asynchrony.max_staleness` above 0)."""
STUCK = 0.3
"""Nats a token from which nothing is learned, whatever the precision."""
STOP = 1.0
"""Nats that no precision explains: the two call different tokens likely."""
TIMES, LEAST = 10.0, 1e-3
"""Times the usual mismatch, from so many nats on."""


class EngineDiffers(RuntimeError):
    """Engine and policy differ by more than `health.mismatch.stop_mean` or `stop_p99` allow."""


def bound(config: Config, kind: str, of: str) -> float:
    """Nats from which the mean or the 99th percentile is told of, or ends the run; infinite where it never does.

    Args:
        config: The settings; what they leave open follows from the engine's precision.
        kind: `alarm` or `stop`.
        of: `mean` or `p99`.
    """
    given: float | None = getattr(config.health.mismatch, f"{kind}_{of}")
    if given is not None:
        return given or math.inf
    usual = ALARM_MEAN[engine_precision(config)] + (STALE if generates_ahead(config.asynchrony) else 0.0)
    own = {"alarm": {"mean": usual, "p99": TAIL * usual}, "stop": {"mean": STOP, "p99": math.inf}}
    return own[kind][of] + sampled_apart(config)


def sampled_apart(config: Config) -> float:
    """Nats by which the engine's log-probs may lie above the policy's because it draws from a part of its distribution.

    What top_p keeps has a probability of top_p at least, so that log-probs rise by −ln top_p at most; of top_k nothing
    is known.
    """
    sampling = config.rollout.sampling
    if sampling.temperature == 0:
        return 0.0
    if sampling.top_k > 0 or sampling.top_p == 0:
        return math.inf
    return -math.log(sampling.top_p)


def mismatch_high(seen: Seen) -> Finding | None:
    """Engine and policy differ by more than their numbers explain."""
    found = list(past(seen.config, "alarm", seen.metrics))
    if not found:
        return None
    stale = generates_ahead(seen.config.asynchrony)
    moved = f", or the policy has moved far in {seen.config.asynchrony.max_staleness} syncs" if stale else ""
    text = f"engine and policy differ by {' and '.join(found)}: what is trained on is not what was sampled{moved}"
    stuck = (seen.figure(MEAN) or 0.0) >= STUCK + sampled_apart(seen.config)
    return Finding("mismatch_high", text, stuck=stuck, explains=("mismatch_rises",))


def mismatch_rises(seen: Seen) -> Finding | None:
    """The engine's log-probs drift away from the policy's: it generates with other weights, or in other numbers. Where
    it is ahead of training that is so in every step, and more or less of it."""
    if generates_ahead(seen.config.asynchrony):
        return None
    usual, now = seen.usual(MEAN), seen.figure(MEAN)
    if not usual or not twice(seen, MEAN, max(LEAST, TIMES * usual), math.inf):
        return None
    text = f"engine and policy differ by {number(now)} nats a token, where {number(usual)} is usual"
    return Finding("mismatch_rises", f"{text}: it rises from step to step, or something has changed")


def routes_differ(seen: Seen) -> Finding | None:
    """In some layers the policy would send too many tokens to other experts than the engine did."""
    if seen.config.policy.moe.replay != "rollout":
        return None
    given = seen.config.health.mismatch.alarm_routes
    least = ALARM_ROUTES[engine_precision(seen.config)] if given is None else given or math.inf
    layers = {int(name.removeprefix(ROUTES)): figure(seen.metrics, name) or 0.0 for name in _layers(seen.metrics)}
    far = sorted(layer for layer, share in layers.items() if share >= least)
    if not far:
        return None
    worst = max(far, key=lambda layer: layers[layer])
    text = (
        f"the policy would send {layers[worst]:.0%} of the tokens of layer {worst} to other experts than the engine did"
        f" (alarm from {least:.0%}, health.mismatch.alarm_routes); so far off: {len(far)} of {len(layers)} layers, "
        f"from layer {far[0]} on"
    )
    return Finding("routes_differ", text)


def _layers(metrics: Row) -> list[str]:
    return [name for name in metrics if name.startswith(ROUTES)]


def past(config: Config, kind: str, metrics: Row) -> Iterator[str]:
    """Each figure of a step that is past its bound, with the bound. One that is no number is past any."""
    for of, name in NAMES.items():
        now, most = figure(metrics, name), bound(config, kind, of)
        if now is not None and now >= most and most < math.inf:
            key = f"health.mismatch.{kind}_{of}"
            yield f"{number(now)} nats a token {CALLED[of]} ({kind} from {number(most)}, {key})"


def end_if_too_far(config: Config, step: int, metrics: Row) -> None:
    """Ends a run whose engine is not the policy's any more; its last update is to be neither synchronised nor saved.

    Raises:
        EngineDiffers: By how much, and what to look at.
    """
    if found := list(past(config, "stop", metrics)):
        raise EngineDiffers(
            f"step {step}: engine and policy differ by {' and '.join(found)}; the step's update goes neither to the "
            "engines nor into a checkpoint; docs/parity.md says where to look"
        )


WATCHERS = (mismatch_high, mismatch_rises, routes_differ)
