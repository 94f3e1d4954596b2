"""Watchers of the mismatch between engine and policy, and the stop for tokens no longer sampled from the policy.

docs/parity.md explains the sources and usual sizes of differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from skyrl_mega.algorithms.mismatch import P99
from skyrl_mega.cluster.errors import Fault
from skyrl_mega.config.derived import engine_precision, generates_ahead
from skyrl_mega.config.schema import Config
from skyrl_mega.telemetry.table import number
from skyrl_mega.trainer.health.step_view import Finding, Row, StepView, metric_of, repeatedly_above

MEAN = "mismatch/logprob_abs_mean"
NAMES = {"mean": MEAN, "p99": P99}
"""Suffix of the settings in `health.mismatch` → metric."""
LABELS = {"mean": "in the mean", "p99": "at the 99th percentile"}

ALARM_MEAN = {"float32": 0.01, "bfloat16": 0.05, "fp8": 0.1}
"""Alarm threshold in nats, by the engine's precision. Usual differences within the same precision are 1e-7 in float32,
about 0.01 in bfloat16, and a few times more for a large mixture of experts, where rounding changes the routing of some
tokens."""
P99_FACTOR = 10.0
"""Ratio of the alarm at the 99th percentile to the alarm of the mean."""
ROUTES = "replay/route_mismatch_layer_"
ALARM_ROUTES = {"float32": 0.02, "bfloat16": 0.3, "fp8": 0.5}
"""Alarm threshold for the share of a layer's expert choices. Rounding decides between nearly equal experts:
arXiv:2510.11370 reports about a tenth of router choices differing in bfloat16."""
STALE_EXTRA = 0.1
"""Nats added for a policy ahead of the rollouts (`asynchrony.max_staleness` above 0)."""
STUCK_NATS = 0.3
"""Nats per token from which nothing can be learned, in any precision."""
STOP_NATS = 1.0
"""Nats beyond any effect of precision: engine and policy prefer different tokens."""
RISE_FACTOR, RISE_MIN = 10.0, 1e-3
"""Multiple of the usual mismatch, and the smallest alarm in nats."""


class EngineDiffers(Fault):
    """Engine and policy differ by more than `health.mismatch.stop_mean` or `stop_p99` allow."""


def threshold(config: Config, kind: str, of: str) -> float:
    """Returns the threshold in nats for an alarm, or for the end of the run: the setting in `health.mismatch`, infinite
    for a setting of 0. Without the setting returns a default, which depends on the engine's precision, on generation
    ahead of training and on the sampling; infinite for `stop` of `p99`.

    Args:
        config: The settings.
        kind: `alarm` or `stop`.
        of: `mean` or `p99`.
    """
    setting: float | None = getattr(config.health.mismatch, f"{kind}_{of}")
    if setting is not None:
        return setting or math.inf
    alarm_mean = ALARM_MEAN[engine_precision(config)] + (STALE_EXTRA if generates_ahead(config.asynchrony) else 0.0)
    defaults = {
        "alarm": {"mean": alarm_mean, "p99": P99_FACTOR * alarm_mean},
        "stop": {"mean": STOP_NATS, "p99": math.inf},
    }
    return defaults[kind][of] + sampling_excess(config)


def sampling_excess(config: Config) -> float:
    """Returns the possible excess in nats of the engine's log-probs over the policy's, due to sampling from a part of
    the distribution.

    The tokens kept by top_p have a total probability of at least top_p, so log-probs rise by at most −ln top_p. For
    top_k no bound is known, and the result is infinity. 0 at temperature 0.
    """
    sampling = config.rollout.sampling
    if sampling.temperature == 0:
        return 0.0
    if sampling.top_k > 0 or sampling.top_p == 0:
        return math.inf
    return -math.log(sampling.top_p)


def mismatch_high(view: StepView) -> Finding | None:
    """Returns a finding if the mean or the 99th percentile of the log-prob difference between engine and policy
    reaches its alarm threshold (`threshold`); else None."""
    phrases = list(past_threshold(view.config, "alarm", view.metrics))
    if not phrases:
        return None
    stale = generates_ahead(view.config.asynchrony)
    moved = f", or the policy has moved far in {view.config.asynchrony.max_staleness} syncs" if stale else ""
    text = (
        f"log-probs of engine and policy differ by {' and '.join(phrases)}: the engine samples from other "
        f"probabilities than training assumes{moved}; docs/parity.md lists causes"
    )
    stuck = (view.metric(MEAN) or 0.0) >= STUCK_NATS + sampling_excess(view.config)
    return Finding("mismatch_high", text, stuck=stuck, explains=("mismatch_rises",))


def mismatch_rises(view: StepView) -> Finding | None:
    """Returns a finding if the mean log-prob difference between engine and policy is at least `RISE_FACTOR` times the
    usual one (`StepView.usual`), in this step and in another of the last `NEAR_STEPS`: other weights or another
    precision. None otherwise, also while the usual one is unknown, and always with generation ahead of training, where
    the difference varies."""
    if generates_ahead(view.config.asynchrony):
        return None
    usual, now = view.usual(MEAN), view.metric(MEAN)
    if not usual or not repeatedly_above(view, MEAN, max(RISE_MIN, RISE_FACTOR * usual), math.inf):
        return None
    text = f"log-probs of engine and policy differ by {number(now)} nats a token, where {number(usual)} is usual"
    return Finding("mismatch_rises", f"{text}: it rises from step to step, or something has changed")


def routes_differ(view: StepView) -> Finding | None:
    """Returns a finding if, in any layer, the share of tokens that the policy would send to other experts than the
    engine did reaches the threshold `health.mismatch.alarm_routes`. None otherwise, and always without
    `policy.moe.replay: rollout`."""
    if view.config.policy.moe.replay != "rollout":
        return None
    setting = view.config.health.mismatch.alarm_routes
    alarm = ALARM_ROUTES[engine_precision(view.config)] if setting is None else setting or math.inf
    layers = {int(name.removeprefix(ROUTES)): metric_of(view.metrics, name) or 0.0 for name in _layers(view.metrics)}
    far = sorted(layer for layer, share in layers.items() if share >= alarm)
    if not far:
        return None
    worst = max(far, key=lambda layer: layers[layer])
    text = (
        f"the policy would send {layers[worst]:.0%} of the tokens of layer {worst} to other experts than the engine did"
        f" (alarm from {alarm:.0%}, health.mismatch.alarm_routes); so far off: {len(far)} of {len(layers)} layers, "
        f"from layer {far[0]} on"
    )
    return Finding("routes_differ", text)


def _layers(metrics: Row) -> list[str]:
    return [name for name in metrics if name.startswith(ROUTES)]


def past_threshold(config: Config, kind: str, metrics: Row) -> Iterator[str]:
    """Yields a phrase for each of the two log-prob differences (mean, 99th percentile) at or above the threshold of
    `kind` (`alarm` or `stop`). NaN and infinity exceed any threshold that is not disabled; a difference missing in
    `metrics` exceeds none."""
    for of, name in NAMES.items():
        value, limit = metric_of(metrics, name), threshold(config, kind, of)
        if value is not None and value >= limit and limit < math.inf:
            key = f"health.mismatch.{kind}_{of}"
            yield f"{number(value)} nats a token {LABELS[of]} ({kind} from {number(limit)}, {key})"


def end_if_too_far(config: Config, step: int, metrics: Row) -> None:
    """Raises an error, which ends the run, if engine and policy differ too far; never if the stop thresholds are
    disabled. To be called before the step's update is synced or saved.

    Raises:
        EngineDiffers: A log-prob difference in `metrics` reaches its stop threshold, or is not finite. A missing
            difference raises nothing.
    """
    if phrases := list(past_threshold(config, "stop", metrics)):
        raise EngineDiffers(
            f"step {step}: log-probs of engine and policy differ by {' and '.join(phrases)}; the step's update goes "
            "neither to the engines nor into a checkpoint; docs/parity.md says where to look"
        )


WATCHERS = (mismatch_high, mismatch_rises, routes_differ)
