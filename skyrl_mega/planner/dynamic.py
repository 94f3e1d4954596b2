"""Number of prompts sampled per step by dynamic sampling, from an assumed share of groups with a learning signal."""

from __future__ import annotations

from math import ceil

from skyrl_mega.config.schema import Config

SIGNAL_SHARE = 0.5
"""Assumed share of groups with differing rewards; a policy's true share is unknown before it has answered."""


def rounds(config: Config, signal: float = SIGNAL_SHARE) -> list[int]:
    """Estimates the number of prompts sampled in each generation round of a step; a single round without dynamic
    sampling, and with `asynchrony.mode=full`.

    Args:
        config: The settings.
        signal: Share of groups with differing rewards (a signal), above 0.
    """
    return [sampled for sampled, _ in _rounds(config, signal)]


def trained(config: Config, signal: float = SIGNAL_SHARE) -> int:
    """Estimates the number of groups trained on in a step: `data.prompts_per_step`, or fewer if all rounds of dynamic
    sampling together yield fewer groups with a signal, and `dynamic_sampling.mode` is not replace.

    Args:
        config: The settings.
        signal: Share of groups with differing rewards (a signal), above 0.
    """
    wanted = config.data.prompts_per_step
    settings = config.algorithm.dynamic_sampling
    if not settings.enabled or settings.mode == "replace":  # copies fill the step up
        return wanted
    return min(wanted, sum(informative for _, informative in _rounds(config, signal)))


def _rounds(config: Config, signal: float) -> list[tuple[int, int]]:
    """Returns the prompts sampled in each round, and the groups with a signal among them."""
    settings, wanted = config.algorithm.dynamic_sampling, config.data.prompts_per_step
    if not settings.enabled:
        return [(wanted, wanted)]
    if config.asynchrony.mode == "full":  # dropped groups are replaced at once
        sampled = ceil(min(1 / signal, settings.max_rounds) * wanted)
        return [(sampled, round(signal * sampled))]
    share = settings.replace_from if settings.mode == "replace" else 1.0
    rounds: list[tuple[int, int]] = []
    with_signal = 0
    while not rounds or (with_signal < share * wanted and len(rounds) < settings.max_rounds):
        sampled = ceil(settings.oversample * (wanted - with_signal))
        rounds.append((sampled, max(1, round(signal * sampled))))
        with_signal += rounds[-1][1]
    return rounds


def note(config: Config, signal: float = SIGNAL_SHARE) -> str | None:
    """Returns a sentence stating the share of groups with a signal, and the prompts and rounds of a step; None without
    dynamic sampling. `signal` is the share of groups with differing rewards, above 0."""
    if not config.algorithm.dynamic_sampling.enabled:
        return None
    sampled = rounds(config, signal)
    return (
        f"algorithm.dynamic_sampling.enabled=true: seconds assume that {signal:.0%} of the groups have a signal, "
        f"so that a step draws {sum(sampled):,} prompts in {len(sampled)} round{'s' * (len(sampled) > 1)} and trains "
        f"on {config.data.prompts_per_step:,} at most"
    )
