"""Conversions of learning rate schedules, from each program's unit to our optimizer steps.

SkyRL, slime and TRL advance the scheduler after every optimizer step, as here. verl and NeMo-RL advance it once per RL
step, regardless of the number of mini-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config.migrate.convert import Dropped, Result, fitted
from skyrl_mega.config.migrate.state import TranslationState


def share_of_steps(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Converts a share of the run, from 0 to 1, to optimizer steps, for the first setting in `here`. Ignores
    `argument`. `state` is the translation so far.

    Raises:
        Dropped: The value is null or no number, or the length of the run is unknown and the value not 0.
    """
    if value is None:
        raise Dropped("not set there")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Dropped(f"{shown(value)} is no number", look=True)
    if value == 0:
        return {here[0]: 0}, "none"
    return {here[0]: round(value * optimizer_steps(state, here[0]))}, f"{shown(value)} of the optimizer steps"


def rl_steps(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Converts a number of RL steps to optimizer steps, for every setting in `here`. Ignores `argument`. `state` is the
    translation so far.

    Raises:
        Dropped: The value is null or negative, which means "not set" in the other program, or no number; or a setting
            does not allow the result.
    """
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise Dropped(f"{shown(value)} is not set there")
    updates = updates_per_step(state, here[0])
    why = f"{shown(value)} RL steps × {updates} optimizer steps: the scheduler there advances once per RL step"
    return {key: fitted(key, value * updates) for key in here}, why if updates > 1 else ""


def decay_to_the_end(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the learning-rate schedule `value` for the policy, with a decay over all optimizer steps of the run;
    ignores `here` and `argument`. `state` is the translation so far.

    Raises:
        Dropped: The length of the run is unknown.
    """
    steps = optimizer_steps(state, "policy.optimizer.schedule and policy.optimizer.decay_steps")
    return {"policy.optimizer.schedule": value, "policy.optimizer.decay_steps": steps}, "decays over the whole run"


def schedule(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the schedule `here[0]` with the value, and `decay_steps` of the same group at the end of the run. `state`
    is the translation so far.

    `decay_steps` is left out for a constant schedule, for a run of unknown length, and if a key in `argument`, the end
    of the decay in the other program, has a value other than null there, given or by default.

    Raises:
        Dropped: The setting does not allow the value.
    """
    ours = {here[0]: fitted(here[0], value)}
    end = here[0].rpartition(".")[0] + ".decay_steps"
    if value == "constant" or any(state.theirs(key) is not None for key in argument):
        return ours, ""
    if state.ours("run.steps") is None:
        return ours, f"decays over the whole run, whose length only the data says: give {end}"
    return {**ours, end: optimizer_steps(state, end)}, "decays over the whole run"


def optimizer_steps(state: TranslationState, key: str) -> int:
    """Returns the number of optimizer steps in the whole run, of the policy or of the critic.

    Args:
        state: The translation so far.
        key: Our setting to be computed; a key of the group `critic` counts the critic's steps. Named in the error.

    Raises:
        Dropped: `run.steps` is not set: the number depends on the size of the data.
    """
    steps = state.ours("run.steps")
    if steps is None:
        why = f"only the data says how many optimizer steps the run has; give {key} once you know"
        raise Dropped(why, look=True)
    return int(steps * updates_per_step(state, key))


def updates_per_step(state: TranslationState, key: str) -> int:
    """Returns the number of optimizer steps per RL step: of the critic for a key of the group `critic`, else of the
    policy."""
    prompts = state.ours("data.prompts_per_step")
    mini_batches = math.ceil(prompts / (state.ours("data.mini_batch_prompts") or prompts))
    return int(mini_batches * state.ours("critic.epochs" if key.startswith("critic.") else "data.epochs_per_step"))
