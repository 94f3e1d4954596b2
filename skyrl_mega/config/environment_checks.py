"""Checks of the number of environments, slots and rollout workers."""

from __future__ import annotations

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config


def check_environment(config: Config) -> None:
    """Rejects impossible combinations of rollout workers, slots and determinism.

    Raises:
        UserError: A setting is rejected; names key, value, allowed values and fix.
    """
    environment = config.environment
    processes, slots, workers = environment.processes, environment.slots, environment.workers
    for name, many in (("slots", slots), ("workers", workers)):
        if many is not None and processes > many:
            raise UserError(
                f"each needs one of the run's environment.{name}, of which there are {many}; give "
                f"fewer processes, or environment.{name}={processes} and more",
                key="environment.processes",
                value=processes,
            )
    if not config.run.deterministic:
        return
    waves = "run.deterministic=true has all trajectories wait for one another, turn by turn"
    if processes:
        raise UserError(
            f"{waves}, in one process",
            key="environment.processes",
            value=processes,
            fix="leave it out, or give run.deterministic=false",
        )
    if slots is not None:
        raise UserError(
            f"{waves}, so that all have to be open",
            key="environment.slots",
            value=slots,
            fix="leave it out, or give run.deterministic=false",
        )
