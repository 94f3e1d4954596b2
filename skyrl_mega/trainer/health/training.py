"""Watchers of training metrics. Each returns a finding about a step, or None.

A metric without natural bounds is compared with the past: the median of earlier steps, or of the run's first. A single
abnormal step is noise, so most watchers require two within three steps.
"""

from __future__ import annotations

import math
from operator import attrgetter

from skyrl_mega.telemetry.table import number
from skyrl_mega.trainer.health.step_view import NEAR_STEPS, SPEED, Finding, StepView, repeatedly_above

COLLAPSED = 0.05
"""Share of the initial entropy that counts as collapsed, unless rewards rose meanwhile."""
RISEN = 0.05
"""Rise of the mean reward since the start that justifies low entropy: the policy became certain, and is right."""
NO_ENTROPY = 1e-4
"""Threshold in nats while the initial entropy is unknown."""
VANISHED = 1e-3
"""Share of the usual gradient norm."""
NO_GRADIENT = 1e-9
SPIKE, HUGE = 20.0, 1000.0
"""Multiples of the usual gradient norm: for two steps within three, and for a single step."""
KL_OLD, KL_TIMES, KL_LEAST, KL_MOST = 0.5, 20.0, 0.5, 10.0
"""Nats the policy may move within a step; multiple of the usual KL to the reference; lower and upper bound of this
alarm in nats."""
CLIPPED = 0.9
SLOW = 0.2
"""Share of the usual speed."""


def not_finite(view: StepView) -> Finding | None:
    """Returns a finding if the step's loss, gradient norm, entropy or ratio is NaN or infinite; else None."""
    names = [f"policy/{name}" for name in ("loss", "grad_norm", "entropy", "ratio")]
    bad_metrics = [name for name in names if view.metric(name) == math.inf]
    if not bad_metrics:
        return None
    text = f"{', '.join(bad_metrics)} {'is' if len(bad_metrics) == 1 else 'are'} NaN or infinite"
    kinds = ("gradient_vanished", "gradient_spikes", "entropy_collapsed", "kl_explodes", "everything_clipped")
    return Finding("not_finite", text, stuck=True, explains=kinds)


def entropy_collapsed(view: StepView) -> Finding | None:
    """Returns a finding if the entropy of two steps is below `COLLAPSED` times the entropy at the run's start (below
    `NO_ENTROPY` while this is unknown), and the mean reward did not rise by more than `RISEN` meanwhile; else None."""
    now, start = view.last("policy/entropy", 2), view.start("policy/entropy")
    least = NO_ENTROPY if start is None else COLLAPSED * start
    if len(now) < 2 or max(now) >= least or view.metric("policy/entropy") is None:
        return None
    before, earns = view.start("reward/mean"), view.metric("reward/mean")
    if before is not None and earns is not None and earns > before + RISEN:
        return None
    was = "" if start is None else f", from {number(start)} at the start"
    rewards = "" if before is None else f"; reward {number(before)} → {number(earns)}"
    text = f"entropy is {number(now[0])} nats a token{was}{rewards}"
    return Finding("entropy_collapsed", text, stuck=not view.has_signal, luck=True)


def gradient_vanished(view: StepView) -> Finding | None:
    """Returns a finding if the gradient norm of the newest two steps with a norm, this step included, is below
    `VANISHED` times the usual norm (`StepView.usual`), or below `NO_GRADIENT`, although rewards differ within groups of
    this step; else None."""
    now, usual = view.last("policy/grad_norm", 2), view.usual("policy/grad_norm")
    least = max(NO_GRADIENT, VANISHED * (usual or 0.0))
    if view.metric("policy/grad_norm") is None or not view.metric("rollout/groups_differ"):
        return None
    if len(now) < 2 or max(now) >= least:
        return None
    was = "" if usual is None else f", where {number(usual)} is usual"
    share = view.metric("rollout/groups_differ") or 0.0
    text = f"gradient norm {number(now[0])}{was}, though {share:.0%} of the groups have rewards that differ"
    return Finding("gradient_vanished", text, stuck=True)


def gradient_spikes(view: StepView) -> Finding | None:
    """Returns a finding if the gradient norm is at least `SPIKE` times the usual norm (`StepView.usual`) in this step
    and in another of the newest three, or at least `HUGE` times in this step; else None, also while the usual norm is
    unknown."""
    usual = view.usual("policy/grad_norm")
    if not usual or not repeatedly_above(view, "policy/grad_norm", SPIKE * usual, HUGE * usual):
        return None
    now, clip = view.metric("policy/grad_norm"), view.config.policy.optimizer.clip_grad
    clipped = f"clipped to {clip:g}" if clip else "not clipped (policy.optimizer.clip_grad = 0)"
    return Finding("gradient_spikes", f"gradient norm {number(now)}, where {number(usual)} is usual; {clipped}")


def kl_explodes(view: StepView) -> Finding | None:
    """Returns a finding if the KL of the policy to its state at the start of the step, or to the reference, is above
    its limit in two of three steps, or far above the limit in this step; else None."""
    usual = view.usual("policy/kl")
    least = max(KL_LEAST, KL_TIMES * usual) if usual else KL_MOST
    for name, far, at_all, of in (
        ("policy/kl_old", KL_OLD, 10 * KL_OLD, "where the step began"),
        ("policy/kl", min(least, KL_MOST), KL_MOST, "the reference"),
    ):
        if repeatedly_above(view, name, far, at_all):
            was = f", where {number(usual)} is usual" if usual and name == "policy/kl" else ""
            return Finding("kl_explodes", f"KL to {of} is {number(view.metric(name))} nats a token{was}")
    return None


def everything_clipped(view: StepView) -> Finding | None:
    """Returns a finding if the ratio of at least the share `CLIPPED` of the tokens is clipped in two of three steps, so
    that these tokens get no gradient. None otherwise, and for losses with a gradient for clipped tokens."""
    learns = view.config.algorithm.loss_traits.learns_clipped
    if learns or not repeatedly_above(view, "policy/clip_fraction", CLIPPED, math.inf):
        return None
    share, a, bounds = view.metric("policy/clip_fraction"), view.config.algorithm, ""
    if a.loss_traits.clips_ratio:
        low, high = attrgetter(*a.loss_traits.reads[:2])(a)
        bounds = f" ({1 - low:g} to {1 + high:g})"
    text = f"the ratio of {share:.0%} of the tokens is clipped{bounds}"
    return Finding("everything_clipped", f"{text}: they have no gradient", stuck=True)


def slow(view: StepView) -> Finding | None:
    """Returns a finding if engines generated less than `SLOW` times the usual tokens per second (`StepView.usual`) in
    each of the last three steps. Otherwise returns None, also while the usual speed is unknown."""
    usual, now = view.usual(SPEED), view.last(SPEED, NEAR_STEPS)
    if not usual or len(now) < NEAR_STEPS or max(now) >= SLOW * usual or view.metric(SPEED) is None:
        return None
    return Finding(
        "slow", f"engines generate {now[0]:,.0f} tokens/s for {NEAR_STEPS} steps, where {usual:,.0f} are usual"
    )


WATCHERS = (
    not_finite,
    entropy_collapsed,
    gradient_vanished,
    gradient_spikes,
    kl_explodes,
    everything_clipped,
    slow,
)
