"""Checks of the settings for the selection of training samples."""

from __future__ import annotations

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config, DynamicSamplingConfig


def check_samples(c: Config) -> None:
    """Rejects settings of dynamic sampling and of the overlong filter without effect.

    Raises:
        UserError: A setting is rejected; names key, value, reason and fix.
    """
    dynamic, overlong, unset = c.algorithm.dynamic_sampling, c.algorithm.overlong, DynamicSamplingConfig()
    for name in ("mode", "oversample", "tolerance", "reward"):
        value = getattr(dynamic, name)
        if not dynamic.enabled and value != getattr(unset, name):
            raise UserError(
                "there is no dynamic sampling",
                key=f"algorithm.dynamic_sampling.{name}",
                value=value,
                fix="give algorithm.dynamic_sampling.enabled=true, or leave it out",
            )
    if overlong.filter_by == "tokens" and not overlong.filter:
        raise UserError(
            "nothing is filtered",
            key="algorithm.overlong.filter_by",
            value="tokens",
            fix="give algorithm.overlong.filter=true, or leave it out",
        )
