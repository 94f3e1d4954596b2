"""Checks of settings for environments that run an agent."""

from __future__ import annotations

from collections.abc import Iterable

from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals
from skyrl_mega.envs import registry
from skyrl_mega.envs.agent import AgentEnv


@raising
def check_agents(config: Config, names: Iterable[str]) -> Refusals:
    """Rejects settings under which environments of agents (`envs.agent`) cannot run.

    Args:
        config: The settings.
        names: The environments in settings and data rows; environments without an agent are ignored.

    Raises:
        UserError: With an agent's environment, `rollout.generator` or `run.deterministic` is set, a trajectory would
            have to be a single sequence of tokens (`rollout.step_wise=off`, `rollout.conversation=one_message`), or
            would have no time limit. Or an environment cannot be found, or its options are wrong.
    """
    rollout, environments = config.rollout, config.environment
    for name in names:
        cls = registry.resolve(name, environments)
        if not issubclass(cls, AgentEnv):
            continue
        why = f"environment {name} runs an agent"
        if rollout.generator is not None:
            yield "rollout.generator", f"{why}, which asks the policy itself", "give rollout.generator=null"
        if rollout.step_wise == "off":
            text = f"{why}, whose requests may branch, so that a trajectory is no single sequence"
            yield "rollout.step_wise", text, "give rollout.step_wise=merged"
        if rollout.conversation == "one_message":
            text = f"{why}, whose requests are messages of their own"
            yield "rollout.conversation", text, "give rollout.conversation=messages"
        if config.run.deterministic:
            yield "run.deterministic", f"{why}, which decides when it asks the policy", "give run.deterministic=false"
        options = registry.check_options(name, environments)
        if rollout.trajectory_timeout_s is None and cls.longest_run_s(options) is None:
            fix = "give seconds, such as rollout.trajectory_timeout_s=600"
            yield "rollout.trajectory_timeout_s", f"{why}, which nothing would end", fix
