"""Rules of a generator of one's own (`rollout.generator`)."""

from __future__ import annotations

from skyrl_mega.config.containers import environment_slots
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals


@raising
def check_generator(c: Config) -> Refusals:
    """Raises a UserError for a generator with `run.deterministic`, or with a limited number of environments (slots or
    containers): both suit independent trajectories only. Does nothing without a generator."""
    if c.rollout.generator is None:
        return
    name = f"rollout.generator={c.rollout.generator}"
    if c.run.deterministic:
        why = f"{name} decides when it asks the policy, so that trajectories cannot wait for one another turn by turn"
        yield "run.deterministic", why, "give run.deterministic=false, or rollout.generator=null", "true"
    if environment_slots(c.environment) is not None:
        why = f"{name} opens as many environments for a prompt as it likes, and groups would wait for one another"
        yield "environment.slots", why, "give environment.slots=null and no containers, or rollout.generator=null"
