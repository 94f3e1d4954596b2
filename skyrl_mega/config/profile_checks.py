"""Checks of `telemetry.profile`."""

from __future__ import annotations

from skyrl_mega.config.derived import policy_ranks
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.lists import check_unique
from skyrl_mega.config.schema import Config, ProfileConfig


def check_profile(c: Config) -> None:
    """Checks the profiled steps and ranks.

    Raises:
        UserError: A step or rank is given twice or does not exist, or ranks are given without a step.
    """
    profile, ranks = c.telemetry.profile, policy_ranks(c)
    for name, given in (("steps", profile.steps), ("ranks", profile.ranks)):
        check_unique(f"telemetry.profile.{name}", given)
    if not profile.steps and profile.ranks != (default_ranks := ProfileConfig().ranks):
        raise UserError(
            f"no step is recorded; give telemetry.profile.steps, or telemetry.profile.ranks={default_ranks}",
            key="telemetry.profile.ranks",
            value=profile.ranks,
        )
    beyond = [rank for rank in profile.ranks if rank >= ranks]
    if profile.steps and beyond:
        raise UserError(
            f"there is no policy rank {beyond[0]}; allowed are 0 to {ranks - 1} (policy.ranks)",
            key="telemetry.profile.ranks",
            value=profile.ranks,
        )
    late = [step for step in profile.steps if c.run.steps is not None and step > c.run.steps]
    if late:
        raise UserError(
            f"there is no step {late[0]}; allowed are 1 to {c.run.steps} (run.steps)",
            key="telemetry.profile.steps",
            value=profile.steps,
        )
