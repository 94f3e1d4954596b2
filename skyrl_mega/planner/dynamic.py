"""Prompts that dynamic sampling draws for a step, by an assumed share of groups with a signal."""

from __future__ import annotations

from math import ceil

from skyrl_mega.config.schema import Config

SIGNAL_SHARE = 0.5
"""Share of groups whose rewards differ: an assumption, as nobody knows a policy before it has answered."""


def rounds(config: Config) -> list[int]:
    """Returns how many prompts each generation round of a step draws; one round of all without dynamic sampling."""
    settings, wanted = config.algorithm.dynamic_sampling, config.data.prompts_per_step
    if not settings.enabled:
        return [wanted]
    if config.asynchrony.mode == "full":  # what is left out is replaced at once
        return [ceil(min(1 / SIGNAL_SHARE, settings.max_rounds) * wanted)]
    share = settings.replace_from if settings.mode == "replace" else 1.0
    drawn: list[int] = []
    found = 0
    while not drawn or (found < share * wanted and len(drawn) < settings.max_rounds):
        drawn.append(ceil(settings.oversample * (wanted - found)))
        found += max(1, round(SIGNAL_SHARE * drawn[-1]))
    return drawn


def note(config: Config) -> str | None:
    """Returns the assumption in words; None without dynamic sampling."""
    if not config.algorithm.dynamic_sampling.enabled:
        return None
    drawn = rounds(config)
    return (
        f"algorithm.dynamic_sampling.enabled=true: seconds assume that {SIGNAL_SHARE:.0%} of the groups have a signal, "
        f"so that a step draws {sum(drawn):,} prompts in {len(drawn)} round{'s' * (len(drawn) > 1)} and trains on "
        f"{config.data.prompts_per_step:,} at most"
    )
