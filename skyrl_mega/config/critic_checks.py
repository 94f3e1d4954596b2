"""Checks of the critic's settings."""

from __future__ import annotations

from dataclasses import fields

from skyrl_mega.config.derived import has_critic
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config, CriticConfig, GaeConfig


def check_critic(c: Config) -> None:
    """Rejects critic settings without `advantage: gae`, and values that leave critic or policy untrained.

    Raises:
        UserError: A setting is rejected; names key, value, reason and fix.
    """
    if not has_critic(c):
        _check_unused(c)
        return
    if c.critic.value_clip == 0:
        raise UserError(
            "no value could move; allowed is a number above 0 (PPO has 0.2), or null, which does not clip",
            key="critic.value_clip",
            value="0",
        )
    steps = c.run.steps
    if steps and c.critic.warmup_steps >= steps:
        raise UserError(
            f"allowed is less than run.steps = {steps}, or the policy would never be trained",
            key="critic.warmup_steps",
            value=c.critic.warmup_steps,
        )


def _check_unused(c: Config) -> None:
    for group, settings, defaults in (
        ("critic", c.critic, CriticConfig()),
        ("algorithm.gae", c.algorithm.gae, GaeConfig()),
    ):
        for field in fields(defaults):
            if getattr(settings, field.name) != getattr(defaults, field.name):
                raise UserError(
                    f"{group}.{field.name} is set: algorithm.advantage={c.algorithm.advantage} has no critic",
                    fix=f"give algorithm.advantage=gae, or leave {group}.{field.name} out",
                )
