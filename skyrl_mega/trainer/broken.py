"""When environments fail and nothing else happens: a run that cannot learn ends, and says why."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_mega.config.errors import UserError
from skyrl_mega.rollout.trajectory import Trajectory


def refuse_broken(trajectories: Sequence[Trajectory]) -> None:
    """Ends the run when the environment of every trajectory failed; one that works is enough to go on.

    Raises:
        UserError: Which environment, and what the first one said.
    """
    if trajectories and all(t.status.failed for t in trajectories):
        first = trajectories[0]
        name = first.prompt.env_class
        raise UserError(
            f"environment {name}: all {len(trajectories)} trajectories failed, the first one so: "
            f"{first.metadata.get('error')}; fix the class that environment.classes.{name} names, or what it asks"
        )
