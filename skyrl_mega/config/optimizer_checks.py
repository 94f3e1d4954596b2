"""Checks of an optimizer's settings (`policy.optimizer`, `critic.optimizer`)."""

from __future__ import annotations

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import OptimizerConfig

MOST_BETA = 0.99
"""Largest beta with bfloat16 moments. A moment without a gradient shrinks by the fraction 1 - beta, and adjacent
bfloat16 numbers differ by 0.4 to 0.8 %: a change below 0.2 to 0.4 % may be rounded away, a change of 1 % never is."""


def check_optimizer(o: OptimizerConfig, key: str) -> None:
    """Rejects an impossible schedule or decay.

    Args:
        o: The optimizer's settings.
        key: The group of the settings, such as `policy.optimizer`.

    Raises:
        UserError: A setting is rejected; names key, value, allowed values and fix.
    """
    if o.schedule != "constant":
        if o.decay_steps is None:
            raise UserError(
                f"it needs {key}.decay_steps; give it, or schedule=constant", key=f"{key}.schedule", value=o.schedule
            )
        if o.decay_steps <= o.warmup_steps:
            raise UserError(
                f"allowed is more than {key}.warmup_steps = {o.warmup_steps}",
                key=f"{key}.decay_steps",
                value=o.decay_steps,
            )
    if o.min_lr > o.lr:
        raise UserError(f"allowed is at most {key}.lr = {o.lr:g}", key=f"{key}.min_lr", value=f"{o.min_lr:g}")
    for name in ("beta1", "beta2"):
        if getattr(o, name) >= 1:
            raise UserError("allowed is a number below 1", key=f"{key}.{name}", value=f"{getattr(o, name):g}")
        if o.moments == "bfloat16" and getattr(o, name) > MOST_BETA:
            raise UserError(
                f"it keeps 8 significant bits, and {key}.{name} = {getattr(o, name):g} lets a "
                "moment without a gradient fall by less than half of the last of them, which is "
                f"rounded away; allowed is {key}.{name} of at most {MOST_BETA}, as published runs "
                "with such moments have (0.9 and 0.95), or moments=float32",
                key=f"{key}.moments",
                value="bfloat16",
            )
