"""Watchers of the figures of training. Each says what it found in a step, or None.

What has no natural bound is compared with its own past: the median of the steps before, or of the run's first ones.
One step far off is noise, so that most of them want a second one within three.
"""

from __future__ import annotations

import math

from skyrl_mega.telemetry.table import number
from skyrl_mega.trainer.health.seen import NEAR, SPEED, Finding, Seen, twice

COLLAPSED = 0.05
"""Share of its value at the start below which entropy has collapsed, where rewards have not risen meanwhile."""
RISEN = 0.05
"""Rise of the mean reward from the start that explains a low entropy: the policy has become sure, and is right."""
NO_ENTROPY = 1e-4
"""Nats, where a start is not known yet."""
VANISHED = 1e-3
"""Share of the usual gradient norm."""
NO_GRADIENT = 1e-9
SPIKE, HUGE = 20.0, 1000.0
"""Times the usual gradient norm: twice within three steps, and once."""
KL_OLD, KL_TIMES, KL_LEAST, KL_MOST = 0.5, 20.0, 0.5, 10.0
"""Nats that the policy moves within a step; times the usual KL to the reference, from so many nats on, and at all."""
CLIPPED = 0.9
SLOW = 0.2
"""Share of the usual speed."""


def not_finite(seen: Seen) -> Finding | None:
    """A figure of the optimizer step is no number."""
    names = [f"policy/{name}" for name in ("loss", "grad_norm", "entropy", "ratio")]
    found = [name for name in names if seen.figure(name) == math.inf]
    if not found:
        return None
    text = f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} NaN or infinite"
    kinds = ("gradient_vanished", "gradient_spikes", "entropy_collapsed", "kl_explodes", "everything_clipped")
    return Finding("not_finite", text, stuck=True, explains=kinds)


def entropy_collapsed(seen: Seen) -> Finding | None:
    """The policy says one thing only, and it is not what earns more."""
    now, start = seen.last("policy/entropy", 2), seen.start("policy/entropy")
    least = NO_ENTROPY if start is None else COLLAPSED * start
    if len(now) < 2 or max(now) >= least or seen.figure("policy/entropy") is None:
        return None
    before, earns = seen.start("reward/mean"), seen.figure("reward/mean")
    if before is not None and earns is not None and earns > before + RISEN:
        return None
    was = "" if start is None else f", from {number(start)} at the start"
    rewards = "" if before is None else f"; reward {number(before)} → {number(earns)}"
    text = f"entropy is {number(now[0])} nats a token{was}{rewards}"
    return Finding("entropy_collapsed", text, stuck=not seen.tells_apart, luck=True)


def gradient_vanished(seen: Seen) -> Finding | None:
    """Rewards differ, and the gradient is nothing."""
    now, usual = seen.last("policy/grad_norm", 2), seen.usual("policy/grad_norm")
    least = max(NO_GRADIENT, VANISHED * (usual or 0.0))
    if seen.figure("policy/grad_norm") is None or not seen.figure("rollout/groups_differ"):
        return None
    if len(now) < 2 or max(now) >= least:
        return None
    was = "" if usual is None else f", where {number(usual)} is usual"
    share = seen.figure("rollout/groups_differ") or 0.0
    text = f"gradient norm {number(now[0])}{was}, though {share:.0%} of the groups have rewards that differ"
    return Finding("gradient_vanished", text, stuck=True)


def gradient_spikes(seen: Seen) -> Finding | None:
    """The gradient is many times what it usually is, once more or by far."""
    usual = seen.usual("policy/grad_norm")
    if not usual or not twice(seen, "policy/grad_norm", SPIKE * usual, HUGE * usual):
        return None
    now, clip = seen.figure("policy/grad_norm"), seen.config.policy.optimizer.clip_grad
    clipped = f"clipped to {clip:g}" if clip else "not clipped (policy.optimizer.clip_grad = 0)"
    return Finding("gradient_spikes", f"gradient norm {number(now)}, where {number(usual)} is usual; {clipped}")


def kl_explodes(seen: Seen) -> Finding | None:
    """The policy runs away: from where it was before the step, or from the reference."""
    usual = seen.usual("policy/kl")
    least = max(KL_LEAST, KL_TIMES * usual) if usual else KL_MOST
    for name, far, at_all, of in (
        ("policy/kl_old", KL_OLD, 10 * KL_OLD, "where the step began"),
        ("policy/kl", min(least, KL_MOST), KL_MOST, "the reference"),
    ):
        if twice(seen, name, far, at_all):
            was = f", where {number(usual)} is usual" if usual and name == "policy/kl" else ""
            return Finding("kl_explodes", f"KL to {of} is {number(seen.figure(name))} nats a token{was}")
    return None


def everything_clipped(seen: Seen) -> Finding | None:
    """Nearly every token's ratio is clipped: those have no gradient, but for losses that keep one."""
    if seen.config.algorithm.loss in ("cispo", "sapo") or not twice(seen, "policy/clip_fraction", CLIPPED, math.inf):
        return None
    share, a = seen.figure("policy/clip_fraction"), seen.config.algorithm
    bounds = {
        "ppo": f" ({1 - a.clip_low:g} to {1 + a.clip_high:g})",
        "gspo": f" ({1 - a.gspo.clip_low:g} to {1 + a.gspo.clip_high:g})",
    }.get(a.loss, "")
    text = f"the ratio of {share:.0%} of the tokens is clipped{bounds}"
    return Finding("everything_clipped", f"{text}: they have no gradient", stuck=True)


def slow(seen: Seen) -> Finding | None:
    """Generation has a fraction of its usual speed, for three steps."""
    usual, now = seen.usual(SPEED), seen.last(SPEED, NEAR)
    if not usual or len(now) < NEAR or max(now) >= SLOW * usual or seen.figure(SPEED) is None:
        return None
    return Finding("slow", f"engines generate {now[0]:,.0f} tokens/s for {NEAR} steps, where {usual:,.0f} are usual")


WATCHERS = (
    not_finite,
    entropy_collapsed,
    gradient_vanished,
    gradient_spikes,
    kl_explodes,
    everything_clipped,
    slow,
)
